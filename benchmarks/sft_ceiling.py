"""How close a training step comes to its own matmuls, and the memory it takes, on this machine.

    python benchmarks/sft_ceiling.py MODEL ROWS.jsonl [--rows 4] [--steps 20] [--repeats 3]

Each arm (with and without activation checkpointing) is a fresh process that fine-tunes MODEL in
fp32 with `rows` rows a step, as scripts/train.py would. Between its steps it times the step's own
matmuls alone: for every weight the forward, the two of the backward, and what the arm recomputes,
at the shapes of the batch. Their time is the ceiling: attention, norms, the softmax over the
vocabulary and the optimizer would have to cost nothing to reach it. Arms are interleaved and
repeated.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "rows_file", metavar="ROWS.jsonl", help="columns question and answer, or messages"
    )
    parser.add_argument("--rows", type=int, default=4, help="rows of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(run_arm(options)))
        return
    results: dict[str, list[dict]] = {arm: [] for arm in ARMS}
    for _ in range(options.repeats):
        for arm in ARMS:  # interleaved: the machine's mood is shared by both
            command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results[arm].append(json.loads(output.splitlines()[-1]))
            print(arm, results[arm][-1], file=sys.stderr, flush=True)
    print(
        "| checkpointing | tokens/s | matmul ceiling, tokens/s | share | peak RSS, GiB | "
        "last loss |"
    )
    print("|---|---|---|---|---|---|")
    for arm, runs in results.items():

        def middle(key: str, runs: list[dict] = runs) -> float:
            return statistics.median(run[key] for run in runs)

        low, high = (f(run["share"] for run in runs) for f in (min, max))
        print(
            f"| {arm} | {middle('tokens_per_second'):.1f} | {middle('ceiling'):.1f} | "
            f"{middle('share'):.0%} ({low:.0%} to {high:.0%}) | {middle('peak_rss') / 2**30:.2f} | "
            f"{runs[0]['loss']:.4f} |"
        )


ARMS = ("on", "off")


def run_arm(options: argparse.Namespace) -> dict[str, float]:
    """One run: tokens/s of real tokens, the ceiling of the same steps, peak RSS."""
    from lean_trl.config import config_from_dict
    from lean_trl.data.feed import open_feeds
    from lean_trl.data.tokenizer import load_tokenizer
    from lean_trl.model.loader import load_model
    from lean_trl.techniques import apply_techniques
    from lean_trl.train.methods import METHODS
    from lean_trl.train.optim import build_optimizer
    from lean_trl.train.step import train_step

    with open(options.rows_file, encoding="utf-8") as lines:
        columns = (
            {"prompt": "question", "completion": "answer"}
            if "question" in json.loads(next(lines))
            else None
        )
    config = config_from_dict(
        {
            "model": {"path": options.model},
            "data": {"path": options.rows_file, "shuffle": False, "columns": columns},
            "train": {
                "micro_batch_size": options.rows,
                "max_steps": options.steps,
                "learning_rate": 1e-5,
            },
            "memory": {"activation_checkpointing": options.arm == "on"},
        }
    )
    tokenizer = load_tokenizer(options.model)
    feed, _, _ = open_feeds(config, tokenizer, "sft")
    model = load_model(options.model)
    around = apply_techniques(model, config)
    optimizer = build_optimizer(model, config.train)
    method = METHODS["sft"].bind(config.loss)
    tokens, seconds, ceiling = 0, 0.0, 0.0
    for number, window in enumerate(feed):
        start = time.perf_counter()
        report = train_step(
            model,
            window.batches,
            method,
            optimizer,
            totals=window.totals,
            max_grad_norm=1.0,
            around=around,
        )
        loss = report.loss.item()
        step_seconds = time.perf_counter() - start
        peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if number >= WARM_UP:
            tokens += window.totals["processed"]
            seconds += step_seconds
            ceiling += sum(
                matmul_seconds(model, batch, options.arm == "on") for batch in window.batches
            )
    return {
        "tokens_per_second": tokens / seconds,
        "ceiling": tokens / ceiling,
        "share": ceiling / seconds,
        "peak_rss": peak_rss,
        "loss": loss,
    }


def matmul_seconds(model, batch, recompute: bool) -> float:
    """Seconds of the bare matmuls of one forward and backward, each distinct shape timed once.

    The head works on the scored rows alone and computes its logits again in the backward.
    """
    from torch import nn

    counts: dict[tuple[int, int, int], int] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for shape, times in shapes(
                batch.num_tokens, *module.weight.shape, 2 if recompute else 1
            ):
                counts[shape] = counts.get(shape, 0) + times
    head = model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
    for shape, times in shapes(batch.num_units, *head.shape, 2):
        counts[shape] = counts.get(shape, 0) + times
    return sum(times * seconds_of(shape) for shape, times in counts.items())


def shapes(rows: int, size_out: int, size_in: int, forwards: int):
    """(m, k, n) of x @ w.T, of grad @ w and of grad.T @ x."""
    return [
        ((rows, size_in, size_out), forwards),
        ((rows, size_out, size_in), 1),
        ((size_out, rows, size_in), 1),
    ]


def seconds_of(shape: tuple[int, int, int]) -> float:
    import torch

    m, k, n = shape
    a, b, out = torch.ones(m, k), torch.ones(k, n), torch.empty(m, n)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
