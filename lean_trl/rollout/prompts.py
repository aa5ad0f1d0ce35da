"""What is asked: rows of prompts, generation by generation, the same on every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lean_trl.config import Config
from lean_trl.data.feed import reading
from lean_trl.data.hub import cache_folder
from lean_trl.data.items import make_items
from lean_trl.data.plan import Schedule, mix
from lean_trl.data.prepare import prepare
from lean_trl.data.sources import resolve_sources
from lean_trl.data.store import Store
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.rollout.arithmetic import Arithmetic


@dataclass(frozen=True)
class Prompt:
    """One question, ready for the engine, and its row for the rewards."""

    item: int  # its number in the source
    ids: np.ndarray  # int32 [P]
    text: Any  # as in the row: text or messages
    columns: Mapping[str, Any]  # the row's other columns
    source: tuple[str, int]


class Prompts(Protocol):
    """A source of prompts; `generation(g)` may be asked for any g, in any order."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""

    def generation(self, number: int) -> list[Prompt]:
        """The prompts of one generation, from 0."""

    def epoch_after(self, number: int) -> float:
        """Epochs done when a generation is."""

    def fingerprint(self) -> list[int]:
        """Numbers that change with the data, for checkpoints."""


class RowPrompts:
    """The rows of data.path."""

    def __init__(self, store: Store, schedule: Schedule, tokenizer: Tokenizer, steps: int) -> None:
        assert store.columns is not None
        self.store, self.schedule, self.tokenizer, self.steps = store, schedule, tokenizer, steps

    def generation(self, number: int) -> list[Prompt]:
        return [self._prompt(item) for item in next(self.schedule.windows(number)).tolist()]

    def _prompt(self, item: int) -> Prompt:
        store = self.store
        assert store.columns is not None
        columns = json.loads(store.columns[item])
        ids = np.array(store.tokens[store.start[item] : store.stop[item]])
        text = columns.pop("prompt", None)
        if text is None:
            text = self.tokenizer.decode(ids)
        source = (store.files[store.file[item]], int(store.row[item]))
        return Prompt(item, ids, text, columns, source)

    def epoch_after(self, number: int) -> float:
        return self.schedule.epoch_after(number)

    def fingerprint(self) -> list[int]:
        return [len(self.store), int(self.store.lengths.sum())]


def open_prompts(
    config: Config, tokenizer: Tokenizer, arithmetic: Arithmetic
) -> tuple[RowPrompts, str]:
    """(the prompts, what to say of them). Those over data.max_prompt_length are dropped, counted.

    Raises ValueError when no prompt is left.
    """
    data = config.data
    sources = resolve_sources(data.path, data.split, data.revision)
    cache = cache_folder(data.cache_dir)
    prepared = prepare(sources, reading(data, "prompt"), tokenizer, cache)
    items = make_items(prepared, data, "prompt", packing=False)
    store, drops = items.store, items.drops
    if data.max_prompt_length is not None:
        good = store.lengths <= data.max_prompt_length
        if not good.all():
            first = int(np.argmin(good))
            where = (store.files[store.file[first]], int(store.row[first]))
            reason = f"prompt over data.max_prompt_length {data.max_prompt_length}"
            drops.add(reason, where, int((~good).sum()))
            store = store.select(good)
    lines = drops.lines(prepared.rows)
    if not len(store):
        raise ValueError("\n  ".join(["no prompt is left", *lines]))
    weights = [source.weight for source in sources if source.weight is not None]
    mixture = mix(store.source, weights or None, data.shuffle, config.seed)
    per_epoch = arithmetic.steps(mixture.num_items)
    steps = config.train.max_steps or per_epoch * config.train.num_epochs
    # One generation a step at the least: the schedule never ends before the run does.
    schedule = Schedule(mixture, arithmetic.prompts, steps)
    lengths = store.lengths
    report = [
        f"prompts: {len(store)} of {prepared.rows} rows, {lengths.mean():.0f} tokens on average, "
        f"{lengths.max()} at most",
        *lines,
        f"a generation answers {arithmetic.prompts} prompts {arithmetic.num_generations} times: "
        f"{_windows(arithmetic)} of {arithmetic.window} completions",
    ]
    return RowPrompts(store, schedule, tokenizer, steps), "\n  ".join(report)


def _windows(arithmetic: Arithmetic) -> str:
    windows, times = arithmetic.windows(arithmetic.prompts), arithmetic.num_iterations
    steps = "one step" if windows == 1 else f"{windows} steps"
    return steps if times == 1 else f"{steps}, {times} times,"


def column_values(prompts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """{name: one value a row}; None where a row lacks the column.

    >>> column_values([{"a": 1}, {"a": 2, "b": 3}])
    {'a': [1, 2], 'b': [None, 3]}
    """
    names = dict.fromkeys(name for row in prompts for name in row)
    return {name: [row.get(name) for row in prompts] for name in names}
