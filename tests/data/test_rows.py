"""Files of rows: every kind gives the same rows; broken ones name the place."""

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path

import pytest

from lean_trl.data.rows import find_files, read_rows

ROWS = [
    {"text": "one", "meta": {"a": 1}},
    {"text": "zwei\nlines é", "meta": {"b": ["x"]}},
    {"text": 'three "quoted", with comma', "meta": {"a": 2}},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write(path: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    name = path.name
    if name.endswith(".parquet"):
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=2)
    elif name.endswith((".arrow", ".stream.arrow")):
        table = pa.Table.from_pylist(ROWS)
        new = pa.ipc.new_stream if ".stream" in name else pa.ipc.new_file
        with new(str(path), table.schema) as sink:
            sink.write_table(table, max_chunksize=2)
    elif name.endswith((".csv", ".tsv")):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if name.endswith("tsv") else ",")
            writer.writerow(["text", "meta"])
            writer.writerows([[row["text"], json.dumps(row["meta"])] for row in ROWS])
    elif name.endswith(".json"):
        path.write_text(json.dumps(ROWS, indent=1))
    elif name.endswith(".zst"):
        with pa.output_stream(str(path), compression="zstd") as sink:
            sink.write(LINES)
    else:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
        path.write_bytes(pack.get(path.suffix, lambda data: data)(LINES))
    return path


@pytest.mark.parametrize(
    "name",
    "a.jsonl a.ndjson a.jsonl.gz a.jsonl.bz2 a.jsonl.xz a.jsonl.zst a.json lines.jsonl a.parquet "
    "a.arrow "
    "a.stream.arrow a.csv a.tsv".split(),
)
def test_every_kind_of_file(tmp_path: Path, name: str) -> None:
    rows = list(read_rows(write(tmp_path / name)))
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS]
    if not name.endswith("sv"):
        assert [row["meta"] for row in rows] == [row["meta"] for row in ROWS]


def test_json_lines_under_the_name_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\n" + LINES + b"\n")
    assert list(read_rows(tmp_path / "a.json")) == ROWS


def test_broken_rows_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": \n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 3: not JSON"):
        list(read_rows(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n"b"\n')
    with pytest.raises(ValueError, match=r"b.jsonl, row 1: a row is an object"):
        list(read_rows(tmp_path / "b.jsonl"))
    (tmp_path / "c.csv").write_text('text,label\n"a, b",1\na, b,1\n')
    with pytest.raises(ValueError, match=r"c.csv, line 3: more fields than the 2 of the header"):
        list(read_rows(tmp_path / "c.csv"))


def test_files_of_a_folder_by_split(tmp_path: Path) -> None:
    names = [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-00000-of-00001.parquet",
        "README.md",
        "dataset_info.json",
        ".hidden.jsonl",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [str(f.relative_to(tmp_path)) for f in find_files(tmp_path)]
    assert found == names[:2]
    assert [f.name for f in find_files(tmp_path, "test")] == ["test-00000-of-00001.parquet"]
    with pytest.raises(ValueError, match="no files of split 'validation'.*train-00000"):
        find_files(tmp_path, "validation")
    for name in names[:2]:
        (tmp_path / name).unlink()
    assert len(find_files(tmp_path)) == 1  # nothing but a test
    for name in ("rows.jsonl", "valid.jsonl", "main/train.jsonl", "socratic/train.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find_files(tmp_path, "main/train") == [tmp_path / "main/train.jsonl"]
    for name in ("main", "socratic"):
        (tmp_path / name / "train.jsonl").unlink()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "rows.jsonl").touch()
    assert find_files(tmp_path) == [tmp_path / "rows.jsonl"]  # what is held out is not trained on
    held_out = [f.name for f in find_files(tmp_path, held_out=True)]
    assert held_out == ["test-00000-of-00001.parquet", "valid.jsonl"]
    for name in held_out:
        next(tmp_path.rglob(name)).unlink()
    assert find_files(tmp_path, held_out=True) == [tmp_path / "rows.jsonl"]


def test_what_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no files of rows"):
        find_files(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(ValueError, match="unknown kind of file"):
        find_files(tmp_path / "a.txt")
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match="has no splits"):
        find_files(tmp_path / "a.jsonl", "test")
