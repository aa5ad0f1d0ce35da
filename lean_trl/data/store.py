"""Prepared sequences as flat arrays, memory-mapped when they come from the cache.

A `Store` is a set of views [start, stop) into one long token array, so truncation, dropping and
packing change two small arrays and move no token. N tokens in all, S sequences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
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

    def count_scored(self) -> np.ndarray:
        """int64 [S]: scored tokens of each sequence; its first token is never one."""
        counts = np.zeros(len(self), np.int64)
        # A block at a time, or the running sum of a large file would not fit in memory. Views lie
        # in storage order except after packing by fragments, so blocks are of views, not of tokens.
        for low in range(0, len(self), 65536):
            block = slice(low, low + 65536)
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
        return replace(
            self,
            start=self.start[index] if start is None else start,
            stop=self.stop[index] if stop is None else stop,
            file=self.file[index],
            row=self.row[index],
            extras={name: values[index] for name, values in self.extras.items()},
            columns=None
            if self.columns is None
            else [self.columns[i] for i in np.arange(len(self))[index]],
        )

    def save(self, folder: Path) -> None:
        """Write into an existing folder: one .npy an array, one JSON."""
        for name in ("tokens", "scored", "start", "stop", "file", "row"):
            np.save(folder / f"{name}.npy", getattr(self, name), allow_pickle=False)
        for name, values in self.extras.items():
            np.save(folder / f"extra_{name}.npy", values, allow_pickle=False)
        meta = {
            "files": self.files,
            "extras": list(self.extras),
            "paired": self.paired,
            "columns": self.columns,
        }
        (folder / "store.json").write_text(json.dumps(meta), encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> Store:
        """A store that reads its tokens from disk as they are needed."""
        meta = json.loads((folder / "store.json").read_text(encoding="utf-8"))

        def array(name: str) -> np.ndarray:
            return np.load(folder / f"{name}.npy", allow_pickle=False)

        def mapped(name: str) -> np.ndarray:
            return np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)

        return Store(
            tokens=mapped("tokens"),
            scored=mapped("scored"),
            start=array("start"),
            stop=array("stop"),
            files=tuple(meta["files"]),
            file=array("file"),
            row=array("row"),
            extras={name: array(f"extra_{name}") for name in meta["extras"]},
            columns=meta["columns"],
            paired=meta["paired"],
        )
