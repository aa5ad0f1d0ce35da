"""Packing: documents into bins of at most max_length tokens.

bfd        exact best-fit decreasing; a document over max_length is cut, its rest dropped
bfd_split  the same after cutting longer documents into fragments, each a document of its own
wrapped    the documents one after another in their order, cut every max_length tokens

Best-fit decreasing puts each document, longest first, into the fullest bin that still has room.
Lengths are small integers, so equal ones move in bulk: with ready bins of space s, the smallest
space that length l fits in, each such bin takes s // l documents at once, because a bin that has
room left for another l is by then the fullest. The result is that of the one-at-a-time rule, ties
included (the bin that has waited longest in its space goes first).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

STRATEGIES = ("bfd", "bfd_split", "wrapped")


@dataclass(frozen=True)
class Packing:
    """K segments of documents in B bins.

    Segments of bin b are [bin_offsets[b], bin_offsets[b + 1]).
    """

    document: np.ndarray  # int64 [K]; index into lengths
    start: np.ndarray  # int64 [K]; first token of the segment in its document
    length: np.ndarray  # int64 [K]; at least 1
    bin_offsets: np.ndarray  # int64 [B + 1]
    kept: int  # tokens
    dropped: int  # tokens

    @property
    def bins(self) -> Bins:
        """Lazy view: bins[b] is the list of (document, start, length) of bin b."""
        return Bins(self)

    @property
    def sizes(self) -> np.ndarray:
        """int64 [B]: tokens of each bin."""
        return (
            np.add.reduceat(self.length, self.bin_offsets[:-1]) if len(self.bins) else self.length
        )


class Bins(Sequence):
    """The bins of a Packing, made when asked for."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing

    def __len__(self) -> int:
        return len(self._packing.bin_offsets) - 1

    def __getitem__(self, b):
        if isinstance(b, slice):
            return [self[i] for i in range(*b.indices(len(self)))]
        if not -len(self) <= b < len(self):
            raise IndexError(f"bin {b} of {len(self)}")
        p, b = self._packing, b % len(self)
        span = slice(p.bin_offsets[b], p.bin_offsets[b + 1])
        columns = (p.document[span].tolist(), p.start[span].tolist(), p.length[span].tolist())
        return list(zip(*columns, strict=True))

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        return (self[b] for b in range(len(self)))


def pack(lengths: Sequence[int] | np.ndarray, max_length: int, strategy: str = "bfd") -> Packing:
    """Fill bins of `max_length` tokens with documents of the given lengths (0 is dropped).

    Raises ValueError for an unknown strategy, a max_length below 1 or a negative length.

    >>> packing = pack([7, 3, 4, 2, 1], 5)
    >>> packing.bins[:]                                          # (document, start, length)
    [[(0, 0, 5)], [(2, 0, 4), (4, 0, 1)], [(1, 0, 3), (3, 0, 2)]]
    >>> packing.kept, packing.dropped, pack([7, 3, 4, 2, 1], 5, "bfd_split").kept
    (15, 2, 17)
    """
    lengths = np.asarray(lengths, np.int64)
    if strategy not in STRATEGIES:
        raise ValueError(
            f"unknown packing strategy {strategy!r}: expected one of {', '.join(STRATEGIES)}"
        )
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if lengths.ndim != 1 or (len(lengths) and lengths.min() < 0):
        raise ValueError("lengths must be a flat list of numbers that are not negative")
    if strategy == "wrapped":
        return _wrap(lengths, max_length)
    document = np.flatnonzero(lengths)
    start, length = np.zeros(1, np.int64), lengths[document]
    if len(length) and length.max() > max_length:
        if strategy == "bfd":
            length = np.minimum(length, max_length)
        else:
            piece, start, length = fragments(length, max_length)
            document = document[piece]
    bins, order = _best_fit_decreasing(length, max_length)
    placed = order[stable_argsort(bins)]
    kept = int(length.sum())
    return Packing(
        document[placed],
        start[placed] if len(start) > 1 else np.zeros(len(placed), np.int64),
        length[placed],
        np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(bins))]),
        kept,
        int(lengths.sum()) - kept,
    )


def fragments(lengths: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every document cut into full pieces and a shorter last one: (document, start, length)."""
    pieces = -(-lengths // max_length)
    document = np.repeat(np.arange(len(lengths)), pieces)
    first = np.cumsum(pieces) - pieces
    start = (np.arange(len(document)) - first[document]) * max_length
    return document, start, np.minimum(lengths[document] - start, max_length)


def _wrap(lengths: np.ndarray, max_length: int) -> Packing:
    document = np.flatnonzero(lengths)
    lengths = lengths[document]
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    begins = ends - lengths
    cuts = np.arange(0, total, max_length)
    # A segment begins where a document or a bin does: merge the two sorted lists, common values
    # once.
    at = np.searchsorted(begins, cuts)
    inside = begins[np.minimum(at, len(begins) - 1)] != cuts if total else np.zeros(0, bool)
    position = at + np.cumsum(inside) - inside  # of each cut among the segments
    is_cut = np.zeros(len(begins) + int(inside.sum()), bool)
    is_cut[position[inside]] = True
    first = np.empty(len(is_cut), np.int64)
    first[is_cut], first[~is_cut] = cuts[inside], begins
    owner = np.cumsum(~is_cut) - 1
    length = np.diff(np.append(first, total))
    offsets = np.append(position, len(first))
    return Packing(document[owner], first - begins[owner], length, offsets, total, 0)


def _best_fit_decreasing(length: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """(bin of each item, item) in the order of placement:

    longest first, equal ones in their order.
    """
    order = stable_argsort(max_length - length)
    counts = np.bincount(length, minlength=max_length + 1)
    bins = np.empty(len(length), np.int32)
    spaces = _Spaces()
    done = opened = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[size])
        while left:
            space = spaces.smallest(size)
            if space is None:
                space, each = max_length, max_length // size
                new = -(-left // each)
                ids = np.arange(opened, opened + new, dtype=np.int32)
                opened += new
            else:
                each = space // size
                ids = spaces.take(space, -(-left // each))
            items = min(left, len(ids) * each)
            full, rest = divmod(items, each)
            bins[done : done + items] = np.repeat(ids, each)[:items]
            spaces.put(space - each * size, ids[:full])
            spaces.put(space - rest * size, ids[full:])  # at most one bin, the last that was needed
            done, left = done + items, left - items
    return bins, order


class _Spaces:
    """Bins by the space that they have left, first in first out."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[np.ndarray]] = {}
        self._mask = 0  # bit s is set when bins with space s wait: one shift finds the next one

    def smallest(self, size: int) -> int | None:
        """The least space that `size` fits in."""
        above = self._mask >> size
        return size + (above & -above).bit_length() - 1 if above else None

    def take(self, space: int, count: int) -> np.ndarray:
        """Up to `count` bins, those that have waited longest."""
        queue = self._queues[space]
        taken = []
        while queue and count:
            ids = queue.popleft()
            if len(ids) > count:
                queue.appendleft(ids[count:])
                ids = ids[:count]
            taken.append(ids)
            count -= len(ids)
        if not queue:
            self._mask &= ~(1 << space)
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def put(self, space: int, ids: np.ndarray) -> None:
        """Let bins wait with `space` left; full ones are done."""
        if space and len(ids):
            self._queues.setdefault(space, deque()).append(ids)
            self._mask |= 1 << space


def stable_argsort(keys: np.ndarray) -> np.ndarray:
    """Stable argsort of ints from 0 on.

    numpy's radix sort, 8x its merge sort at 1 M, takes 16 bits at a time.
    """
    order = np.argsort(keys.astype(np.uint16), kind="stable")
    top = int(keys.max()) if len(keys) else 0
    for shift in range(16, top.bit_length(), 16):
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
    return order
