"""The figures of a memory benchmark in words: CSV and markdown."""

from __future__ import annotations

import csv
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from harness import Runs, loss_difference, markdown, size
from peak import CATEGORIES
from walks import Plan

# Least difference in a loss (relative, fp32) that means other work than the first arm's.
TOLERANCE = 1e-3
# key of a result -> (heading, whether it is bytes). Those that no arm has are left out.
COLUMNS = {
    "peak_live": ("peak of live tensors", True),
    "cuda_allocated": ("CUDA allocated", True),
    "cuda_reserved": ("CUDA reserved", True),
    "cuda_driver": ("CUDA driver", True),
    "cuda_alloc_retries": ("alloc retries", False),
    "pinned": ("pinned host", True),
    "peak_rss": ("peak RSS", True),
    "saved_for_backward": ("saved for backward", True),
    "tokens_per_second": ("tokens/s", False),
    "tokens_per_cpu_second": ("tokens per CPU second", False),
    "supervised_per_second": ("supervised tokens/s", False),
    "share_of_ceiling": ("share of matmul ceiling", False),
    "share_of_ceiling_cpu": ("the same in CPU time", False),
    "mfu_palm": ("MFU (PaLM)", False),
    "mfu_needed": ("MFU (needed)", False),
}
SHARES = ("share_of_ceiling", "share_of_ceiling_cpu", "mfu_palm", "mfu_needed")


def columns_of(runs: Mapping[str, Runs]) -> list[str]:
    """The columns that any arm has a figure for."""
    return [key for key in COLUMNS if any(arm.values(key) for arm in runs.values())]


def write_csv(plan: Plan, runs: Mapping[str, Runs], path: Path) -> None:
    """One line an arm: median, least and most of each figure, bytes and tokens per second."""
    keys = columns_of(runs)
    header = ["arm", "walks", "failure", "loss_difference"]
    header += [f"{key}{part}" for key in keys for part in ("", "_least", "_most")]
    header += [f"at_peak_{category}" for category in CATEGORIES]
    with open(path, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(header)
        for name, arm in runs.items():
            walks = " ".join(walk for walk, names in plan.walks.items() if name in names.values())
            difference = loss_difference(arm, runs["none"])
            row: list[Any] = [name, walks, arm.failure or "", difference]
            for key in keys:
                row += [arm.median(key), *(arm.spread(key) or ("", ""))]
            parts = breakdown(arm)
            table.writerow([*row, *(parts.get(category, "") for category in CATEGORIES)])


def report_markdown(
    title: str, plan: Plan, runs: Mapping[str, Runs], about: Mapping[str, str]
) -> str:
    """The walks as tables, the parts of each peak, and what was measured on what."""
    lines = [f"# Memory per technique: {title}\n"]
    for heading, walk in plan.walks.items():
        lines += [f"## {heading.capitalize()}\n", arms_table(walk, runs, plan.inexact)]
    lines += ["## At the peak of live tensors\n", parts_table(runs)]
    for name, arm in runs.items():
        if arm.results:
            lines += [f"Largest holders, {name}:\n", holders_table(arm)]
    if plan.notes:
        lines += ["## Techniques without an arm, or not in the ladder\n"]
        lines += [f"- {name}: {reason}" for name, reason in plan.notes.items()] + [""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    return "\n".join(lines) + "\n"


def arms_table(
    walk: Mapping[str, str], runs: Mapping[str, Runs], inexact: Container[str] = ()
) -> str:
    """Medians with their spread, each memory figure also as a ratio to the first arm's."""
    keys = columns_of(runs)
    header = ["arm", *(COLUMNS[key][0] for key in keys), "loss differs by"]
    rows = []
    first = runs[next(iter(walk.values()))]
    for label, name in walk.items():
        arm = runs[name]
        if not arm.results:
            rows.append([label, arm.failure or "no result", *[""] * (len(header) - 2)])
            continue
        cells = [figure(arm, key, first) for key in keys]
        rows.append([label, *cells, losses(arm, runs["none"], name not in inexact)])
    return markdown(header, rows)


def figure(arm: Runs, key: str, base: Runs | None = None) -> str:
    """The median of a figure in words, and half its spread: 1.20 GiB (0.61x), 64.1 +-2%."""
    value, spread = arm.median(key), arm.spread(key)
    if value is None or spread is None:
        return ""
    if COLUMNS[key][1]:
        first = None if base is None or base is arm else base.median(key)
        return size(value) + (f" ({value / first:.2f}x)" if first else "")
    if key == "cuda_alloc_retries":
        return f"{value:.0f}"
    text = f"{value:.0%}" if key in SHARES else f"{value:.4g}"
    if len(arm.results) == 1 or not value:
        return text
    return f"{text} +-{(spread[1] - spread[0]) / 2 / value:.0%}"


def losses(arm: Runs, base: Runs, exact: bool = True) -> str:
    """How far the losses are from the first arm's, in words. Not exact: by design."""
    difference = loss_difference(arm, base)
    if difference is None:
        return ""
    if difference <= TOLERANCE:
        return f"{difference:.0e}"
    return f"{difference:.0e} " + ("NOT THE SAME WORK" if exact else "trains something else")


def parts_table(runs: Mapping[str, Runs]) -> str:
    """Bytes of each category at the peak of live tensors."""
    rows = [
        [name, *(size(breakdown(arm)[category]) for category in CATEGORIES)]
        for name, arm in runs.items()
        if breakdown(arm)
    ]
    return markdown(["arm", *CATEGORIES], rows)


def holders_table(arm: Runs) -> str:
    """The largest holders of the peak; * stands for every layer."""
    rows = [
        [
            size(holder["nbytes"]),
            holder["category"],
            holder["place"],
            f"{holder['count']} x {holder['shape']} {holder['dtype']}",
        ]
        for holder in arm.results[0].get("largest", [])
    ]
    return markdown(["bytes", "category", "where", "tensors"], rows)


def breakdown(arm: Runs) -> dict[str, int]:
    """Bytes of each category at the peak; empty when there is no result."""
    return arm.results[0].get("breakdown", {}) if arm.results else {}
