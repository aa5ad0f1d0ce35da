"""How long the rows are, and what each max_length would cost: the numbers for choosing it.

Everything is counted from histograms, so a million rows are as quick as a thousand once they are
tokenised. The padding share is what micro-batches of random rows cost on average: E[longest of m] =
sum over x of 1 - F(x - 1)^m.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lean_trl.data.packing import pack
from lean_trl.data.store import Store

QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
PAGE = Path(__file__).with_name("lengths.html")


@dataclass(frozen=True)
class Lengths:
    """Token counts of I items with S sequences."""

    kind: str  # key of examples.KINDS
    sequences: np.ndarray  # int64 [S]
    longest: np.ndarray  # int64 [I]; longest sequence of each item
    needed: np.ndarray  # int64 [I]; the least max_length that leaves each sequence a scored token
    series: dict[str, np.ndarray]  # what to show: tokens, or prompt, chosen, rejected, sum


@dataclass(frozen=True)
class Cost:
    """What one max_length does. Shares are of all rows, or of all tokens."""

    max_length: int
    rows_cut: float
    tokens_cut: float
    rows_dropped: float
    padding: float  # of padded micro-batches; padding-free ones have none
    fill: dict[str, float]  # of packed bins, by strategy; empty where packing is not for this kind


def measure(store: Store, kind: str) -> Lengths:
    """The lengths of prepared rows, none of them cut yet."""
    lengths = store.lengths
    first = _first_scored(store)
    if not store.paired:
        name = "prompt" if kind == "prompt" else "tokens"
        return Lengths(kind, lengths, lengths, first + 1, {name: lengths})
    chosen, rejected = lengths[0::2], lengths[1::2]
    prompt = np.minimum(first[0::2], first[1::2])
    series = {"chosen": chosen, "rejected": rejected, "sum": chosen + rejected}
    if kind != "reward":  # a reward model scores no token, so its rows do not say where prompts end
        series = {"prompt": prompt, **series}
    needed = np.maximum(first[0::2], first[1::2]) + 1
    return Lengths(kind, lengths, np.maximum(chosen, rejected), needed, series)


def _first_scored(store: Store) -> np.ndarray:
    """int64 [S]: index of the first token that is predicted; the length where there is none."""
    first = store.lengths.copy()
    # All positions of scored tokens in order; each sequence looks for the next one after its first
    # token.
    for low in range(0, len(store), 65536):
        block = slice(low, low + 65536)
        start, stop = store.start[block], store.stop[block]
        origin = int(start.min())
        places = np.flatnonzero(store.scored[origin : int(stop.max())]) + origin
        at = np.searchsorted(places, start + 1)
        found = np.append(places, np.iinfo(np.int64).max)[at]
        first[block] = np.where(found < stop, found - start, stop - start)
    return first


def cost_of(lengths: Lengths, max_length: int, micro_batch_size: int = 4) -> Cost:
    """What max_length costs.

    >>> ten = np.array([10, 20, 30, 40, 1000])
    >>> cost = cost_of(Lengths("sft", ten, ten, np.ones(5, int), {"tokens": ten}), 64)
    >>> round(cost.rows_cut, 3), round(cost.tokens_cut, 3), cost.rows_dropped
    (0.2, 0.851, 0.0)
    """
    over = lengths.longest > max_length
    whole_or_nothing = lengths.kind in ("reward", "prompt")
    dropped = over if whole_or_nothing else lengths.needed > max_length
    if whole_or_nothing:
        per_item = len(lengths.sequences) // len(lengths.longest)
        kept = lengths.sequences[~np.repeat(over, per_item)]
    else:
        kept = np.minimum(lengths.sequences, max_length)
    tokens = int(lengths.sequences.sum())
    return Cost(
        max_length,
        rows_cut=float(over.mean()),
        tokens_cut=1 - int(kept.sum()) / tokens,
        rows_dropped=float(dropped.mean()),
        padding=padding_share(
            kept, micro_batch_size * len(lengths.sequences) // len(lengths.longest)
        ),
        fill=_fills(lengths, max_length),
    )


def padding_share(lengths: np.ndarray, rows: int) -> float:
    """Average share of padding in micro-batches of `rows` random sequences, padded to the longest.

    >>> round(padding_share(np.array([1, 3]), 2), 3)  # 1 1, 1 3, 3 1, 3 3: longest 2.5, mean 2
    0.2
    """
    if not len(lengths):
        return 0.0
    below = np.cumsum(np.bincount(lengths)) / len(lengths)
    longest = float((1 - below**rows).sum())
    return 1 - float(lengths.mean()) / longest


def _fills(lengths: Lengths, max_length: int) -> dict[str, float]:
    if lengths.kind != "sft":
        return {}
    fills = {}
    for strategy in ("bfd", "bfd_split", "wrapped"):
        packing = pack(lengths.sequences, max_length, strategy)
        fills[strategy] = packing.kept / (len(packing.bins) * max_length)
    return fills


def candidates(lengths: Lengths) -> list[int]:
    """Lengths worth considering:

    powers of two around the data, and where 95 and 99 % of the rows fit.
    """
    longest = int(lengths.longest.max())
    powers = {
        2**p for p in range(6, 20) if 2**p < 2 * longest and 2**p >= np.median(lengths.longest) / 2
    }
    fits = {int(-(-np.quantile(lengths.longest, q) // 64) * 64) for q in (0.95, 0.99)}
    return sorted(powers | fits)


def table(lengths: Lengths, costs: Sequence[Cost], micro_batch_size: int) -> str:
    """The distribution and the costs as text."""
    lines = [f"{len(lengths.longest)} rows, {int(lengths.sequences.sum())} tokens", ""]
    lines.append(
        f"{'':10}" + "".join(f"{name:>9}" for name in ("mean", *(f"{q:.0%}" for q in QUANTILES)))
    )
    for name, values in lengths.series.items():
        numbers = [values.mean(), *np.quantile(values, QUANTILES)]
        lines.append(f"{name:10}" + "".join(f"{number:9.0f}" for number in numbers))
    named = {"prompt": "max_prompt_length"}.get(lengths.kind, "max_length")
    strategies = list(costs[0].fill) if costs else []
    heads = ["rows cut", "tokens cut", "dropped", f"padding x{micro_batch_size}", *strategies]
    lines += ["", f"{named:>17}" + "".join(f"{head:>12}" for head in heads)]
    for cost in costs:
        shares = [
            cost.rows_cut,
            cost.tokens_cut,
            cost.rows_dropped,
            cost.padding,
            *cost.fill.values(),
        ]
        lines.append(f"{cost.max_length:17}" + "".join(f"{share:12.1%}" for share in shares))
    return "\n".join(lines)


def histogram(values: np.ndarray, *, bins: int = 20, width: int = 60) -> str:
    """Bars of '#'; the last one holds the longest 1 %."""
    top = max(int(np.quantile(values, 0.99)), 1)
    step = -(-top // bins)
    counts = np.bincount(np.minimum(values // step, bins))
    most = counts.max()
    rows = []
    for i, count in enumerate(counts.tolist()):
        label = f"{i * step:>8} -{'' if i == bins else f'{(i + 1) * step - 1:>7}'}"
        rows.append(f"{label:18}{'#' * round(width * count / most):{width}} {count}")
    return "\n".join(rows)


def write_page(lengths: Lengths, micro_batch_size: int, file: Path, title: str) -> None:
    """One HTML file with a slider, that needs no network."""
    data: dict[str, Any] = {
        "title": title,
        "kind": lengths.kind,
        "rows": micro_batch_size * len(lengths.sequences) // len(lengths.longest),
        "micro_batch_size": micro_batch_size,
        "items": len(lengths.longest),
        "longest": _counts(lengths.longest),
        "needed": _counts(lengths.needed),
        "sequences": _counts(lengths.sequences),
        "kept": _counts_by(lengths.sequences, lengths.longest),
        "series": {name: _counts(values) for name, values in lengths.series.items()},
        "start": int(min(np.quantile(lengths.longest, 0.95), 1 << 20)),
    }
    # "</" would end the script that the data stand in.
    text = json.dumps(data).replace("</", "<\\/")
    file.write_text(PAGE.read_text(encoding="utf-8").replace("/*DATA*/", text), encoding="utf-8")


def _counts(values: np.ndarray) -> list[list[int]]:
    """[[value, how many], ...], ascending."""
    distinct, counts = np.unique(values, return_counts=True)
    return np.stack([distinct, counts], 1).tolist()


def _counts_by(sequences: np.ndarray, longest: np.ndarray) -> list[list[int]]:
    """[[longest of the item, length, how many], ...]: what is left when whole items are dropped."""
    per_item = len(sequences) // len(longest)
    if per_item == 1:
        return [[value, value, count] for value, count in _counts(sequences)]
    pairs, counts = np.unique(
        np.stack([np.repeat(longest, per_item), sequences], 1), axis=0, return_counts=True
    )
    return np.concatenate([pairs, counts[:, None]], 1).tolist()


def write_image(lengths: Lengths, file: Path, title: str) -> None:
    """A PNG of the distributions. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError("a PNG needs matplotlib: pip install 'lean_trl[plot]'") from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    top = np.quantile(np.concatenate(list(lengths.series.values())), 0.995)
    for name, values in lengths.series.items():
        axes.hist(np.minimum(values, top), bins=80, histtype="step", label=name)
    axes.set(title=title, xlabel="tokens (the last bin holds the longest 0.5 %)", ylabel="rows")
    axes.legend()
    figure.savefig(file)
