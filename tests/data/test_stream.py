"""Streaming: the same rows as the map-style feed, exact resuming, ranks that share a window."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lean_trl.config import Config
from lean_trl.data import stream as module
from lean_trl.data.feed import open_feeds
from lean_trl.data.plan import Window
from lean_trl.data.stream import StreamFeed
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer

from .fixtures import write_jsonl
from .test_feed import settings, tokens_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def rows(count: int) -> list[dict[str, Any]]:
    """Row n is the word n // 26, n % 26: all differ."""
    return [{"text": LETTERS[n // 26] + LETTERS[n % 26]} for n in range(count)]


def streaming(cache: Path, path: Any, steps: int, **more: Any) -> Config:
    data = {"path": path, "streaming": True, **more.pop("data", {})}
    train = {"micro_batch_size": 2, "batch_size": 4, "max_steps": steps, **more.pop("train", {})}
    return settings(cache, data, train, **more)


def opened(config: Config, tok: Tokenizer, kind: str = "sft") -> StreamFeed:
    feed = open_feeds(config, tok, kind)[0]
    assert isinstance(feed, StreamFeed)
    return feed


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", 7)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.usefixtures("small_blocks")
def test_each_row_once_an_epoch_over_several_files(
    tok: Tokenizer, tmp_path: Path, cache: Path, shuffle: bool
) -> None:
    files = [str(write_jsonl(tmp_path / f"{i}.jsonl", rows(30)[i::3])) for i in range(3)]
    feed = opened(streaming(cache, files, 16, data={"shuffle": shuffle}), tok)
    windows = list(feed)
    assert [w.totals["sequences"] for w in windows] == [4, 4, 4, 4, 4, 4, 4, 2] * 2
    expected = sorted([[7 + n // 26, 7 + n % 26, 2] for n in range(30)])
    first, second = tokens_of(windows[:8]), tokens_of(windows[8:])
    assert sorted(first) == sorted(second) == expected
    assert (first == second) != shuffle
    assert [w.epoch for w in windows][7::8] == [1.0, 2.0]
    assert sorted(w.epoch for w in windows) == [w.epoch for w in windows]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.jsonl.gz"])
@pytest.mark.usefixtures("small_blocks")
def test_resuming_at_every_window(tok: Tokenizer, tmp_path: Path, cache: Path, name: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows(31))
    if name.endswith(".parquet"):
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(rows(31)), path, row_group_size=5)
    elif name.endswith(".gz"):
        import gzip

        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
        path = tmp_path / name
    config = streaming(cache, str(path), 18, data={"shuffle": True})
    feed = opened(config, tok)
    windows, states = [], [json.dumps(feed.state_dict())]
    for window in feed:
        windows.append(window)
        states.append(json.dumps(feed.state_dict()))
    assert len(windows) == 18
    for done, state in enumerate(states):
        again = opened(config, tok)
        again.load_state_dict(json.loads(state))
        assert tokens_of(list(again)) == tokens_of(windows[done:])


def test_unusable_rows_leave_their_window_short(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"text": "a"}, {"text": ""}, {"text": "b"}, {"x": 1}] * 2
    )
    feed = opened(streaming(cache, str(path), 2), tok)
    with pytest.warns(UserWarning, match="rows are dropped") as warned:
        windows = list(feed)
    assert len(warned) == 2  # one for each reason
    assert [w.totals["sequences"] for w in windows] == [2, 2]
    assert feed.drops.count == {"text is empty": 2, "no known columns": 2}


def test_truncation_pairs_and_unpaired(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    pairs = [{"prompt": "ab", "chosen": "c" * n, "rejected": "d"} for n in (1, 9, 2)]
    path = str(write_jsonl(tmp_path / "pairs.jsonl", pairs))
    config = streaming(cache, path, 1, data={"max_length": 5}, method="dpo")
    (window,) = opened(config, tok, "preference")
    assert window.totals["pairs"] == 3 and window.totals["chosen_tokens"] == 2 + 3 + 3
    assert [batch.num_pairs for batch in window.batches] == [2, 1]
    config = streaming(cache, path, 1, data={"max_length": 5}, method="reward")
    with pytest.warns(UserWarning, match="over data.max_length"):
        (window,) = opened(config, tok, "reward")
    assert window.totals["pairs"] == 2
    (window,) = opened(streaming(cache, path, 1, method="kto"), tok, "unpaired")
    assert [b.mismatched.num_sequences for b in window.batches if b.mismatched] == [2, 2, 2]


def test_token_budget(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows(4)))
    train = {"max_tokens_per_micro_batch": 10}
    config = streaming(cache, path, 1, train=train, data={"max_length": 10})
    (window,) = opened(config, tok)
    assert [batch.num_tokens for batch in window.batches] == [9, 3]


@pytest.mark.parametrize(
    ("data", "train", "message"),
    [
        ({}, {"max_steps": None}, "set train.max_steps"),
        ({"packing": True}, {}, "data.packing needs all lengths"),
        ({}, {"max_tokens_per_micro_batch": 8}, "data.max_length <= 8"),
    ],
)
def test_refusals(
    tok: Tokenizer, tmp_path: Path, cache: Path, data: Any, train: Any, message: str
) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows(4)))
    with pytest.raises(ValueError, match=message):
        open_feeds(streaming(cache, path, 1, data=data, train=train), tok, "sft")
    with pytest.raises(ValueError, match="weights"):
        open_feeds(streaming(cache, [{"path": path, "weight": 1}], 1), tok, "sft")
    empty = str(write_jsonl(tmp_path / "empty.jsonl", []))
    with pytest.raises(ValueError, match="no rows in"):
        list(opened(streaming(cache, empty, 1), tok))


def _rank(rank: int, store: Path, folder: Path, config: Config, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    kind = "unpaired" if config.method == "kto" else "sft"
    feed = open_feeds(config, load_tokenizer(folder), kind, rank, 2)[0]
    windows = list(feed)
    counts = [(w.totals, len(w.batches), sum(b.num_units for b in w.batches)) for w in windows]
    results.put((rank, tokens_of(windows), counts, others_of(windows)))
    dist.destroy_process_group()


def others_of(windows: list[Window]) -> list[list[int]]:
    """The ids of every mismatched sequence."""
    others = [b.mismatched for w in windows for b in w.batches if b.mismatched is not None]
    return tokens_of([Window(others, {}, 0.0)])


def on_two_ranks(store: Path, tok: Tokenizer, config: Config) -> list[tuple]:
    """What _rank puts, in the order of the ranks."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (store, tok.folder, config, results)
    ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    return found


def test_two_ranks_see_each_row_once(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", [*rows(9), {"text": ""}]))
    config = streaming(cache, path, 3)
    (_, ids_0, counts_0, _), (_, ids_1, counts_1, _) = on_two_ranks(tmp_path / "s", tok, config)
    assert sorted(ids_0 + ids_1) == [[7, 7 + n, 2] for n in range(9)]
    assert [c[:2] for c in counts_0] == [c[:2] for c in counts_1]
    for (totals, _, mine), (_, _, other) in zip(counts_0, counts_1, strict=True):
        assert totals["tokens"] == mine + other
    assert [totals["sequences"] for totals, _, _ in counts_0] == [4, 4, 1]


def test_completions_go_round_the_window_of_all_ranks(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    answers = [{"prompt": p, "completion": p, "label": True} for p in "abcde"]
    path = str(write_jsonl(tmp_path / "rows.jsonl", answers))
    config = streaming(cache, path, 1, method="kto", train={"batch_size": 5})
    alone = others_of(list(opened(config, tok, "unpaired")))
    assert alone == [[7, 11, 2], [8, 7, 2], [9, 8, 2], [10, 9, 2], [11, 10, 2]]
    (*_, mine), (*_, other) = on_two_ranks(tmp_path / "s", tok, config)
    assert sorted(mine + other) == alone


def test_other_files_are_refused(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows(9))
    state = opened(streaming(cache, str(path), 2), tok).state_dict()
    write_jsonl(path, rows(8))
    with pytest.raises(ValueError, match="the data have changed.*resume with the same files"):
        opened(streaming(cache, str(path), 2), tok).load_state_dict(state)


def test_one_rank_is_the_map_style_feed_unshuffled(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows(10)))
    streamed = list(opened(streaming(cache, path, 3), tok))
    whole: list[Window] = list(
        open_feeds(
            settings(cache, {"path": path}, {"micro_batch_size": 2, "batch_size": 4}), tok, "sft"
        )[0]
    )
    assert tokens_of(streamed) == tokens_of(whole)
    assert [w.totals for w in streamed] == [w.totals for w in whole]
