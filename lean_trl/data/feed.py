"""The seam to the training loop: settings -> feeds of windows, and the data report.

train_feed, eval_feed, report = open_feeds(config, tokenizer, "sft", rank, world_size)
for window in train_feed: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lean_trl.config import Config, DataConfig, units_per_step
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.data.examples import Reading
from lean_trl.data.hub import resolve_dataset
from lean_trl.data.plan import Cut, Schedule, Table, Window, cut_window
from lean_trl.data.prepare import Prepared, prepare, truncate
from lean_trl.data.rows import find_files
from lean_trl.data.store import Store
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.types import Batch


class Feed:
    """Windows of one rank, in order; continues where load_state_dict says.

    `offsets` [I + 1] says which sequences of `store` each item holds.
    """

    def __init__(
        self,
        store: Store,
        offsets: np.ndarray,
        cut: Cut,
        schedule: Schedule,
        rank: int = 0,
        layout: Mapping[str, Any] | None = None,
    ) -> None:
        self.store, self.offsets, self.rank = store, offsets, rank
        self.cut, self.schedule = cut, schedule
        self.layout = dict(layout or {})  # arguments of build_batch
        self.table = _table(store, offsets)
        self._next = 0
        longest = int(self.table.tokens.max())
        if cut.max_tokens is not None and longest > cut.max_tokens:
            raise ValueError(
                f"train.max_tokens_per_micro_batch {cut.max_tokens} is less than the longest item, "
                f"{longest} tokens: "
                f"raise it, or lower data.max_length"
            )

    @property
    def steps(self) -> int:
        """Windows of the whole run, known before the first."""
        return self.schedule.steps

    @property
    def steps_per_epoch(self) -> int:
        """Windows of one pass over the data."""
        return self.schedule.steps_per_epoch

    def __iter__(self) -> Iterator[Window]:
        for items in self.schedule.windows(self._next):
            mine = cut_window(items, self.table, self.cut)[self.rank]
            window = Window(
                [self._batch(chunk) for chunk in mine],
                self.table.totals(items),
                self.schedule.epoch_after(self._next),
            )
            self._next += 1
            yield window

    def _batch(self, items: np.ndarray) -> Batch:
        if not len(items):
            return filler_batch()
        sequences = [s for i in items for s in range(self.offsets[i], self.offsets[i + 1])]
        return build_batch([self.store[s] for s in sequences], **self.layout)

    def state_dict(self) -> dict[str, Any]:
        """Where the windows taken so far have led:

        all that resuming needs, beside the same data and settings.
        """
        return {
            "next_window": self._next,
            "items": len(self.table),
            "tokens": int(self.table.tokens.sum()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the windows that `state` has seen.

        Raises ValueError when the data are not the same.
        """
        now = self.state_dict()
        if (state["items"], state["tokens"]) != (now["items"], now["tokens"]):
            raise ValueError(
                f"the data have changed: {now['items']} items of {now['tokens']} tokens, but the "
                f"checkpoint saw "
                f"{state['items']} of {state['tokens']}: resume with the same data and data "
                f"settings"
            )
        self._next = state["next_window"]


class EvalFeed(Feed):
    """Each row exactly once, in file order; every iteration starts from the first."""

    def __iter__(self) -> Iterator[Window]:
        self._next = 0
        return super().__iter__()


def _table(store: Store, offsets: np.ndarray) -> Table:
    lengths, first = store.lengths, offsets[:-1]
    sequences = np.diff(offsets)
    return Table(
        tokens=np.add.reduceat(lengths, first),
        scored=np.add.reduceat(store.count_scored(), first),
        sequences=sequences,
        pairs=sequences // 2 if store.paired else np.zeros_like(sequences),
        cost=np.add.reduceat(lengths * lengths, first),
    )


def open_feeds(
    config: Config, tokenizer: Tokenizer, kind: str, rank: int = 0, world_size: int = 1
) -> tuple[Feed, EvalFeed | None, str]:
    """(training windows, held-out windows or None, the data report) of one rank.

    kind: what the method trains on, a key of examples.KINDS. Raises ValueError for data that cannot
    be trained on.
    """
    data, train = config.data, config.train
    layout = {"padding_free": data.padding_free}
    prepared = _prepare(data, data.path, data.split, kind, tokenizer)
    store, lost = truncate(prepared, data.max_length, data.truncation_mode)
    report = _report("train", prepared, store, lost)
    offsets = _item_offsets(store, prepared)
    window_size = units_per_step(train, world_size)
    num_items = len(offsets) - 1
    steps = train.max_steps or -(-num_items // window_size) * train.num_epochs
    feed = Feed(
        store,
        offsets,
        Cut(train.micro_batch_size, train.max_tokens_per_micro_batch, world_size),
        Schedule(num_items, window_size, steps, data.shuffle, config.seed),
        rank,
        layout,
    )
    if data.eval_path is None and data.eval_split is None:
        return feed, None, report
    held_out = _prepare(data, data.eval_path or data.path, data.eval_split, kind, tokenizer)
    store, lost = truncate(held_out, data.max_length, data.truncation_mode)
    offsets = _item_offsets(store, held_out)
    size = train.micro_batch_size * world_size
    eval_feed = EvalFeed(
        store,
        offsets,
        Cut(train.micro_batch_size, train.max_tokens_per_micro_batch, world_size),
        Schedule(len(offsets) - 1, size, -(-(len(offsets) - 1) // size), False, 0),
        rank,
        layout,
    )
    return feed, eval_feed, report + "\n" + _report("eval", held_out, store, lost)


def _prepare(
    data: DataConfig, path: str | None, split: str | None, kind: str, tokenizer: Tokenizer
) -> Prepared:
    reading = Reading(
        kind,
        text_column=data.text_column or "text",
        columns=data.columns,
        completion_only_loss=data.completion_only_loss,
        assistant_only_loss=data.assistant_only_loss,
    )
    return prepare(find_files(Path(resolve_dataset(path)), split), reading, tokenizer)


def _item_offsets(store: Store, prepared: Prepared) -> np.ndarray:
    if not len(store):
        raise ValueError(
            f"none of the {prepared.rows} rows has anything to train on:\n  "
            + "\n  ".join(prepared.drops.lines())
        )
    return np.arange(0, len(store) + 1, 2 if store.paired else 1)


def _report(name: str, prepared: Prepared, store: Store, lost: int) -> str:
    tokens, scored = int(store.lengths.sum()), int(store.count_scored().sum())
    items = len(store) // (2 if store.paired else 1)
    lines = [
        f"{name} data: {items} of {prepared.rows} rows, {tokens} tokens, {scored} supervised "
        f"({scored / max(tokens, 1):.1%}), {lost} cut off ({lost / max(tokens + lost, 1):.1%})",
        *(f"  {line}" for line in prepared.drops.lines()),
    ]
    return "\n".join(lines)
