"""Train a model:  torchrun scripts/train.py [recipe.yaml] [--section.key value ...]

Without a recipe: SFT of the built-in tiny model on built-in arithmetic, about two minutes on two
CPU cores. Without torchrun (`python scripts/train.py`) it is one process; more ranks: torchrun
--nproc-per-node N.
"""

from lean_trl.config import config_from_command_line


def main() -> None:
    config = config_from_command_line(__doc__)
    from lean_trl.train.loop import train  # torch only after the settings are known to be right

    train(config)


if __name__ == "__main__":
    main()
