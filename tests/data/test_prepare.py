"""The cache: made once, never half made, made again when anything that matters changes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lean_trl.data import prepare as module
from lean_trl.data.drafts import Reading
from lean_trl.data.prepare import fingerprint, prepare
from lean_trl.data.rows import Row
from lean_trl.data.sources import Source
from lean_trl.data.store import load_store
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer

from .fixtures import write_jsonl, write_tokenizer

SFT = Reading("sft")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(
        "rows", (write_jsonl(tmp_path / "rows.jsonl", [{"text": "ab"}, {"text": ""}] * 3),)
    )


def folders(cache: Path) -> list[str]:
    return sorted(f.name for f in cache.iterdir() if f.is_dir())


def test_the_second_time_reads_the_cache(
    tok: Tokenizer, source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare([source], SFT, tok, cache)
    monkeypatch.setattr(module, "read_rows", lambda path: pytest.fail("read again"))
    second = prepare([source], SFT, tok, cache)
    assert second.store[2].input_ids.tolist() == first.store[2].input_ids.tolist() == [7, 8, 2]
    assert (second.rows, second.drops, second.formats) == (6, first.drops, {"text": 3})
    assert second.drops.first == {"text is empty": (str(source.files[0]), 1)}
    assert second.store.source.tolist() == [0, 0, 0]


def test_a_report_stays_short_however_many_reasons_there_are() -> None:
    drops = module.Drops()
    for row in range(1000):
        drops.add(f"label is {row / 7}", ("a.jsonl", row))
    drops.add("text is empty", ("a.jsonl", 5), 3)
    lines = drops.lines(2000)
    assert len(lines) == 21 and lines[0].startswith("3 of 2000 rows dropped: text is empty")
    assert lines[-1] == "981 of 2000 rows dropped for other reasons"


def test_what_the_fingerprint_depends_on(tok: Tokenizer, source: Source, tmp_path: Path) -> None:
    def other(folder: str, **options: object) -> Tokenizer:
        return load_tokenizer(write_tokenizer(tmp_path / folder, **options))  # type: ignore[arg-type]

    now = fingerprint([source], SFT, tok)
    assert fingerprint([source], SFT, other("same")) == now
    prints = [
        now,
        fingerprint([source], Reading("sft", assistant_only_loss=True), tok),
        fingerprint([source], SFT, other("bos", adds_bos=True)),
        fingerprint([source], SFT, other("template", template="{{ messages }}")),
        fingerprint([source], SFT, replace(tok, special_tokens={"eos_token": "<end>"})),
        fingerprint([source, source], SFT, tok),
    ]
    os.utime(source.files[0], ns=(0, 0))
    prints.append(fingerprint([source], SFT, tok))
    assert len(set(prints)) == len(prints)


def test_a_failure_leaves_nothing(
    tok: Tokenizer, source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(path: Path) -> Iterator[Row]:
        yield {"text": "a"}
        raise OSError("disk gone")

    with monkeypatch.context() as patch:
        patch.setattr(module, "read_rows", breaks)
        with pytest.raises(OSError, match="disk gone"):
            prepare([source], SFT, tok, cache)
    assert folders(cache) == []
    assert len(prepare([source], SFT, tok, cache).store) == 3


def _slow_rows(path: Path) -> list[Row]:
    (path.parent / f"reader-{os.getpid()}").touch()
    time.sleep(0.5)
    return [{"text": "ab"}]


def _prepare_slowly(source: Source, tokenizer_folder: Path, cache: Path) -> None:
    module.read_rows = _slow_rows  # type: ignore[assignment]
    prepared = prepare([source], SFT, load_tokenizer(tokenizer_folder), cache, progress=False)
    assert len(prepared.store) == 1


def test_one_process_prepares_and_the_others_wait(
    tok: Tokenizer, source: Source, cache: Path
) -> None:
    context = multiprocessing.get_context("fork")
    arguments = (source, tok.folder, cache)
    workers = [context.Process(target=_prepare_slowly, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(list(source.files[0].parent.glob("reader-*"))) == 1


def test_a_dead_process_is_not_waited_for(tok: Tokenizer, source: Source, cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    worker = context.Process(target=_prepare_slowly, args=(source, tok.folder, cache))
    worker.start()
    while not list(source.files[0].parent.glob("reader-*")):
        time.sleep(0.01)
    worker.kill()
    worker.join()
    assert len(prepare([source], SFT, tok, cache).store) == 3
    assert len([name for name in folders(cache) if "." not in name]) == 1


def test_a_cache_that_cannot_be_written(tok: Tokenizer, source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="set data.cache_dir"):
        prepare([source], SFT, tok, tmp_path / "file" / "cache")


def test_nothing_is_unpickled(tok: Tokenizer, source: Source, cache: Path) -> None:
    prepare([source], SFT, tok, cache)
    (folder,) = [f for f in cache.iterdir() if f.is_dir()]
    kinds = {file.suffix for file in folder.iterdir()}
    assert kinds == {".i32", ".bool", ".npy", ".json"}
    assert load_store(folder)[0].source == (str(source.files[0]), 0)
