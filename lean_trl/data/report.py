"""The data report: what will be trained on, said before the model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lean_trl.config import DataConfig, TrainConfig
from lean_trl.data.items import Items, bin_size
from lean_trl.data.plan import Mixture
from lean_trl.data.sources import Source
from lean_trl.data.store import Store


def describe(
    name: str,
    items: Items,
    mixture: Mixture,
    sources: Sequence[Source],
    formats: Mapping[str, int],
    data: DataConfig,
    train: TrainConfig,
) -> str:
    """A few lines on rows, tokens, what was cut and dropped, and padding.

    Raises ValueError for settings that no row gives an effect to.
    """
    _check_effect(formats, data)
    counts = items.table.counts
    tokens, scored = int(counts["processed"].sum()), int(counts["tokens"].sum())
    kept = items.rows - sum(items.drops.count.values())
    shapes = ", ".join(f"{count} {form.replace('_', ' ')}" for form, count in formats.items())
    lines = [
        f"{name} data: {kept} of {items.rows} rows ({shapes}), {tokens} tokens, "
        f"{scored} of them supervised ({_share(scored, tokens)})"
    ]
    if items.cut:
        lines.append(
            f"{items.cut} tokens cut off by max_length {data.max_length} "
            f"({_share(items.cut, tokens + items.cut)})"
        )
    lines += items.drops.lines(items.rows)
    if same := identical_pairs(items.store):
        lines.append(
            f"{same} pairs whose chosen and rejected are the same: kept, they teach little"
        )
    if items.fill is not None:
        lines.append(
            f"packed into {len(items)} bins of {bin_size(items.store, data)} "
            f"({data.packing_strategy}), {items.fill:.2%} filled"
        )
        if items.empty_bins:
            lines.append(f"{items.empty_bins} bins without trainable tokens dropped")
    else:
        lines.append(_padding_line(items, mixture, data, train))
    if len(sources) > 1:
        per_source = np.bincount(items.source, minlength=len(sources)).tolist()
        used = mixture.per_epoch if len(mixture.items) > 1 else per_source
        lines += [
            f"{source.name}: {count} {'bins' if items.fill is not None else 'rows'} "
            f"an epoch of {have}"
            for source, count, have in zip(sources, used, per_source, strict=True)
        ]
    return "\n  ".join(lines)


def identical_pairs(store: Store) -> int:
    """Pairs whose two sequences are the same tokens."""
    if not store.paired:
        return 0
    lengths = store.lengths
    candidates = np.flatnonzero(lengths[0::2] == lengths[1::2])

    def tokens(s: int) -> np.ndarray:
        return store.tokens[store.start[s] : store.stop[s]]

    return sum(np.array_equal(tokens(2 * p), tokens(2 * p + 1)) for p in candidates.tolist())


def _check_effect(formats: Mapping[str, int], data: DataConfig) -> None:
    """A setting that applies to none of the rows is a mistake."""
    seen = ", ".join(formats)
    with_prompt = {"prompt_completion", "tokenised"}
    if data.completion_only_loss is not None and not with_prompt & formats.keys():
        raise ValueError(
            f"data.completion_only_loss has no effect: no row has prompt and completion (rows: "
            f"{seen})"
        )
    if data.assistant_only_loss and "conversation" not in formats and "tokenised" not in formats:
        raise ValueError(
            f"data.assistant_only_loss has no effect: no row has messages (rows: {seen})"
        )


def padded_share(items: Items, order: np.ndarray, micro_batch_size: int) -> float:
    """Share of padding when every micro-batch is padded to its longest sequence."""
    sequences = items.table.counts["sequences"][order]
    longest = np.maximum.reduceat(items.store.lengths, items.offsets[:-1])[order]
    low = np.arange(0, len(order), micro_batch_size)
    slots = int((np.maximum.reduceat(longest, low) * np.add.reduceat(sequences, low)).sum())
    return 1 - int(items.table.counts["processed"][order].sum()) / slots


def _padding_line(items: Items, mixture: Mixture, data: DataConfig, train: TrainConfig) -> str:
    share = padded_share(items, mixture.epoch(0), train.micro_batch_size)
    size = train.micro_batch_size
    if data.padding_free:
        return f"no padding (micro-batches of {size} padded to their longest row: {share:.1%})"
    return f"{share:.1%} of the tokens of micro-batches of {size} are padding"


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%}"
