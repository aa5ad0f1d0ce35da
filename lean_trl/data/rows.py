"""Rows from files: jsonl, json, parquet, arrow, csv, compressed or not; one file, a folder, or a
hub dataset.

A row is a dict as its writer meant it. JSON goes through Python's parser because Arrow's refuses
rows whose nested values differ in type; rows of Arrow and parquet lose the keys that only exist
because another row has them.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

Row = dict[str, Any]

COMPRESSED: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
FORMATS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv")
# Written beside the rows by other libraries, and no rows.
METADATA = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")
HELD_OUT = ("test", "validation", "valid", "val", "dev", "eval")  # never trained on unasked


def find_files(path: Path, split: str | None = None, *, held_out: bool = False) -> list[Path]:
    """The row files of `path` in order: itself, or those of a folder that belong to `split`
    (default: train).

    In a folder a file belongs to a split when its name or a folder on the way has the split's name
    as a word: `data/train-00000-of-00002.parquet`, `test.jsonl.gz`. Where none says train, it is
    all but those of HELD_OUT. held_out: what a folder gives without `split` is those of HELD_OUT,
    where there are any. Raises ValueError when there are none.
    """
    if path.is_file():
        if split is not None:
            raise ValueError(f"{path} is one file and has no splits: leave the split out")
        if format_of(path) is None:
            raise ValueError(
                f"{path}: unknown kind of file; known: {', '.join(FORMATS)}, also as .gz .bz2 .xz "
                f".zst"
            )
        return [path]
    files = [
        f
        for f in sorted(path.rglob("*"))
        if f.is_file()
        and format_of(f)
        and f.name not in METADATA
        # .ipynb_checkpoints and the like hold copies
        and not any(part.startswith(".") for part in f.relative_to(path).parts)
    ]
    if not files:
        raise ValueError(
            f"{path} holds no files of rows ({', '.join(FORMATS)}, also as .gz .bz2 .xz .zst)"
        )

    def saying(*words: str) -> list[Path]:
        return [f for f in files if any(_says(word, f.relative_to(path)) for word in words)]

    kept_apart = saying(*HELD_OUT)
    if split is None and held_out and kept_apart:
        return kept_apart
    chosen = saying(split or "train")
    if chosen:
        return chosen
    if split is None:
        return [f for f in files if f not in kept_apart] or files
    names = ", ".join(str(f.relative_to(path)) for f in files[:10])
    raise ValueError(f"{path} has no files of split {split!r}; its files: {names}")


def _says(word: str, path: Path) -> bool:
    """Whether a path has `word` (a text with a slash too) between what are no letters or digits."""
    return bool(
        re.search(rf"(^|[^a-z0-9]){re.escape(word.lower())}($|[^a-z0-9])", path.as_posix().lower())
    )


def format_of(path: Path) -> str | None:
    """The suffix that says how to read `path`, compression aside; None: it holds no rows."""
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in (*COMPRESSED, ".zst"):
        suffixes = suffixes[:-1]
    return (
        suffixes[-1]
        if suffixes and suffixes[-1] in FORMATS and not path.name.startswith(".")
        else None
    )


def read_rows(path: Path, first: int = 0) -> Iterator[Row]:
    """The rows of one file in order, from row number `first` on.

    Raises ValueError that names the line where a file is broken.
    """
    form = format_of(path)
    if form == ".parquet":
        yield from _parquet_rows(path, first)
    elif form == ".arrow":
        yield from islice(_arrow_rows(path), first, None)
    elif form in (".csv", ".tsv"):
        yield from islice(_csv_rows(path, "\t" if form == ".tsv" else ","), first, None)
    elif form == ".json" and _is_array(path):
        with open_bytes(path) as stream:
            yield from islice(_objects(json.load(stream), path), first, None)
    else:
        with open_bytes(path) as stream:
            yield from islice(_objects(_json_lines(stream, path), path), first, None)


def is_lines(path: Path) -> bool:
    """A plain file of one JSON value a line, which can be entered at any line."""
    return path.suffix in (".jsonl", ".ndjson")


def open_bytes(path: Path) -> IO[bytes]:
    """`path` opened for reading, decompressed by its suffix."""
    if path.suffix == ".zst":
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return COMPRESSED.get(path.suffix, open)(path, "rb")


def parse_line(line: bytes, path: Path, number: int) -> Any:
    """The JSON value of line `number` (from 1)."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error


def _json_lines(stream: IO[bytes], path: Path) -> Iterator[Any]:
    """One value for each line that is not blank."""
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield parse_line(line, path, number)


def _is_array(path: Path) -> bool:
    with open_bytes(path) as stream:
        return stream.read(256).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["


def check_object(value: Any, path: Path, index: int) -> Row:
    """`value` when it is a row."""
    if not isinstance(value, dict):
        raise ValueError(
            f"{path}, row {index}: a row is an object with named columns, got {value!r:.80}"
        )
    return value


def _objects(values: Iterator[Any] | Sequence[Any], path: Path) -> Iterator[Row]:
    return (check_object(value, path, index) for index, value in enumerate(values))


def _csv_rows(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the default, 128 KiB, is shorter than many documents
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, delimiter=delimiter)
        for row in reader:
            if None in row:  # what the reader calls fields that have no name
                raise ValueError(
                    f"{path}, line {reader.line_num}: more fields than the "
                    f"{len(reader.fieldnames or ())} of the header: quote those with {delimiter!r}"
                )
            yield row


def _parquet_rows(path: Path, first: int) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(str(path), memory_map=True) as file:
        groups = list(range(file.num_row_groups))
        while groups and first >= file.metadata.row_group(groups[0]).num_rows:
            first -= file.metadata.row_group(groups.pop(0)).num_rows
        for batch in file.iter_batches(batch_size=1024, row_groups=groups):
            rows = batch.slice(min(first, len(batch))).to_pylist()
            first -= len(batch) - len(rows)
            yield from map(without_nulls, rows)


def _arrow_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        try:
            reader: Any = pa.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:  # the streaming format, which has no footer
            batches = iter(pa.ipc.open_stream(source))
        for batch in batches:
            yield from map(without_nulls, batch.to_pylist())


def without_nulls(value: Any) -> Any:
    """`value` without the struct keys that are null: Arrow gives every struct the keys of all rows.

    >>> without_nulls({"role": "user", "tool_calls": None, "parts": [{"text": "hi", "url": None}]})
    {'role': 'user', 'parts': [{'text': 'hi'}]}
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
