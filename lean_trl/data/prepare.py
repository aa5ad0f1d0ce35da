"""Files of rows -> a Store, with an account of what was kept and what was not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lean_trl.data.encode import Encoder
from lean_trl.data.examples import ACCEPTED, Draft, Reading, read_row
from lean_trl.data.messages import RowError
from lean_trl.data.rows import Row, read_rows
from lean_trl.data.store import Store
from lean_trl.data.tokenizer import Tokenizer

BLOCK = 2048  # rows encoded at a time: enough for all cores, little memory

Source = tuple[str, int]  # file, row


@dataclass
class Drops:
    """Rows left out: per reason how many, and the first one."""

    count: dict[str, int] = field(default_factory=dict)
    first: dict[str, Source] = field(default_factory=dict)

    def add(self, reason: str, source: Source, count: int = 1) -> None:
        """Count rows that were left out for `reason`; `source` is the first of them."""
        self.count[reason] = self.count.get(reason, 0) + count
        self.first.setdefault(reason, source)

    def lines(self) -> list[str]:
        """One line for each reason."""
        return [
            f"{count} dropped: {reason} (first: {self.first[reason][0]}, row "
            f"{self.first[reason][1]})"
            for reason, count in self.count.items()
        ]


@dataclass
class Prepared:
    """A store and where it came from."""

    store: Store
    rows: int  # read
    drops: Drops


def prepare(files: Iterable[Path], reading: Reading, tokenizer: Tokenizer) -> Prepared:
    """Read, render and encode all rows of `files`.

    Raises ValueError when no row can be used, with the columns found and the formats accepted.
    """
    files = [Path(file) for file in files]
    drops, builder = Drops(), _Builder()
    encoder = Encoder(tokenizer)
    columns: set[str] = set()
    rows = 0
    for number, path in enumerate(files):
        for block in _blocks(enumerate(read_rows(path))):
            drafts: list[tuple[int, Draft]] = []
            for index, row in block:
                rows += 1
                if len(columns) < 100:
                    columns.update(row)
                try:
                    drafts += [(index, draft) for draft in read_row(row, reading, tokenizer)]
                except RowError as error:
                    drops.add(error.reason, (str(path), index))
            encoded = iter(encoder.encode([piece for _, draft in drafts for piece in draft.pieces]))
            for index, draft in drafts:
                builder.add(draft, list(islice(encoded, len(draft.pieces))), number, index)
    if not builder.start:
        raise ValueError(
            f"no usable row in {', '.join(map(str, files[:3]))}{' ...' if len(files) > 3 else ''} "
            f"({rows} read): "
            f"columns found: {', '.join(sorted(columns)) or 'none'}; "
            f"accepted for {reading.kind}: {ACCEPTED[reading.kind]}"
            + "".join(f"\n  {line}" for line in drops.lines())
        )
    return Prepared(builder.store(tuple(map(str, files))), rows, drops)


def _blocks(rows: Iterable[tuple[int, Row]]) -> Iterator[list[tuple[int, Row]]]:
    iterator = iter(rows)
    while block := list(islice(iterator, BLOCK)):
        yield block


class _Builder:
    """Collects encoded items."""

    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.scored: list[np.ndarray] = []
        self.start: list[int] = []
        self.stop: list[int] = []
        self.file: list[int] = []
        self.row: list[int] = []
        self.extras: dict[str, list[Any]] = {}
        self.paired = False
        self._size = 0

    def add(
        self, draft: Draft, encoded: list[tuple[np.ndarray, np.ndarray]], file: int, row: int
    ) -> None:
        """Append the one or two sequences of an item."""
        self.paired = len(encoded) == 2
        for ids, scored in encoded:
            self.ids.append(ids)
            self.scored.append(scored)
            self.start.append(self._size)
            self._size += len(ids)
            self.stop.append(self._size)
            self.file.append(file)
            self.row.append(row)
            for name, value in draft.extras.items():
                self.extras.setdefault(name, []).append(value)

    def store(self, files: tuple[str, ...]) -> Store:
        """Everything added so far."""
        return Store(
            tokens=np.concatenate(self.ids),
            scored=np.concatenate(self.scored),
            start=np.array(self.start, np.int64),
            stop=np.array(self.stop, np.int64),
            files=files,
            file=np.array(self.file, np.int32),
            row=np.array(self.row, np.int64),
            extras={name: np.array(values) for name, values in self.extras.items()},
            paired=self.paired,
        )


def truncate(prepared: Prepared, max_length: int | None, mode: str) -> tuple[Store, int]:
    """(the store with every sequence cut to max_length tokens, tokens cut).

    keep_start keeps the first tokens, keep_end the last. An item whose sequences have no scored
    token left is dropped and counted.
    """
    store = prepared.store
    start, stop = store.start, store.stop
    if max_length is not None and mode == "keep_start":
        stop = np.minimum(stop, start + max_length)
    elif max_length is not None:
        start = np.maximum(start, stop - max_length)
    cut = int((store.lengths - (stop - start)).sum())
    store = store.select(np.arange(len(store)), start, stop)
    scored = store.count_scored() > 0
    if store.paired:
        scored = np.repeat(scored[0::2] & scored[1::2], 2)
    if not scored.all():
        lost = int((~scored).sum()) // (2 if store.paired else 1)
        example = store[int(np.argmin(scored))]
        prepared.drops.add(
            "no supervised token" + (" within max_length" if cut else ""), example.source, lost
        )
        store = store.select(scored)
    return store, cut
