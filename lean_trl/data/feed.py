"""The seam to the training loop: settings -> feeds of windows, and the data report.

train_feed, eval_feed, report = open_feeds(config, tokenizer, "sft", rank, world_size)
for window in train_feed: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lean_trl.config import Config, DataConfig, units_per_step
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.data.drafts import Reading
from lean_trl.data.hub import cache_folder
from lean_trl.data.items import Items, make_items, swap_completion
from lean_trl.data.plan import Cut, Schedule, Window, cut_window, mix
from lean_trl.data.prepare import Prepared, prepare
from lean_trl.data.report import describe
from lean_trl.data.sources import Source, resolve_sources
from lean_trl.data.stream import RowStream, StreamFeed
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.losses.kto import NEEDS_KL
from lean_trl.types import Batch

# Items of an evaluation window. Statistics of a window must depend on neither micro_batch_size nor
# ranks, and the more rows a window has, the steadier they are.
EVAL_WINDOW = 256


class Feed:
    """Windows of one rank, in order; continues where load_state_dict says.

    layout: arguments of build_batch. mismatch: give every batch the completions of other rows too,
    for KTO, with at most max_length tokens.
    """

    def __init__(
        self,
        items: Items,
        cut: Cut,
        schedule: Schedule,
        *,
        rank: int = 0,
        layout: Mapping[str, Any] | None = None,
        mismatch: bool = False,
        max_length: int | None = None,
    ) -> None:
        self.items, self.cut, self.schedule, self.rank = items, cut, schedule, rank
        self._layout, self._mismatch = dict(layout or {}), mismatch
        self._max_length = max_length
        self._next = 0
        self._reading = np.zeros(0, np.int64)
        longest = int(items.table.counts["processed"].max())
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
            mine = cut_window(items, self.items.table, self.cut)[self.rank]
            others = self._others(items) if self._mismatch else {}
            window = Window(
                [self._batch(chunk, others) for chunk in mine],
                self.items.table.totals(items),
                self.schedule.epoch_after(self._next),
            )
            self._next += 1
            yield window

    def _others(self, items: np.ndarray) -> dict[int, int]:
        """Whose completion each sequence of a window is given: that of the one before it.

        A sequence alone in its window gets that of the next one, or nothing would be mismatched.
        """
        mine = np.array(self._sequences(items))
        before = np.roll(mine, 1) if len(mine) > 1 else (mine + 1) % len(self.items.store)
        return dict(zip(mine.tolist(), before.tolist(), strict=True))

    def _sequences(self, items: np.ndarray) -> list[int]:
        offsets = self.items.offsets
        return [s for i in items for s in range(offsets[i], offsets[i + 1])]

    def _batch(self, items: np.ndarray, others: Mapping[int, int]) -> Batch:
        if not len(items):
            return filler_batch(mismatched=self._mismatch)
        store, sequences = self.items.store, self._sequences(items)
        self._reading = items
        examples = [store[s] for s in sequences]
        if store.paired:  # a source with a weight may give a batch the same pair twice
            examples = [replace(example, pair=i // 2) for i, example in enumerate(examples)]
        batch = build_batch(examples, **self._layout)
        if not self._mismatch:
            return batch
        swapped = [swap_completion(store[s], store[others[s]], self._max_length) for s in sequences]
        return replace(batch, mismatched=build_batch(swapped, **self._layout))

    def reading(self) -> list[tuple[str, int]]:
        """(file, row) of the rows that were read last: where a failure to read them lies."""
        store, rows = self.items.store, self._sequences(self._reading)
        return [(store.files[store.file[s]], int(store.row[s])) for s in rows]

    def state_dict(self) -> dict[str, Any]:
        """Where the windows taken so far have led:

        with the same data and settings, all that resuming needs.
        """
        tokens = int(self.items.table.counts["processed"].sum())
        return {"next_window": self._next, "items": len(self.items), "tokens": tokens}

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


def open_feeds(
    config: Config, tokenizer: Tokenizer, kind: str, rank: int = 0, world_size: int = 1
) -> tuple[Feed | StreamFeed, EvalFeed | None, str]:
    """(training windows, held-out windows or None, the data report) of one rank.

    kind: what the method trains on, a key of examples.KINDS. Raises ValueError for data that cannot
    be trained on.
    """
    feed: Feed | StreamFeed
    if config.data.streaming:
        feed, report = _open_stream(config, tokenizer, kind, rank, world_size)
    else:
        feed, report = _open_train(config, tokenizer, kind, rank, world_size)
    if config.data.eval_path is None and config.data.eval_split is None:
        return feed, None, report
    held_out, more = _open_eval(config, tokenizer, kind, rank, world_size)
    return feed, held_out, f"{report}\n{more}"


def _open_train(
    config: Config, tokenizer: Tokenizer, kind: str, rank: int, world_size: int
) -> tuple[Feed, str]:
    data, train = config.data, config.train
    sources, prepared = _prepare(data, kind, tokenizer)
    items = make_items(prepared, data, kind, packing=data.packing)
    weights = [source.weight for source in sources if source.weight is not None]
    mixture = mix(items.source, weights or None, data.shuffle, config.seed)
    window_size = units_per_step(train, world_size)
    steps = train.max_steps or -(-mixture.num_items // window_size) * train.num_epochs
    schedule = Schedule(mixture, window_size, steps)
    feed = Feed(items, _cut(config, world_size), schedule, **_options(config, kind, rank))
    return feed, describe("train", items, mixture, sources, prepared.formats, data, train)


def _open_eval(
    config: Config, tokenizer: Tokenizer, kind: str, rank: int, world_size: int
) -> tuple[EvalFeed, str]:
    data, train = config.data, config.train
    sources, prepared = _prepare(data, kind, tokenizer, held_out=True)
    items = make_items(prepared, data, kind, packing=False)
    mixture = mix(items.source, None, False, 0)
    schedule = Schedule(mixture, EVAL_WINDOW, -(-mixture.num_items // EVAL_WINDOW))
    feed = EvalFeed(items, _cut(config, world_size), schedule, **_options(config, kind, rank))
    return feed, describe("eval", items, mixture, sources, prepared.formats, data, train)


def _open_stream(
    config: Config, tokenizer: Tokenizer, kind: str, rank: int, world_size: int
) -> tuple[StreamFeed, str]:
    data, train = config.data, config.train
    if train.max_steps is None:
        raise ValueError(
            "data.streaming does not know how many rows there are: set train.max_steps"
        )
    if data.packing:
        raise ValueError(
            "data.packing needs all lengths before the first step, which data.streaming has not: "
            "leave one of them out "
            "(train.max_tokens_per_micro_batch fills micro-batches of a stream)"
        )
    sources = resolve_sources(data.path, data.split, data.revision, kind)
    if any(source.weight is not None for source in sources):
        raise ValueError("weights in data.path need all rows to be known: leave data.streaming out")
    files = [file for source in sources for file in source.files]
    budget = train.max_tokens_per_micro_batch
    if budget is not None and (data.max_length is None or data.max_length > budget):
        raise ValueError(
            f"train.max_tokens_per_micro_batch {budget} needs data.max_length <= {budget} to stream"
        )
    feed = StreamFeed(
        RowStream(files, shuffle=data.shuffle, seed=config.seed),
        reading(data, kind),
        tokenizer,
        _cut(config, world_size),
        window_size=units_per_step(train, world_size),
        steps=train.max_steps,
        rank=rank,
        mismatch=_mismatches(config, kind),
        max_length=data.max_length,
        keep_end=data.truncation_mode == "keep_end",
        drop_overlong=data.overlong == "drop",
        layout=_layout(data),
    )
    size = sum(file.stat().st_size for file in files)
    return feed, f"train data: streaming {len(files)} files, {size / 2**20:.1f} MiB"


def _cut(config: Config, world_size: int) -> Cut:
    train = config.train
    return Cut(train.micro_batch_size, train.max_tokens_per_micro_batch, world_size)


def _layout(data: DataConfig) -> dict[str, Any]:
    """Arguments of build_batch."""
    return {"padding_free": data.padding_free, "pad_to_multiple_of": data.pad_to_multiple_of}


def _options(config: Config, kind: str, rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "layout": _layout(config.data),
        "mismatch": _mismatches(config, kind),
        "max_length": config.data.max_length,
    }


def _mismatches(config: Config, kind: str) -> bool:
    """Whether the loss reads completions put after prompts that they do not answer."""
    return kind == "unpaired" and config.loss.loss_type in NEEDS_KL


def _prepare(
    data: DataConfig, kind: str, tokenizer: Tokenizer, *, held_out: bool = False
) -> tuple[list[Source], Prepared]:
    path, split = data.path, data.split
    if held_out:
        path, split = data.eval_path or data.path, data.eval_split
        if data.eval_path is None and isinstance(path, list):  # their own splits are trained on
            path = [{k: v for k, v in _entry(e).items() if k != "split"} for e in path]
    sources = resolve_sources(path, split, data.revision, kind, held_out=held_out)
    return sources, prepare(sources, reading(data, kind), tokenizer, cache_folder(data.cache_dir))


def _entry(source: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"path": source} if isinstance(source, str) else source


def reading(data: DataConfig, kind: str) -> Reading:
    """How the settings say that rows are read."""
    return Reading(
        kind,
        text_column=data.text_column or "text",
        columns=data.columns,
        completion_only_loss=data.completion_only_loss,
        assistant_only_loss=data.assistant_only_loss,
    )
