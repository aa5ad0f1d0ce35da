"""The figures of a memory benchmark as a picture: stacked bars of each peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import Runs
from peak import CATEGORIES
from report import breakdown
from walks import Plan

# One hue a category, told apart by colour-blind readers too (Okabe and Ito); parts that every
# technique could move are the strong ones.
COLORS = {
    "parameters": "#0072b2",
    "reference": "#56b4e9",
    "optimizer": "#009e73",
    "gradients": "#f0e442",
    "activations": "#d55e00",
    "head": "#cc79a7",
    "temporaries": "#999999",
}


def draw(title: str, plan: Plan, runs: Mapping[str, Runs], path: Path) -> Path | None:
    """Stacked bars of the peaks, a room for each walk; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    walks = [
        (HEADINGS[name], {label: runs[n] for label, n in walk.items() if breakdown(runs[n])})
        for name, walk in plan.walks.items()
    ]
    walks = [walk for walk in walks if walk[1]] or walks[:1]
    bars = [len(arms) for _, arms in walks]
    chart = Figure(figsize=(10, 2.4 + 0.42 * sum(bars)), layout="constrained")
    rooms = chart.subplots(
        len(walks), 1, sharex=True, squeeze=False, height_ratios=[max(1, n) for n in bars]
    )[:, 0]
    unit, scale = _unit([arm for _, arms in walks for arm in arms.values()])
    for room, (heading, arms) in zip(rooms, walks, strict=True):
        left = [0.0] * len(arms)
        for category in CATEGORIES:
            widths = [breakdown(arm)[category] / scale for arm in arms.values()]
            if any(widths):
                room.barh(list(arms), widths, left=left, color=COLORS[category], label=category)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, total in enumerate(left):
            room.text(total, place, f" {total:.3g}", va="center")
        room.set_title(heading, loc="left", fontsize=11)
        room.invert_yaxis()
        room.margins(x=0.08)
        room.spines[["top", "right"]].set_visible(False)
    rooms[-1].set_xlabel(f"peak of live tensors, {unit}")
    handles = {
        label: handle
        for room in rooms
        for handle, label in zip(*room.get_legend_handles_labels(), strict=True)
    }
    chart.legend(
        [handles[c] for c in CATEGORIES if c in handles],
        [c for c in CATEGORIES if c in handles],
        loc="outside lower center",
        ncols=len(CATEGORIES),
        frameon=False,
    )
    chart.suptitle(title, fontsize=12)
    chart.savefig(path, dpi=120)
    return path


HEADINGS = {
    "alone": "Alone",
    "ladder": "Ladder: each added to those above",
    "leave-one-out": "The whole ladder, and without one",
}


def _unit(arms: Sequence[Runs]) -> tuple[str, int]:
    most = max((sum(breakdown(arm).values()) for arm in arms), default=0)
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
