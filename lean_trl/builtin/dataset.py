"""The built-in dataset: four parquet files of conversations, written on first use.

    train_easy  train_hard    what the recipe trains on (the split `train` reads both)
    test_easy   test_hard     held out (`test` reads both): no problem that is trained on

They are in a folder of the Hugging Face cache, where other downloads are, so whoever has moved that
cache has moved this too. The folder is named by the generator's source: after a change of the
generator nothing stale is found.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from lean_trl.builtin import preferences, problems
from lean_trl.builtin.preferences import preference_row, unpaired_row
from lean_trl.builtin.problems import EASY, HARD, Problem, conversation_row

SPLITS = {
    "train_easy": (EASY, 7200),
    "train_hard": (HARD, 2400),
    "test_easy": (EASY, 500),
    "test_hard": (HARD, 500),
}
# What is trained on -> its rows, made of the conversations. All kinds ask the same questions.
KINDS = ("sft", "preference", "reward", "unpaired")


def make_rows(seed: int = 0, kind: str = "sft") -> dict[str, list[dict[str, Any]]]:
    """{split: rows}; the same seed gives the same rows on every machine.

    Held-out problems are all different. Training problems may come again, mostly in other words:
    there are 71 easy sums of two numbers, and they must not be rare.
    """
    splits = {}
    for split, (level, count) in SPLITS.items():
        rng, faults = Random(f"{seed} {split}"), Random(f"{seed} {split} {kind}")
        held_out = split.startswith("test")
        stream = problems.problems(level, rng, held_out=held_out)
        splits[split] = [
            _turned(kind, conversation_row(problem, rng), problem, faults)
            for problem in islice(_distinct(stream) if held_out else stream, count)
        ]
    return splits


def _distinct(stream: Iterator[Problem]) -> Iterator[Problem]:
    seen: set[Problem] = set()
    for problem in stream:
        if problem not in seen:
            seen.add(problem)
            yield problem


def _turned(kind: str, row: dict[str, Any], problem: Problem, rng: Random) -> dict[str, Any]:
    if kind == "unpaired":
        return unpaired_row(row, problem, rng)
    return row if kind == "sft" else preference_row(row, problem, rng)


def write_dataset(folder: Path, seed: int = 0, kind: str = "sft") -> None:
    """Write `folder`/<split>.parquet for every split."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, rows in make_rows(seed, kind).items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def dataset_folder(kind: str = "sft") -> Path:
    """The folder of the built-in dataset, written now if it is not there; kind: one of KINDS.

    It appears under its name only when it is complete; ranks that race write the same rows, and the
    first wins.
    """
    from huggingface_hub.constants import HF_HOME

    if kind not in KINDS:
        raise ValueError(f"there are no built-in rows for {kind}: set data.path")
    folder = Path(HF_HOME) / "lean_trl" / f"builtin-{kind}-{_fingerprint()}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            written = Path(scratch) / "rows"
            written.mkdir()
            write_dataset(written, kind=kind)
            try:
                os.rename(written, folder)
            except OSError:  # another process was first
                if not folder.is_dir():
                    raise
    return folder


def dataset_path(split: str) -> Path:
    """The parquet file of one split; raises ValueError for an unknown one."""
    if split not in SPLITS:
        raise ValueError(f"the built-in dataset has no split {split!r}, only {', '.join(SPLITS)}")
    return dataset_folder() / f"{split}.parquet"


def _fingerprint() -> str:
    sources = [Path(module) for module in (__file__, problems.__file__, preferences.__file__)]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
