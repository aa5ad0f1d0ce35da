"""Which items form each window and micro-batch, on every rank, from the length table alone.

An *item* is what must stay together: a row, a preference pair, a packed bin. A *window* is one
optimizer step: a fixed number of items over all ranks. Every rank computes the whole plan, so no
rank has to ask another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lean_trl.types import Batch


@dataclass(frozen=True)
class Window:
    """One optimizer step as one rank sees it."""

    batches: list[Batch]  # on the CPU; as many on every rank
    totals: dict[str, int]  # over all ranks, see types.Totals
    epoch: float  # epochs done when this window is


@dataclass(frozen=True)
class Table:
    """What planning has to know of each of I items. All int64 [I]."""

    tokens: np.ndarray
    scored: np.ndarray
    sequences: np.ndarray
    pairs: np.ndarray
    cost: np.ndarray  # sum of length^2 over its sequences: the share of attention

    def __len__(self) -> int:
        return len(self.tokens)

    def totals(self, items: np.ndarray) -> dict[str, int]:
        """What loss terms may be divided by, over some items."""
        return {
            "tokens": int(self.scored[items].sum()),
            "processed": int(self.tokens[items].sum()),
            "sequences": int(self.sequences[items].sum()),
            "pairs": int(self.pairs[items].sum()),
            "groups": 0,
        }


@dataclass(frozen=True)
class Cut:
    """How a window is cut into micro-batches: by count, or by tokens when max_tokens is set."""

    micro_batch_size: int
    max_tokens: int | None = None
    world_size: int = 1


def epoch_order(num_items: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """int64 [num_items]: the order of an epoch, the same on every rank."""
    if not shuffle:
        return np.arange(num_items)
    return np.random.default_rng([seed, epoch]).permutation(num_items)


def cut_window(items: np.ndarray, table: Table, cut: Cut) -> list[list[np.ndarray]]:
    """[rank][micro-batch] -> items. Every rank has as many micro-batches; some may hold no item.

    On one rank items stay in order. On several, items and whole micro-batches are spread so that
    the ranks' attention costs are about equal: results do not depend on it, because every term has
    one denominator per window.
    """
    if cut.max_tokens is None:
        chunks = _by_count(items, table, cut)
    else:
        chunks = _by_tokens(items, table.tokens, cut.max_tokens)
    rounds = -(-len(chunks) // cut.world_size)
    if cut.world_size == 1:
        return [chunks]
    # Heaviest first, to the rank that has least so far and still has room.
    ranks: list[list[np.ndarray]] = [[] for _ in range(cut.world_size)]
    load = np.zeros(cut.world_size)
    for chunk in sorted(chunks, key=lambda c: -int(table.cost[c].sum())):
        open_ranks = [r for r in range(cut.world_size) if len(ranks[r]) < rounds]
        rank = min(open_ranks, key=lambda r: load[r])
        ranks[rank].append(chunk)
        load[rank] += table.cost[chunk].sum()
    nothing = np.zeros(0, np.int64)
    return [chunks + [nothing] * (rounds - len(chunks)) for chunks in ranks]


def _by_count(items: np.ndarray, table: Table, cut: Cut) -> list[np.ndarray]:
    size = cut.micro_batch_size
    if cut.world_size > 1:
        # Heaviest first, dealt forth and back: every chunk gets its share of heavy items.
        count = -(-len(items) // size)
        heavy_first = items[np.argsort(-table.cost[items], kind="stable")]
        lap = np.arange(len(items)) % (2 * count)
        owner = np.minimum(lap, 2 * count - 1 - lap)
        return [heavy_first[owner == chunk] for chunk in range(count)]
    return [items[low : low + size] for low in range(0, len(items), size)]


def _by_tokens(items: np.ndarray, tokens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Consecutive items, as many as fit. Each fits alone: the feed has made sure."""
    chunks, low, filled = [], 0, 0
    for position, length in enumerate(tokens[items].tolist()):
        if filled + length > budget and position > low:
            chunks.append(items[low:position])
            low, filled = position, 0
        filled += length
    chunks.append(items[low:])
    return chunks


@dataclass(frozen=True)
class Schedule:
    """Which items each window of the run holds, counted from 0."""

    num_items: int
    window_size: int
    steps: int  # windows of the whole run
    shuffle: bool
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """The last window of an epoch may be short: none crosses an epoch's end."""
        return -(-self.num_items // self.window_size)

    def epoch_after(self, window: int) -> float:
        """Epochs done when `window` is."""
        epoch, position = divmod(window, self.steps_per_epoch)
        return epoch + min((position + 1) * self.window_size, self.num_items) / self.num_items

    def windows(self, first: int = 0) -> Iterator[np.ndarray]:
        """The items of window `first` and of all that follow."""
        order, order_epoch = np.zeros(0, np.int64), -1
        for window in range(first, self.steps):
            epoch, position = divmod(window, self.steps_per_epoch)
            if epoch != order_epoch:
                order_epoch = epoch
                order = epoch_order(self.num_items, self.shuffle, self.seed, epoch)
            yield order[position * self.window_size : (position + 1) * self.window_size]
