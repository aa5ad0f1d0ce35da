"""Peak against length: bytes per token, what fits into a budget, and one run that checks it.

Memory of a step is a + b * length once blocks are recomputed or kept, attention is linear in memory
and the logits never exist. So a few short runs give b, and the longest sequence that fits is an
extrapolation; one run at another length says how good it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import Arm, Runs, interleave, markdown, size

from lean_trl.config import Config

# The first of the two is fitted; the second is what the process takes beside it.
MEASURES = {"cuda": ("cuda_allocated", "cuda_driver"), "cpu": ("peak_live", "peak_rss")}


class Line(NamedTuple):
    """bytes = intercept + per_token * length, by least squares; error: the largest, relative."""

    intercept: float
    per_token: float
    error: float

    def at(self, length: float) -> float:
        return self.intercept + self.per_token * length

    def longest(self, budget: float) -> int:
        """The longest sequence whose peak stays within `budget` bytes.

        >>> Line(100.0, 2.0, 0.0).longest(150.9)
        25
        """
        if self.per_token <= 0:
            raise ValueError(
                f"the peak does not grow with the length ({self.per_token:.1f} bytes per token): "
                "give longer lengths"
            )
        return max(0, int((budget - self.intercept) // self.per_token))


def fit(lengths: Sequence[int], peaks: Sequence[float]) -> Line:
    """The line through at least two different lengths.

    >>> fit([10, 20, 40], [130.0, 160.0, 220.0])._asdict()["per_token"].round(6)
    np.float64(3.0)
    """
    if len(set(lengths)) < 2:
        raise ValueError(f"two different lengths at least, got {list(lengths)}")
    per_token, intercept = np.polyfit(lengths, peaks, 1)
    fitted = intercept + per_token * np.asarray(lengths)
    return Line(intercept, per_token, float(np.abs(fitted / np.asarray(peaks) - 1).max()))


def rows_of(kind: str, length: int, count: int) -> list[dict[str, Any]]:
    """Tokenised rows of `count` units, each sequence of exactly `length` tokens."""
    ids = [3 + i % 97 for i in range(length)]
    other = [*ids[: length // 2], *(4 + i % 89 for i in range(length - length // 2))]
    prompt, answer = ids[: length // 2], ids[length // 2 :]
    rows: dict[str, dict[str, Any]] = {
        "sft": {"input_ids": ids},
        "preference": {"chosen_ids": ids, "rejected_ids": other},
        "reward": {"chosen_ids": ids, "rejected_ids": other},
        "unpaired": {"prompt_ids": prompt, "completion_ids": answer},
    }
    if kind not in rows:
        raise ValueError(f"the slope needs rows of a known length, which {kind} rows have not")
    row = rows[kind]
    return [row | ({"label": n % 2 == 0} if kind == "unpaired" else {}) for n in range(count)]


def job(config: Config, length: int, folder: Path, options: Any) -> dict[str, Any]:
    """A run whose windows are one row (or pair, or two answers for KTO) of that length."""
    from lean_trl.train.methods import METHODS

    units = 2 if config.method == "kto" else 1
    file = folder / f"{length}.jsonl"
    count = units * options.ranks * (options.steps + options.warm_up)
    rows = rows_of(METHODS[config.method].examples, length, count)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train = {"micro_batch_size": units, "batch_size": units * options.ranks}
    train |= {"gradient_accumulation_steps": None, "eval_every": None}
    tree = asdict(config)
    tree["train"] |= train | {"max_tokens_per_micro_batch": None}
    tree["data"] = {"path": str(file), "max_length": length, "cache_dir": str(folder)}
    return {"config": tree, "warm_up": options.warm_up, "steps": options.steps, "ceiling": False}


def measure_slope(
    config: Config,
    lengths: Sequence[int],
    options: argparse.Namespace,
    about: Mapping[str, str],
    out: Path,
) -> None:
    """Measure, fit, predict, check; writes slope.csv and slope.md and prints the latter."""
    from memory import command_of

    device_type, total = _device()
    inner, outer = MEASURES[device_type]
    command = command_of(options.ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(lengths: Sequence[int], repeats: int) -> dict[str, Runs]:
            arms = [Arm(str(n), job(config, n, folder, options), command) for n in lengths]
            return interleave(arms, repeats, timeout_s=options.timeout)

        runs = run(lengths, options.repeats)
        peaks = {n: runs[str(n)].median(inner) for n in lengths}
        measured = {n: peak for n, peak in peaks.items() if peak is not None}
        line = fit(list(measured), list(measured.values()))
        beside = statistics.median(_beside(runs[str(n)], inner, outer) for n in measured)
        budget = options.budget_gib * 2**30 if options.budget_gib else total
        longest = line.longest(budget - beside)
        # Where a length is cheap to run, the prediction itself; else one far from those measured.
        check = min(longest, 2 * max(lengths))
        runs |= run([check], 1)
    text = describe(line, runs, check, longest, budget, beside, inner)
    text += "\n" + "".join(f"- {name}: {value}\n" for name, value in about.items())
    (out / "slope.md").write_text(text, encoding="utf-8")
    with open(out / "slope.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["length", inner, outer, "predicted", "tokens_per_second", "failure"])
        for name, arm in runs.items():
            figures = (arm.median(key) for key in (inner, outer))
            rate = arm.median("tokens_per_second")
            table.writerow([name, *figures, round(line.at(int(name))), rate, arm.failure or ""])
    print(text)


def describe(
    line: Line,
    runs: Mapping[str, Runs],
    check: int,
    longest: int,
    budget: float,
    beside: float,
    inner: str,
) -> str:
    """The fit, each length beside it, and the check, in markdown."""
    rows = []
    for name, arm in runs.items():
        peak, predicted = arm.median(inner), line.at(int(name))
        mark = " (check)" if int(name) == check else ""
        difference = "" if peak is None else f"{predicted / peak - 1:+.1%}"
        shown = size(peak) if peak is not None else arm.failure or "no result"
        rows.append([name + mark, shown, size(predicted), difference])
    return (
        markdown(["length", inner, "line", "line is off by"], rows)
        + f"\n{line.per_token / 1024:.1f} KiB per token over {size(line.intercept)}; the fitted "
        f"lengths lie within {line.error:.1%} of the line. The process takes {size(beside)} "
        f"beside it, so {longest} tokens would fit into {size(budget)}"
        + ("" if longest == check else ", an extrapolation that was not run")
        + ".\n"
    )


def _beside(runs: Runs, inner: str, outer: str) -> float:
    peak, process = runs.median(inner), runs.median(outer)
    assert peak is not None and process is not None
    return max(0.0, process - peak)


def _device() -> tuple[str, float]:
    """(cuda or cpu, bytes of its memory)."""
    import torch

    if torch.cuda.is_available():
        return "cuda", torch.cuda.mem_get_info()[1]
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemTotal"):
            return "cpu", int(line.split()[1]) * 1024
    raise ValueError("no /proc/meminfo: give --budget-gib")
