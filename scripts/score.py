"""Score all rows of a recipe with its reference:  torchrun scripts/score.py recipe.yaml [...]

Writes <output_dir>/ref_logprobs, which a run of the same recipe with
loss.precompute_ref_log_probs true reads; such a run would otherwise do this itself before its first
step. Use it to score on other machines, or again after a change.
"""

from lean_trl.config import config_from_command_line


def main() -> None:
    config = config_from_command_line(__doc__)
    from lean_trl.train.reference import score_rows  # torch only after the settings are right

    score_rows(config)


if __name__ == "__main__":
    main()
