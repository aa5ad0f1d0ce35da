"""Prepared sequences as flat arrays on disk, read as they are needed.

A `Store` is a set of views [start, stop) into one long token array, so truncation, dropping and
packing change two small arrays and move no token. N tokens in all, S sequences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from lean_trl.types import Example


@dataclass(frozen=True)
class Store:
    """Sequences by number; `store[s]` is an Example."""

    tokens: np.ndarray  # int32 [N]
    scored: np.ndarray  # bool [N]
    start: np.ndarray  # int64 [S]; sequence s is tokens[start[s]:stop[s]]
    stop: np.ndarray  # int64 [S]
    files: tuple[str, ...]
    file_source: np.ndarray  # int64 [files]; number of the source that each file belongs to
    file: np.ndarray  # int32 [S]; index into files
    row: np.ndarray  # int64 [S]; row of that file
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)  # [S] each, see types.EXTRAS
    columns: Sequence[str] | None = None  # [S]; the row as JSON, for prompts
    paired: bool = False  # sequences 2p and 2p + 1 are chosen and rejected of pair p

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, s: int) -> Example:
        span = slice(int(self.start[s]), int(self.stop[s]))
        extras: dict[str, Any] = {name: values[s] for name, values in self.extras.items()}
        if self.columns is not None:
            extras |= json.loads(self.columns[s])
        return Example(
            self.tokens[span],
            self.scored[span],
            extras,
            pair=s // 2 if self.paired else -1,
            source=(self.files[self.file[s]], int(self.row[s])),
        )

    @property
    def lengths(self) -> np.ndarray:
        """int64 [S]: tokens of each sequence."""
        return self.stop - self.start

    @property
    def source(self) -> np.ndarray:
        """int64 [S]: number of the source that each sequence comes from."""
        return self.file_source[self.file]

    @property
    def per_item(self) -> int:
        """Sequences that must stay together."""
        return 2 if self.paired else 1

    def count_scored(self) -> np.ndarray:
        """int64 [S]: scored tokens of each sequence; its first token is never one."""
        counts = np.zeros(len(self), np.int64)
        # In storage order and a block at a time: the running sum of a large file would not fit.
        order = np.argsort(self.start, kind="stable")
        for low in range(0, len(order), 65536):
            block = order[low : low + 65536]
            first, last = self.start[block], self.stop[block]
            origin = int(first.min())
            running = np.cumsum(self.scored[origin : int(last.max())], dtype=np.int64)
            running = np.concatenate([np.zeros(1, np.int64), running])
            counts[block] = running[last - origin] - running[first + 1 - origin]
        return counts

    def select(
        self, index: np.ndarray, start: np.ndarray | None = None, stop: np.ndarray | None = None
    ) -> Store:
        """The sequences of `index` (ints or bools), with other bounds when given."""
        rows = self.columns
        return replace(
            self,
            start=self.start[index] if start is None else start,
            stop=self.stop[index] if stop is None else stop,
            file=self.file[index],
            row=self.row[index],
            extras={name: values[index] for name, values in self.extras.items()},
            columns=None if rows is None else [rows[i] for i in np.arange(len(self))[index]],
        )


class StoreWriter:
    """Appends items to files in an existing folder; memory holds a few numbers for each sequence.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with StoreWriter(Path(folder), ("a.jsonl",)) as writer:
    ...         writer.add([(np.array([5, 6]), np.array([True, True]))], file=0, row=3)
    ...     load_store(Path(folder))[0].source
    ('a.jsonl', 3)
    """

    def __init__(
        self, folder: Path, files: Sequence[str], sources: Sequence[int] | None = None
    ) -> None:
        self._folder, self._files = folder, list(files)
        self._sources = list(sources or [0] * len(files))
        self._tokens = open(folder / "tokens.i32", "wb")
        self._scored = open(folder / "scored.bool", "wb")
        self._start: list[int] = []
        self._stop: list[int] = []
        self._file: list[int] = []
        self._row: list[int] = []
        self._extras: dict[str, list[Any]] = {}
        self._columns: list[str] = []
        self._size = 0
        self._paired = False

    def __len__(self) -> int:
        return len(self._start)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tokens.close()
        self._scored.close()
        if kind is None:
            self._write_index()

    def add(
        self,
        encoded: Sequence[tuple[np.ndarray, np.ndarray]],
        *,
        file: int,
        row: int,
        extras: Mapping[str, Any] | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> None:
        """Append the one or two (ids, scored) of an item."""
        self._paired = len(encoded) == 2
        for ids, scored in encoded:
            self._tokens.write(ids.astype(np.int32, copy=False).tobytes())
            self._scored.write(scored.astype(bool, copy=False).tobytes())
            self._start.append(self._size)
            self._size += len(ids)
            self._stop.append(self._size)
            self._file.append(file)
            self._row.append(row)
            for name, value in (extras or {}).items():
                self._extras.setdefault(name, []).append(value)
            if columns is not None:
                self._columns.append(json.dumps(columns, default=str))

    def _write_index(self) -> None:
        arrays: dict[str, tuple[list[Any], type | None]] = {
            "start": (self._start, np.int64),
            "stop": (self._stop, np.int64),
            "file": (self._file, np.int32),
            "row": (self._row, np.int64),
            **{f"extra_{name}": (values, None) for name, values in self._extras.items()},
        }
        for name, (values, dtype) in arrays.items():
            np.save(self._folder / f"{name}.npy", np.array(values, dtype), allow_pickle=False)
        meta = {
            "files": self._files,
            "file_source": self._sources,
            "extras": list(self._extras),
            "paired": self._paired,
            "columns": self._columns or None,
        }
        (self._folder / "store.json").write_text(json.dumps(meta), encoding="utf-8")


def load_store(folder: Path) -> Store:
    """What a StoreWriter wrote; tokens stay on disk until they are read."""
    meta = json.loads((folder / "store.json").read_text(encoding="utf-8"))

    def array(name: str) -> np.ndarray:
        return np.load(folder / f"{name}.npy", allow_pickle=False)

    return Store(
        tokens=np.memmap(folder / "tokens.i32", np.int32, mode="r"),
        scored=np.memmap(folder / "scored.bool", bool, mode="r"),
        start=array("start"),
        stop=array("stop"),
        files=tuple(meta["files"]),
        file_source=np.array(meta["file_source"], np.int64),
        file=array("file"),
        row=array("row"),
        extras={name: array(f"extra_{name}") for name in meta["extras"]},
        columns=meta["columns"],
        paired=meta["paired"],
    )
