"""Prepared sequences -> the items that windows are made of: long ones cut or dropped, packing.

Everything here works on lengths; no token is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lean_trl.config import DataConfig
from lean_trl.data.examples import UNSCORED
from lean_trl.data.packing import fragments, pack
from lean_trl.data.plan import Table
from lean_trl.data.prepare import Drops, Prepared
from lean_trl.data.store import Store
from lean_trl.types import UNITS, Example


@dataclass(frozen=True)
class Items:
    """Item i holds the sequences [offsets[i], offsets[i + 1]) of `store`."""

    store: Store
    offsets: np.ndarray  # int64 [I + 1]
    rows: int  # rows read
    drops: Drops
    cut: int = 0  # tokens lost to max_length, with them fragments that teach nothing
    fill: float | None = None  # of the bins, when packed
    empty_bins: int = 0  # dropped: none of their tokens was trainable

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def source(self) -> np.ndarray:
        """int64 [I]: which source each item comes from."""
        return self.store.source[self.offsets[:-1]]

    @cached_property
    def table(self) -> Table:
        """What planning has to know."""
        lengths, scored, first = self.store.lengths, self.store.count_scored(), self.offsets[:-1]
        sequences = np.diff(self.offsets)
        pairs, chosen = np.zeros_like(sequences), np.zeros_like(sequences)
        if self.store.paired:
            pairs = sequences // 2
            chosen = np.add.reduceat(np.where(np.arange(len(scored)) % 2, 0, scored), first)
        counts = {
            "tokens": np.add.reduceat(scored, first),
            "processed": np.add.reduceat(lengths, first),
            "sequences": sequences,
            "pairs": pairs,
            "groups": np.zeros_like(sequences),
            "chosen_tokens": chosen,
        }
        assert counts.keys() == set(UNITS)
        return Table(counts, cost=np.add.reduceat(lengths * lengths, first))


def make_items(prepared: Prepared, data: DataConfig, kind: str, *, packing: bool) -> Items:
    """The items of some prepared rows; what is left out is counted in `drops`.

    Raises ValueError when nothing is left, or for settings that do not fit the kind.
    """
    if packing and kind != "sft" and data.packing_strategy != "bfd":
        raise ValueError(
            f"data.packing_strategy {data.packing_strategy} cuts rows into pieces, but the loss of "
            f"{kind} rows is of whole completions: set it bfd"
        )
    if packing and data.max_length is None:
        raise ValueError("data.packing needs data.max_length, the size of a bin")
    store, drops = prepared.store, prepared.drops.copy()
    cut, fill, empty_bins = 0, None, 0
    if not packing or data.packing_strategy == "bfd":
        store, cut = _shorten(store, data, kind, drops)
    elif data.packing_strategy == "bfd_split":
        store = _keep(store, store.count_scored() > 0, drops, "no trainable tokens")
    offsets = np.arange(0, len(store) + 1, store.per_item)
    if packing and len(store):
        before = int(store.lengths.sum())
        store, offsets, empty_bins = _pack(store, data)
        cut += before - int(store.lengths.sum()) if data.packing_strategy == "bfd_split" else 0
        space = (len(offsets) - 1) * bin_size(store, data)
        fill = float(store.lengths.sum() / max(space, 1))
    if len(offsets) < 2:
        lines = "\n  ".join(drops.lines(prepared.rows))
        raise ValueError(f"no row has anything to train on:\n  {lines}")
    return Items(store, offsets, prepared.rows, drops, cut, fill, empty_bins)


def _shorten(store: Store, data: DataConfig, kind: str, drops: Drops) -> tuple[Store, int]:
    """(every sequence at most max_length tokens, tokens cut)."""
    if kind == "prompt":  # bounded by what the engine takes, not by the training length
        return store, 0
    limit = data.max_length
    if limit is not None and data.overlong == "drop":
        store = _keep(store, store.lengths <= limit, drops, "over data.max_length")
    start, stop = store.start, store.stop
    if limit is not None and data.truncation_mode == "keep_start":
        stop = np.minimum(stop, start + limit)
    elif limit is not None:
        start = np.maximum(start, stop - limit)
    cut = int((store.lengths - (stop - start)).sum())
    store = store.select(np.arange(len(store)), start, stop)
    if kind not in UNSCORED:
        reason = "no trainable tokens" + (" after truncation" if cut else "")
        store = _keep(store, store.count_scored() > 0, drops, reason)
    return store, cut


def _keep(store: Store, good: np.ndarray, drops: Drops, reason: str) -> Store:
    """The items all of whose sequences are good."""
    if store.paired:
        good = np.repeat(good[0::2] & good[1::2], 2)
    if good.all():
        return store
    first = int(np.argmin(good))
    source = (store.files[store.file[first]], int(store.row[first]))
    drops.add(reason, source, int((~good).sum()) // store.per_item)
    return store.select(good)


def bin_size(store: Store, data: DataConfig) -> int:
    """Tokens that a bin has room for: max_length for each sequence of an item.

    So a pair always fits: packing cuts and drops nothing that is kept without it.
    """
    assert data.max_length is not None
    return data.max_length * store.per_item


def _pack(store: Store, data: DataConfig) -> tuple[Store, np.ndarray, int]:
    """(segments in the order of their bins, bin offsets, bins dropped as none of them is scored).

    Sources do not share bins.
    """
    assert data.max_length is not None
    if store.paired:
        return *_pack_pairs(store, bin_size(store, data)), 0
    if data.packing_strategy == "bfd_split":
        document, start, length = fragments(store.lengths, data.max_length)
        start = store.start[document] + start
        store = store.select(document, start, start + length)
        # A fragment sees nothing of the others, so one with no scored token teaches nothing.
        store = store.select(store.count_scored() > 0)
    parts = []
    for source in np.unique(store.source):
        mine = np.flatnonzero(store.source == source)
        parts.append((mine, pack(store.lengths[mine], data.max_length, data.packing_strategy)))
    document = np.concatenate([mine[packing.document] for mine, packing in parts])
    start = store.start[document] + np.concatenate([packing.start for _, packing in parts])
    length = np.concatenate([packing.length for _, packing in parts])
    counts = np.concatenate([np.diff(packing.bin_offsets) for _, packing in parts])
    packed = store.select(document, start, start + length)
    if data.packing_strategy != "wrapped":
        return packed, _offsets(counts), 0
    if data.wrapped_attention:
        # Documents lie one after another in the store, so a bin is one stretch of tokens.
        first = _offsets(counts)
        packed = packed.select(first[:-1], packed.start[first[:-1]], packed.stop[first[1:] - 1])
        counts = np.ones_like(counts)
    learns = np.add.reduceat(packed.count_scored(), _offsets(counts)[:-1]) > 0
    return packed.select(np.repeat(learns, counts)), _offsets(counts[learns]), int((~learns).sum())


def _pack_pairs(store: Store, size: int) -> tuple[Store, np.ndarray]:
    """(pairs in the order of their bins, bin offsets): a pair is one document of both lengths."""
    lengths = store.lengths[0::2] + store.lengths[1::2]
    source = store.source[0::2]
    pairs, counts = [], []
    for number in np.unique(source):
        mine = np.flatnonzero(source == number)
        packing = pack(lengths[mine], size)
        pairs.append(mine[packing.document])
        counts.append(np.diff(packing.bin_offsets))
    order = np.concatenate(pairs)
    sequences = np.stack([2 * order, 2 * order + 1], axis=1).reshape(-1)
    return store.select(sequences), _offsets(2 * np.concatenate(counts))


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def swap_completion(example: Example, other: Example, max_length: int | None = None) -> Example:
    """The prompt of `example` with the completion of `other`, cut at its end to max_length."""
    assert example.scored is not None and other.scored is not None
    prompt = len(example) - example.num_scored
    completion = other.input_ids[len(other) - other.num_scored :]
    ids = np.concatenate([example.input_ids[:prompt], completion])[:max_length]
    return Example(ids, np.arange(len(ids)) >= prompt, source=example.source)
