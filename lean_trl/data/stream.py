"""Streaming: windows from files that are read as training goes, in constant memory.

Nothing is counted beforehand, so the run's length is train.max_steps and a window's totals come
from one all-gather of a few ints. A window is the next batch_size rows of the stream; one that
cannot be used leaves its window short. Rows are shuffled within blocks of a few thousand: a block
begins at a place in a file, so resuming is a seek.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.data.drafts import Reader, Reading
from lean_trl.data.encode import Encoder
from lean_trl.data.examples import UNSCORED, read_row
from lean_trl.data.items import swap_completion
from lean_trl.data.messages import RowError
from lean_trl.data.plan import Cut, Window, cut_by_tokens
from lean_trl.data.prepare import Drops, encode_drafts
from lean_trl.data.rows import Row, check_object, is_lines, parse_line, read_rows
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.types import UNITS, Batch, Example

BLOCK_ROWS = 4096
BLOCK_BYTES = 32 << 20  # of lines; a block of huge rows ends earlier

Item = list[Example]  # what must stay together


@dataclass(frozen=True)
class Place:
    """Where a row begins:

    in a file, the byte of its line (0 where lines cannot be entered), its number.
    """

    file: int = 0
    byte: int = 0
    row: int = 0


@dataclass(frozen=True)
class RawRow:
    """A row that has not been parsed yet, where it may be left to another rank."""

    file: int
    index: int
    value: bytes | Row


class RowStream:
    """Blocks of rows of some files, from any place on."""

    def __init__(self, files: Sequence[Path], *, shuffle: bool, seed: int) -> None:
        self.files, self._shuffle, self._seed = list(files), shuffle, seed
        self.bytes = [file.stat().st_size for file in self.files]

    def blocks(self, start: Place, epoch: int) -> Iterator[tuple[Place, list[RawRow]]]:
        """(where it begins, its rows in the order of this epoch) of each block."""
        place, size = start, 0
        rows: list[RawRow] = []
        for where, row in self._rows(start):
            if not rows:
                place = where
            rows.append(row)
            size += len(row.value) if isinstance(row.value, bytes) else 0
            if len(rows) == BLOCK_ROWS or size >= BLOCK_BYTES:
                yield place, self._ordered(rows, place, epoch)
                rows, size = [], 0
        if rows:
            yield place, self._ordered(rows, place, epoch)

    def share(self, place: Place) -> float:
        """How much of the files lies before `place`, to the file where lines cannot be entered."""
        return (sum(self.bytes[: place.file]) + place.byte) / max(sum(self.bytes), 1)

    def parse(self, raw: RawRow) -> Row:
        """The row as a map."""
        path = self.files[raw.file]
        if isinstance(raw.value, bytes):
            return check_object(parse_line(raw.value, path, raw.index + 1), path, raw.index)
        return raw.value

    def _ordered(self, rows: list[RawRow], place: Place, epoch: int) -> list[RawRow]:
        if not self._shuffle:
            return rows
        rng = np.random.default_rng([self._seed, epoch, place.file, place.row])
        return [rows[i] for i in rng.permutation(len(rows))]

    def _rows(self, start: Place) -> Iterator[tuple[Place, RawRow]]:
        for number in range(start.file, len(self.files)):
            begin = start if number == start.file else Place(number)
            path = self.files[number]
            if is_lines(path):
                with open(path, "rb") as file:
                    file.seek(begin.byte)
                    byte = begin.byte
                    for index, line in enumerate(file, begin.row):
                        if line.strip():
                            yield Place(number, byte, index), RawRow(number, index, line)
                        byte += len(line)
            else:
                for index, row in enumerate(read_rows(path, begin.row), begin.row):
                    yield Place(number, 0, index), RawRow(number, index, row)


class StreamFeed:
    """Windows of one rank from a RowStream; `steps` is train.max_steps, epochs have no length.

    With several ranks it makes a CPU process group of its own, so all of them must create it.
    """

    def __init__(
        self,
        stream: RowStream,
        reading: Reading,
        tokenizer: Tokenizer,
        cut: Cut,
        *,
        window_size: int,
        steps: int,
        rank: int,
        mismatch: bool,
        max_length: int | None,
        keep_end: bool,
        drop_overlong: bool,
        layout: Mapping[str, Any],
    ) -> None:
        self.steps, self.drops = steps, Drops()
        self._stream, self._cut, self._rank = stream, cut, rank
        self._kind, self._mismatch = reading.kind, mismatch
        self._reader, self._encoder = Reader(reading, tokenizer), Encoder(tokenizer)
        self._window_size, self._layout = window_size, dict(layout)
        self._max_length, self._keep_end, self._drop_overlong = max_length, keep_end, drop_overlong
        self._group = dist.new_group(backend="gloo") if cut.world_size > 1 else None
        self._reading: Sequence[RawRow] = ()
        self._done, self._epoch = 0, 0
        self._block, self._used = Place(), 0  # rows of the block that begins there already used

    def __iter__(self) -> Iterator[Window]:
        while self._done < self.steps:
            before = self._done
            for rows in self._windows_of_epoch():
                self._done += 1
                yield self._window(rows)
                if self._done == self.steps:
                    return
            if self._done == before and (self._block, self._used) == (Place(), 0):
                raise ValueError(f"no rows in {', '.join(map(str, self._stream.files))}")
            self._epoch, self._block, self._used = self._epoch + 1, Place(), 0

    def reading(self) -> list[tuple[str, int]]:
        """(file, row) of the rows that were read last: where a failure to read them lies."""
        return [(str(self._stream.files[raw.file]), raw.index) for raw in self._reading]

    def state_dict(self) -> dict[str, Any]:
        """Where the windows taken so far have led; the same on every rank and for other ranks."""
        place = {"done": self._done, "epoch": self._epoch, "used": self._used}
        return {**place, "block": asdict(self._block), "bytes": self._stream.bytes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the windows that `state` has seen.

        Raises ValueError when the files are not the same: a place in them would be another row's.
        """
        if state["bytes"] != self._stream.bytes:
            raise ValueError(
                f"the data have changed: files of {self._stream.bytes} bytes, but the checkpoint "
                f"saw {state['bytes']}: resume with the same files"
            )
        self._done, self._epoch = state["done"], state["epoch"]
        self._block, self._used = Place(**state["block"]), state["used"]

    def _windows_of_epoch(self) -> Iterator[list[RawRow]]:
        """What is left of the epoch; self._block and self._used follow."""
        waiting: list[RawRow] = []
        skip = self._used
        for place, rows in self._stream.blocks(self._block, self._epoch):
            fresh = rows[skip:]
            taken = skip
            skip = 0
            while len(waiting) + len(fresh) >= self._window_size:
                need = self._window_size - len(waiting)
                waiting, fresh, taken = [*waiting, *fresh[:need]], fresh[need:], taken + need
                self._block, self._used = place, taken
                yield waiting
                waiting = []
            waiting += fresh
        if waiting:
            self._block, self._used = Place(len(self._stream.files)), 0
            yield waiting

    def _window(self, rows: Sequence[RawRow]) -> Window:
        mine = slice(self._rank, None, self._cut.world_size)
        if self._mismatch:  # completions go round the whole window: every rank reads it
            items = self._items(rows)
            batches = self._batches(items[mine], [*items[-1:], *items[:-1]][mine])
        else:
            batches = self._batches(self._items(rows[mine]))
        counts = [sum(batch.totals[unit] for batch in batches) for unit in UNITS]
        everyone = self._gather([*counts, len(batches)])
        fill = int(everyone[:, -1].max()) - len(batches)
        batches += [filler_batch(mismatched=self._mismatch) for _ in range(fill)]
        totals = dict(zip(UNITS, everyone[:, :-1].sum(0).tolist(), strict=True))
        return Window(batches, totals, self._epoch + self._stream.share(self._block))

    def _gather(self, numbers: list[int]) -> np.ndarray:
        """int64 [ranks, len(numbers)]."""
        if self._group is None:
            return np.array([numbers])
        row = torch.tensor(numbers)
        table = [torch.empty_like(row) for _ in range(self._cut.world_size)]
        dist.all_gather(table, row, group=self._group)
        return torch.stack(table).numpy()

    def _items(self, rows: Sequence[RawRow]) -> list[Item]:
        drafts = []
        for number, raw in enumerate(rows):
            self._reading = rows[number : number + 1]
            try:
                _, read = read_row(self._stream.parse(raw), self._reader)
            except RowError as error:
                self._drop(error.reason, raw)
                continue
            drafts += [(number, draft) for draft in read]
        self._reading = rows
        items = []
        for number, draft, encoded in encode_drafts(drafts, self._encoder, self._kind):
            raw = rows[number]
            source = (str(self._stream.files[raw.file]), raw.index)
            item = [Example(*self._shorten(e), draft.extras, source=source) for e in encoded]
            too_long = any(len(ids) > (self._max_length or len(ids)) for ids, _ in encoded)
            if too_long and self._drop_overlong:
                self._drop("over data.max_length", raw)
            elif self._kind not in UNSCORED and not all(example.num_scored for example in item):
                self._drop("no trainable tokens", raw)
            else:
                items.append(item)
        return items

    def _shorten(self, encoded: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        limit = self._max_length
        if limit is None:
            return encoded
        span = slice(-limit, None) if self._keep_end else slice(limit)
        return encoded[0][span], encoded[1][span]

    def _drop(self, reason: str, raw: RawRow) -> None:
        source = (str(self._stream.files[raw.file]), raw.index)
        if reason not in self.drops.count:
            warnings.warn(
                f"rows are dropped: {reason} (first: {source[0]}, row {source[1]})", stacklevel=2
            )
        self.drops.add(reason, source)

    def _batches(self, items: Sequence[Item], others: Sequence[Item] = ()) -> list[Batch]:
        """others: whose completions the items are given too, for KTO."""
        index = np.arange(len(items))
        if self._cut.max_tokens is None:
            size = self._cut.micro_batch_size
            chunks = [index[low : low + size] for low in range(0, len(items), size)]
        else:
            tokens = np.array([sum(map(len, item)) for item in items])
            chunks = cut_by_tokens(index, tokens, self._cut.max_tokens)
        return [self._batch(items, others, chunk.tolist()) for chunk in chunks]

    def _batch(self, items: Sequence[Item], others: Sequence[Item], chunk: Sequence[int]) -> Batch:
        examples = [
            replace(example, pair=i) if len(items[i]) == 2 else example
            for i in chunk
            for example in items[i]
        ]
        batch = build_batch(examples, **self._layout)
        if not others:
            return batch
        swapped = [swap_completion(items[i][0], others[i][0], self._max_length) for i in chunk]
        return replace(batch, mismatched=build_batch(swapped, **self._layout))
