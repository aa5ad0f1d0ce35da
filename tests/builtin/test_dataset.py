"""The built-in dataset: the same everywhere, no row in two splits, written whole or not at all."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import pytest

from lean_trl import builtin
from lean_trl.builtin import dataset
from lean_trl.builtin.dataset import SPLITS, dataset_folder, dataset_path, make_rows
from lean_trl.data.hub import resolve_dataset
from lean_trl.data.rows import find_files, read_rows

ROWS = make_rows()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path))
    return tmp_path


def sums(split: str) -> list[tuple[str, ...]]:
    """What each row asks, whatever its words: its numbers."""
    return [tuple(re.findall(r"\d+", row["messages"][0]["content"])) for row in ROWS[split]]


def test_no_problem_that_is_trained_on_is_held_out() -> None:
    assert {split: len(rows) for split, rows in ROWS.items()} == {
        split: count for split, (_, count) in SPLITS.items()
    }
    trained = set(sums("train_easy")) | set(sums("train_hard"))
    held_out = sums("test_easy") + sums("test_hard")
    assert len(set(sums("train_easy"))) > 2500
    assert len(set(sums("test_easy"))) == len(set(sums("test_hard"))) == 500
    assert not trained & set(held_out)


def test_rows_come_from_the_seed_alone() -> None:
    assert make_rows() == ROWS
    assert make_rows(1)["test_easy"] != ROWS["test_easy"]
    # The same on every machine and Python: a held-out row, written out.
    asked, answer = ROWS["test_hard"][1]["messages"]
    assert asked["content"] == "What is 2 + 27 + 17 + 18?"
    assert answer["content"] == "2 + 27 = 29\n29 + 17 = 46\n46 + 18 = 64\nAnswer: 64"


def test_more_rows_begin_with_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {split: (level, 40) for split, (level, _) in SPLITS.items()}
    monkeypatch.setattr(dataset, "SPLITS", fewer)
    assert make_rows() == {split: rows[:40] for split, rows in ROWS.items()}


def test_files_hold_the_rows_and_splits_find_them(cache: Path) -> None:
    folder = resolve_dataset(None)
    assert folder == dataset_folder() and folder.parent == cache / "lean_trl"
    for split in SPLITS:
        assert find_files(folder, split) == [dataset_path(split)]
        assert list(read_rows(dataset_path(split))) == ROWS[split]
    # The words train and test stand for both levels.
    assert find_files(folder) == [dataset_path("train_easy"), dataset_path("train_hard")]
    assert find_files(folder, "test") == [dataset_path("test_easy"), dataset_path("test_hard")]


def test_written_once_and_no_scratch_left(cache: Path) -> None:
    before = dataset_path("train_easy").stat().st_mtime_ns
    assert dataset_path("train_easy").stat().st_mtime_ns == before
    assert [entry.name for entry in (cache / "lean_trl").iterdir()] == [dataset_folder().name]


def test_processes_that_race_all_get_whole_files(cache: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: dataset_folder(), range(4)))
    assert len(folders) == 1
    assert {file.stem for file in folders.pop().iterdir()} == set(SPLITS)
    assert len(list((cache / "lean_trl").iterdir())) == 1


def test_a_failed_write_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path, seed: int = 0, kind: str = "sft") -> None:
        (folder / "train_easy.parquet").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(dataset, "write_dataset", fails)
    with pytest.raises(OSError, match="disk full"):
        dataset_folder()
    assert list((cache / "lean_trl").iterdir()) == []


def test_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match="no split 'validation', only train_easy"):
        builtin.dataset_path("validation")
