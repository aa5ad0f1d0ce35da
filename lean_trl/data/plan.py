"""Which items form each window and micro-batch, on every rank, from the length table alone.

An *item* is what must stay together: a row, a preference pair, a packed bin. A *window* is one
optimizer step: a fixed number of items over all ranks. Every rank computes the whole plan, so no
rank has to ask another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lean_trl.types import Batch


@dataclass(frozen=True)
class Window:
    """One optimizer step as one rank sees it."""

    batches: list[Batch]  # on the CPU; as many on every rank
    totals: dict[str, int]  # over all ranks, see types.Totals
    epoch: float  # epochs done when this window is
    # What the host knows of it and logs, the same on every rank.
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """What planning has to know of each of I items."""

    counts: Mapping[str, np.ndarray]  # int64 [I] for each of types.UNITS
    cost: np.ndarray  # int64 [I]; sum of length^2 over its sequences: its share of attention

    def __len__(self) -> int:
        return len(self.cost)

    def totals(self, items: np.ndarray) -> dict[str, int]:
        """What loss terms may be divided by, over some items."""
        return {unit: int(count[items].sum()) for unit, count in self.counts.items()}


@dataclass(frozen=True)
class Cut:
    """How a window is cut into micro-batches: by count, or by tokens when max_tokens is set."""

    micro_batch_size: int
    max_tokens: int | None = None
    world_size: int = 1


def cut_window(items: np.ndarray, table: Table, cut: Cut) -> list[list[np.ndarray]]:
    """[rank][micro-batch] -> items. Every rank has as many micro-batches; some may hold no item.

    On one rank items stay in order. On several they are spread so that the ranks' attention costs
    are about equal: results do not depend on it, because every term has one denominator per window.
    """
    if cut.max_tokens is not None:
        chunks = cut_by_tokens(items, table.counts["processed"][items], cut.max_tokens)
    elif cut.world_size == 1:
        size = cut.micro_batch_size
        chunks = [items[low : low + size] for low in range(0, len(items), size)]
    else:
        chunks = _deal(items, table.cost, cut.micro_batch_size)
    if cut.world_size == 1:
        return [chunks]
    rounds = -(-len(chunks) // cut.world_size)
    ranks: list[list[np.ndarray]] = [[] for _ in range(cut.world_size)]
    load = [0] * cut.world_size
    # Heaviest first, to the rank that has least so far and still has room.
    for chunk in sorted(chunks, key=lambda c: -int(table.cost[c].sum())):
        rank = min(
            (r for r in range(cut.world_size) if len(ranks[r]) < rounds), key=load.__getitem__
        )
        ranks[rank].append(chunk)
        load[rank] += int(table.cost[chunk].sum())
    nothing = np.zeros(0, np.int64)
    return [mine + [nothing] * (rounds - len(mine)) for mine in ranks]


def _deal(items: np.ndarray, cost: np.ndarray, size: int) -> list[np.ndarray]:
    """Chunks of at most `size` items, each with its share of heavy ones:

    dealt forth and back by cost.
    """
    count = -(-len(items) // size)
    heavy_first = items[np.argsort(-cost[items], kind="stable")]
    lap = np.arange(len(items)) % (2 * count)
    owner = np.minimum(lap, 2 * count - 1 - lap)
    return [heavy_first[owner == chunk] for chunk in range(count)]


def cut_by_tokens(items: np.ndarray, tokens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Consecutive items, as many as fit into `budget` tokens; one that does not fit is alone."""
    chunks, low, filled = [], 0, 0
    for position, length in enumerate(tokens.tolist()):
        if filled + length > budget and position > low:
            chunks.append(items[low:position])
            low, filled = position, 0
        filled += length
    return [*chunks, items[low:]] if len(items) else []


@dataclass(frozen=True)
class Mixture:
    """How often each source is drawn from in an epoch.

    A source that gives fewer items than it has goes on with the others in the next epoch; one that
    gives more begins again only after its last.
    """

    items: tuple[np.ndarray, ...]  # of each source
    per_epoch: tuple[int, ...]  # items that each gives to an epoch
    shuffle: bool
    seed: int

    @property
    def num_items(self) -> int:
        """Items of one epoch."""
        return sum(self.per_epoch)

    def epoch(self, epoch: int) -> np.ndarray:
        """int64 [num_items]: the order of an epoch, the same on every rank."""
        drawn = [self._draw(number, epoch) for number in range(len(self.items))]
        together = np.concatenate(drawn)
        if self.shuffle:
            return np.random.default_rng([self.seed, epoch]).permutation(together)
        # Unshuffled sources alternate in proportion, each in its own order.
        turn = np.concatenate([(np.arange(len(d)) + 0.5) / max(len(d), 1) for d in drawn])
        return together[np.argsort(turn, kind="stable")]

    def _draw(self, source: int, epoch: int) -> np.ndarray:
        items, count = self.items[source], self.per_epoch[source]
        parts, position, end = [items[:0]], epoch * count, (epoch + 1) * count
        while position < end:
            cycle, at = divmod(position, len(items))
            order = np.arange(len(items))
            if self.shuffle and count != len(items):
                order = np.random.default_rng([self.seed, source, cycle, 1]).permutation(order)
            parts.append(items[order[at : at + end - position]])
            position += len(parts[-1])
        return np.concatenate(parts)


def mix(source: np.ndarray, weights: list[float] | None, shuffle: bool, seed: int) -> Mixture:
    """The Mixture of items of the given sources. weights by source; None: every item once an epoch.

    An epoch with weights has as many items as there are, in proportion to the weights.

    >>> mix(np.array([0, 0, 0, 1]), [1, 1], shuffle=False, seed=0).epoch(0)
    array([0, 3, 1, 3])
    """
    if weights is None:
        return Mixture((np.arange(len(source)),), (len(source),), shuffle, seed)
    shares = np.array(weights) / sum(weights)
    items = tuple(np.flatnonzero(source == number) for number in range(len(weights)))
    counts = tuple(max(1, round(len(source) * share)) for share in shares)
    empty = [number for number, mine in enumerate(items) if not len(mine)]
    if empty:
        raise ValueError(f"data.path: source {empty[0] + 1} has no usable row left")
    return Mixture(items, counts, shuffle, seed)


@dataclass(frozen=True)
class Schedule:
    """Which items each window of the run holds, counted from 0."""

    mixture: Mixture
    window_size: int
    steps: int  # windows of the whole run

    @cached_property
    def steps_per_epoch(self) -> int:
        """The last window of an epoch may be short: none crosses an epoch's end."""
        return -(-self.mixture.num_items // self.window_size)

    def epoch_after(self, window: int) -> float:
        """Epochs done when `window` is."""
        epoch, position = divmod(window, self.steps_per_epoch)
        num_items = self.mixture.num_items
        return epoch + min((position + 1) * self.window_size, num_items) / num_items

    def windows(self, first: int = 0) -> Iterator[np.ndarray]:
        """The items of window `first` and of all that follow."""
        order, order_epoch = np.zeros(0, np.int64), -1
        for window in range(first, self.steps):
            epoch, position = divmod(window, self.steps_per_epoch)
            if epoch != order_epoch:
                order, order_epoch = self.mixture.epoch(epoch), epoch
            yield order[position * self.window_size : (position + 1) * self.window_size]
