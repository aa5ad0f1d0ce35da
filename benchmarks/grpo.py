"""A GRPO step on replayed completions beside TRL's: same ids, same rewards, same losses.

    python benchmarks/grpo.py --model FOLDER --rows gsm8k.jsonl --python PYTHON_WITH_TRL
        [--prompt-tokens 512] [--completion-tokens 64] [--generations 8] [--steps 4]

Prompts are cut from the rows' text, all of --prompt-tokens; completions too, of 16 to
--completion-tokens tokens. What is timed is scoring and learning, not sampling: a step of
--generations completions of one prompt. Both sides count a prompt once for each completion.
Every run is a process of its own, the arms take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import ROOT, Arm, facts, interleave, loss_difference

HERE = ROOT / "benchmarks"
WARM_UP = 2


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        write_rows(args, Path(folder))
        arms = [
            Arm("lean_trl", our_job(args, Path(folder))),
            Arm(
                "TRL",
                their_job(args, Path(folder)),
                command=(args.python, str(HERE / "peer_trl_grpo.py")),
            ),
        ]
        runs = interleave(arms, args.repeats)
    ours, theirs = runs["lean_trl"], runs["TRL"]
    for key, unit, scale in (
        ("tokens_per_second", "tokens/s", 1.0),
        ("tokens_per_cpu_second", "tokens a CPU second", 1.0),
        ("peak_rss", "GiB", 2.0**30),
    ):
        a, b = ours.median(key), theirs.median(key)
        if a is not None and b is not None:
            print(f"{key}: {a / scale:.2f} and {b / scale:.2f} {unit}, {a / b:.2f} times")
    print(f"largest relative difference of a loss: {loss_difference(ours, theirs)}")
    print(json.dumps({**facts(), "failures": [ours.failure, theirs.failure]}))


def write_rows(args: argparse.Namespace, folder: Path) -> None:
    """prompts.jsonl and rollouts.jsonl, both with ids and with the text that gives them."""
    from lean_trl.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    text = Path(args.rows).read_text(encoding="utf-8").splitlines()
    ids = [i for line in text for i in tokenizer.encode(" ".join(json.loads(line).values()))]
    rng = random.Random(0)
    at = 0

    def cut(count: int) -> list[int]:
        nonlocal at
        at += count
        return ids[at - count : at]

    prompts, rollouts = [], []
    for _ in range(WARM_UP + args.steps):
        prompt = {"prompt_ids": cut(args.prompt_tokens)}
        prompts.append(prompt)
        for _ in range(args.generations):
            said = cut(rng.randint(min(16, args.completion_tokens), args.completion_tokens))
            rollouts.append({**prompt, "completion_ids": said, "prompt": "", "value": rng.random()})
    for name, rows in (("prompts", prompts), ("rollouts", rollouts)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "value.py").write_text("def value(value):\n    return value\n", encoding="utf-8")


def our_job(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = {
        "method": "grpo",
        "model": {"path": args.model},
        "data": {
            "path": str(folder / "prompts.jsonl"),
            "shuffle": False,
            "cache_dir": str(folder / "cache"),
        },
        "rollout": {
            "engine": "replay",
            "replay_path": str(folder / "rollouts.jsonl"),
            "num_generations": args.generations,
            "max_completion_length": args.completion_tokens,
            "reward_funcs": f"{folder / 'value.py'}:value",
        },
        "train": {"micro_batch_size": args.generations, "lr_scheduler": "constant"},
        "logging": {"progress": False},
    }
    job = {"config": config, "warm_up": WARM_UP, "steps": args.steps}
    return {**job, "instrument": False, "ceiling": False}


def their_job(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    return {
        "model": args.model,
        "rollouts": str(folder / "rollouts.jsonl"),
        "folder": str(folder / "trl"),
        "generations": args.generations,
        "max_completion_length": args.completion_tokens,
        "warm_up": WARM_UP,
        "steps": args.steps,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder of the weights")
    parser.add_argument("--rows", required=True, help="jsonl of texts")
    parser.add_argument("--python", default=sys.executable, help="a Python that has TRL")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--completion-tokens", type=int, default=64)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
