"""Files of rows -> a Store in the cache, made once and by one process.

The cache folder of a data set is named by a fingerprint of all that its contents depend on: files,
tokenizer, template and how rows are read. Truncation and packing come after it, so changing
max_length prepares nothing again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from lean_trl.data.drafts import Draft, Reader, Reading
from lean_trl.data.encode import Encoded, Encoder, align_pair
from lean_trl.data.examples import ACCEPTED, UNSCORED, read_row
from lean_trl.data.messages import RowError
from lean_trl.data.rows import Row, read_rows
from lean_trl.data.sources import Source
from lean_trl.data.store import Store, StoreWriter, load_store
from lean_trl.data.tokenizer import Tokenizer

BLOCK = 2048  # rows encoded at a time: enough for all cores, little memory
REASONS = 20  # for dropping rows, that a report shows
VERSION = 2  # of the cache; raise it when the same rows would give other tokens


A = TypeVar("A")
B = TypeVar("B")


@dataclass
class Drops:
    """Rows left out: per reason how many, and the file and row of the first."""

    count: dict[str, int] = field(default_factory=dict)
    first: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, reason: str, source: tuple[str, int], count: int = 1) -> None:
        """Count rows that were left out for `reason`; `source` is the first of them."""
        self.count[reason] = self.count.get(reason, 0) + count
        self.first.setdefault(reason, source)

    def copy(self) -> Drops:
        """One that can be added to without changing this one."""
        return Drops(dict(self.count), dict(self.first))

    def lines(self, rows: int) -> list[str]:
        """One line for each reason, the most frequent ones."""
        frequent = sorted(self.count.items(), key=lambda item: -item[1])
        lines = [
            f"{count} of {rows} rows dropped: {reason} "
            f"(first: {self.first[reason][0]}, row {self.first[reason][1]})"
            for reason, count in frequent[:REASONS]
        ]
        # Reasons may quote values: a column of numbers would give as many as there are rows.
        if more := sum(count for _, count in frequent[REASONS:]):
            lines.append(f"{more} of {rows} rows dropped for other reasons")
        return lines


@dataclass
class Prepared:
    """A store and an account of where it came from."""

    store: Store
    rows: int  # read
    drops: Drops
    formats: dict[str, int]  # rows of each format


def prepare(
    sources: Sequence[Source],
    reading: Reading,
    tokenizer: Tokenizer,
    cache: Path,
    *,
    progress: bool = True,
) -> Prepared:
    """All rows of `sources` read, rendered and encoded; from the cache when they have been before.

    Several processes may ask at once: one prepares, the others wait for it. A process that dies
    leaves nothing behind that would be taken for finished. Raises ValueError when no row can be
    used, naming the columns found and the formats accepted.
    """
    folder = cache / fingerprint(sources, reading, tokenizer)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_suffix(".lock"), "w")
    except OSError as error:
        raise ValueError(
            f"the cache {cache} cannot be written ({error}): set data.cache_dir"
        ) from error
    with lock:
        # The kernel drops the lock when its holder dies, so nobody waits for a dead process.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for left_over in cache.glob(f"{folder.name}.*/"):  # by a process that died
                shutil.rmtree(left_over)
            draft = folder.with_suffix(f".{os.getpid()}")
            draft.mkdir()
            try:
                account = _write(draft, sources, reading, tokenizer, progress)
                (draft / "account.json").write_text(json.dumps(account), encoding="utf-8")
                draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    account = json.loads((folder / "account.json").read_text(encoding="utf-8"))
    first = {reason: (file, row) for reason, (file, row) in account["first"].items()}
    drops = Drops(account["count"], first)
    return Prepared(load_store(folder), account["rows"], drops, account["formats"])


def fingerprint(sources: Sequence[Source], reading: Reading, tokenizer: Tokenizer) -> str:
    """Hex digits that change with whatever the prepared tokens depend on."""
    stats = [[_stat(file) for file in source.files] for source in sources]
    template = tokenizer.chat.source if tokenizer.chat else None
    today = str(date.today()) if template and "strftime_now" in template else None
    # A template writes special tokens by their names.
    special = dict(tokenizer.special_tokens) if template else None
    parts = [VERSION, stats, asdict(reading), tokenizer.identity, template, special, today]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _stat(file: Path) -> tuple[str, int, int]:
    stat = file.stat()
    return str(file.resolve()), stat.st_size, stat.st_mtime_ns


def _write(
    folder: Path, sources: Sequence[Source], reading: Reading, tokenizer: Tokenizer, progress: bool
) -> dict[str, Any]:
    """Encode everything into `folder` and return the account."""
    files = [file for source in sources for file in source.files]
    numbers = [number for number, source in enumerate(sources) for _ in source.files]
    blocks, encoder = _Blocks(files, Reader(reading, tokenizer)), Encoder(tokenizer)

    def encode(block: _Block) -> list[tuple[int, Draft, list[Encoded]]]:
        return list(encode_drafts(block.drafts, encoder, reading.kind))

    bar = tqdm(desc="preparing data", unit=" rows", disable=None if progress else True, delay=1)
    with bar, StoreWriter(folder, [str(file) for file in files], numbers) as writer:
        for block, items in _one_ahead(encode, blocks):
            for index, draft, item in items:
                more = {"extras": draft.extras, "columns": draft.columns}
                writer.add(item, file=block.file, row=index, **more)
            bar.update(block.rows)
        if not len(writer):
            raise ValueError(_nothing(blocks, reading.kind))
    drops = blocks.drops
    account = {"count": drops.count, "first": drops.first}
    return {"rows": blocks.rows, "formats": blocks.formats, **account}


class _Block(NamedTuple):
    """Rows that stand together in one file."""

    file: int  # index into the files
    drafts: list[tuple[int, Draft]]  # with the row of each
    rows: int  # those that were dropped too


class _Blocks:
    """All rows read, a block at a time, with an account of what has been read so far."""

    def __init__(self, files: Sequence[Path], reader: Reader) -> None:
        self.files, self._reader = files, reader
        self.rows, self.drops = 0, Drops()
        self.formats = Counter[str]()
        self.columns: set[str] = set()

    def __iter__(self) -> Iterator[_Block]:
        for number, path in enumerate(self.files):
            rows = enumerate(read_rows(path))
            while block := list(islice(rows, BLOCK)):
                drafts = [(i, draft) for i, row in block for draft in self._read(row, path, i)]
                self.rows += len(block)
                yield _Block(number, drafts, len(block))

    def _read(self, row: Row, path: Path, index: int) -> list[Draft]:
        if len(self.columns) < 100:
            self.columns.update(row)
        try:
            form, drafts = read_row(row, self._reader)
        except RowError as error:
            self.drops.add(error.reason, (str(path), index))
            return []
        self.formats[form] += 1
        return drafts


def _one_ahead(work: Callable[[A], B], items: Iterable[A]) -> Iterator[tuple[A, B]]:
    """(item, work(item)) in order, with work on the next one under way in a thread.

    The tokenizer works in threads of its own, outside of the interpreter: meanwhile rows are read
    and written here.
    """
    with ThreadPoolExecutor(1) as worker:
        under_way: tuple[A, Future[B]] | None = None
        for item in items:
            begun = item, worker.submit(work, item)
            if under_way is not None:
                yield under_way[0], under_way[1].result()
            under_way = begun
        if under_way is not None:
            yield under_way[0], under_way[1].result()


def encode_drafts(
    drafts: Sequence[tuple[int, Draft]], encoder: Encoder, kind: str
) -> Iterator[tuple[int, Draft, list[Encoded]]]:
    """(row, draft, its one or two (ids, scored)) of each draft, all encoded at once."""
    encoded = iter(encoder.encode([piece for _, draft in drafts for piece in draft.pieces]))
    for row, draft in drafts:
        item = list(islice(encoded, len(draft.pieces)))
        if kind in UNSCORED:
            item = [(ids, np.zeros(len(ids), bool)) for ids, _ in item]
        elif len(item) == 2:
            item = align_pair(item)
        yield row, draft, item


def _nothing(blocks: _Blocks, kind: str) -> str:
    files = blocks.files
    named = ", ".join(map(str, files[:3])) + (" ..." if len(files) > 3 else "")
    return "\n  ".join(
        [
            f"no usable row in {named} ({blocks.rows} read)",
            f"columns found: {', '.join(sorted(blocks.columns)) or 'none'}",
            f"accepted for {kind}: {ACCEPTED[kind]}",
            *blocks.drops.lines(blocks.rows),
        ]
    )
