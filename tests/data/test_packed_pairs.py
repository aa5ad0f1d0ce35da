"""Bins of whole preference pairs and of unpaired completions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_trl.config import Config, LossConfig
from lean_trl.data.feed import Feed, open_feeds
from lean_trl.data.packing import pack
from lean_trl.data.tokenizer import Tokenizer

from .fixtures import write_jsonl
from .test_feed import settings

# (prompt, chosen, rejected) in tokens
LENGTHS = [(1, 2, 3), (2, 4, 4), (1, 1, 1), (1, 1, 2), (2, 2, 2)]
SUMS = [7, 12, 4, 5, 8]  # of both sides
BIN = {"max_length": 6, "packing": True}


def pairs() -> list[dict[str, Any]]:
    """Row n is made of 5 + n, its rejected answer of 10 + n."""
    rows = []
    for n, (prompt, chosen, rejected) in enumerate(LENGTHS):
        token = 5 + n
        ids = {"chosen_ids": [token] * chosen, "rejected_ids": [token + 5] * rejected}
        rows.append({"prompt_ids": [token] * prompt, **ids})
    return rows


def unpaired() -> list[dict[str, Any]]:
    lengths = [(1, 1), (2, 3), (1, 2), (1, 4), (2, 1)]
    return [
        {"prompt_ids": [5 + n] * p, "completion_ids": [10 + n] * c, "label": n % 2 == 0}
        for n, (p, c) in enumerate(lengths)
    ]


def config(
    folder: Path, cache: Path, rows: list[dict[str, Any]], method: str, **train: Any
) -> Config:
    path = write_jsonl(folder / "rows.jsonl", rows)
    return settings(cache, {"path": str(path), **BIN}, train, method)


def known(feed: Any) -> Feed:
    assert isinstance(feed, Feed)
    return feed


def rows_of(feed: Feed) -> list[list[int]]:
    """The row that each sequence of each bin comes from."""
    offsets, rows = feed.items.offsets, feed.items.store.row
    return [rows[low:high].tolist() for low, high in zip(offsets[:-1], offsets[1:], strict=True)]


def test_a_pair_is_one_document_of_both_lengths(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": 1}
    feed, _, report = open_feeds(
        config(tmp_path, cache, pairs(), "dpo", **train), tok, "preference"
    )
    feed = known(feed)
    # max_length for each side: bins of 12. 12 | 8 + 4 | 7 + 5
    assert rows_of(feed) == [[1, 1], [4, 4, 2, 2], [0, 0, 3, 3]]
    assert "packed into 3 bins of 12 (bfd), 100.00% filled" in report
    assert "5 of 5 rows" in report and "36 tokens" in report
    assert feed.steps == 2  # after packing
    windows = list(feed)
    assert [len(window.batches) for window in windows] == [1, 1]
    # chosen tokens 4 + 2 + 1 and 2 + 1; scored ones besides: rejected 4 + 2 + 1 and 3 + 2
    totals = [(7, 14, 24, 6, 3), (3, 8, 12, 4, 2)]
    for window, expected in zip(windows, totals, strict=True):
        names = ("chosen_tokens", "tokens", "processed", "sequences", "pairs")
        assert tuple(window.totals[name] for name in names) == expected
        for unit, total in window.totals.items():
            assert total == sum(batch.totals[unit] for batch in window.batches)
    first = windows[0].batches[0]
    assert first.lengths == (6, 6, 4, 4, 2, 2) and first.units == (4, 4, 2, 2, 1, 1)
    assert first.targets.tolist() == [6] * 4 + [11] * 4 + [9, 9, 14, 14, 7, 12]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_batch_splits_a_pair(
    tok: Tokenizer, tmp_path: Path, cache: Path, size: int, world: int
) -> None:
    rng = np.random.default_rng(size)
    rows = []
    for n in range(40):
        prompt, chosen, rejected = (rng.integers(1, k).tolist() for k in (4, 4, 4))
        ids = {
            "prompt_ids": [7] * prompt,
            "chosen_ids": [8] * chosen,
            "rejected_ids": [9] * rejected,
        }
        rows.append({**ids, "margin": float(n)})
    train = {"micro_batch_size": size, "batch_size": 6, "num_epochs": 2}
    settled = config(tmp_path, cache, rows, "reward", **train)
    settled = replace(settled, data=replace(settled.data, shuffle=True))
    ranks = [list(open_feeds(settled, tok, "reward", rank, world)[0]) for rank in range(world)]
    seen: list[float] = []
    for together in zip(*ranks, strict=True):
        batches = [batch for window in together for batch in window.batches]
        for unit, total in together[0].totals.items():
            assert total == sum(batch.totals[unit] for batch in batches)
        for batch in batches:
            if not batch.num_pairs:
                continue
            assert batch.num_sequences == 2 * batch.num_pairs
            sources = batch.sources
            assert sources[0::2] == sources[1::2]
            margins = batch.extras["margin"].tolist()
            assert margins == [float(row) for _, row in sources[0::2]]
            cu = batch.cu_seqlens.tolist()
            lasts = [int(batch.input_ids[end - 1]) for end in cu[1 : batch.num_sequences + 1]]
            assert lasts == [8, 9] * batch.num_pairs
            seen += margins
    assert sorted(seen) == sorted([float(n) for n in range(40)] * 2)


def test_packing_drops_and_cuts_what_is_dropped_and_cut_without_it(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    long = {"prompt_ids": [7] * 4, "chosen_ids": [8] * 5, "rejected_ids": [9] * 3}
    gone = {"prompt_ids": [7] * 6, "chosen_ids": [8], "rejected_ids": [9]}
    packed = config(tmp_path, cache, [long, gone, *pairs()], "dpo")
    plain = replace(packed, data=replace(packed.data, packing=False))
    stores, reports = [], []
    for settled in (packed, plain):
        feed, _, report = open_feeds(settled, tok, "preference")
        stores.append(known(feed).items.store)
        reports.append(report.splitlines())
    assert sorted(stores[0].start.tolist()) == sorted(stores[1].start.tolist())
    assert sorted(stores[0].lengths.tolist()) == sorted(stores[1].lengths.tolist())
    assert reports[0][:3] == reports[1][:3] and "1 of 7 rows dropped" in "".join(reports[0])


def test_sources_do_not_share_bins(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    short = [{"prompt_ids": [7], "chosen_ids": [8], "rejected_ids": [9]}] * 2
    files = [write_jsonl(tmp_path / f"{n}.jsonl", short) for n in "ab"]
    paths = [{"path": str(file), "weight": 1} for file in files]
    feed, _, report = open_feeds(
        settings(cache, {"path": paths, **BIN}, None, "dpo"), tok, "preference"
    )
    items = known(feed).items
    assert np.diff(items.offsets).tolist() == [4, 4] and items.source.tolist() == [0, 1]
    assert "1 bins an epoch of 1" in report


@pytest.mark.parametrize("packing", [False, True])
def test_a_source_with_a_weight_may_give_a_batch_the_same_pair_twice(
    tok: Tokenizer, tmp_path: Path, cache: Path, packing: bool
) -> None:
    row = {"prompt_ids": [7], "chosen_ids": [8], "rejected_ids": [9]}
    few = write_jsonl(tmp_path / "few.jsonl", [row])
    many = write_jsonl(tmp_path / "many.jsonl", [row] * 9)
    paths = [{"path": str(file), "weight": 1} for file in (few, many)]
    data = {"path": paths, **BIN, "packing": packing}
    feed, _, _ = open_feeds(settings(cache, data, {"batch_size": 10}, "dpo"), tok, "preference")
    window = next(iter(feed))
    sources = [source for batch in window.batches for source in batch.sources[0::2]]
    assert len(sources) == window.totals["pairs"] > len(set(sources))


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
@pytest.mark.parametrize("method", ["dpo", "reward", "kto"])
def test_completions_are_not_cut_into_pieces(
    tok: Tokenizer, tmp_path: Path, cache: Path, method: str, strategy: Any
) -> None:
    kind = {"dpo": "preference", "reward": "reward", "kto": "unpaired"}[method]
    rows = unpaired() if method == "kto" else pairs()
    settled = config(tmp_path, cache, rows, method)
    data = replace(settled.data, packing_strategy=strategy)
    if method == "reward":
        data = replace(data, overlong="truncate")
    with pytest.raises(ValueError, match=f"{strategy} cuts rows into pieces, .* set it bfd"):
        open_feeds(replace(settled, data=data), tok, kind)


def test_streams_are_not_packed(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    settled = config(tmp_path, cache, pairs(), "dpo", max_steps=2)
    streamed = replace(settled, data=replace(settled.data, streaming=True))
    with pytest.raises(ValueError, match="data.packing needs all lengths"):
        open_feeds(streamed, tok, "preference")


# -- unpaired completions --


@pytest.mark.parametrize(("size", "world"), [(1, 1), (2, 1), (3, 1), (1, 2)])
def test_completions_go_round_the_sequences_of_a_window(
    tok: Tokenizer, tmp_path: Path, cache: Path, size: int, world: int
) -> None:
    settled = config(tmp_path, cache, unpaired(), "kto", micro_batch_size=size, batch_size=6)
    swapped: dict[int, tuple[int, int]] = {}
    for rank in range(world):
        feed = known(open_feeds(settled, tok, "unpaired", rank, world)[0])
        # lengths 2, 5, 3, 5, 3 in bins of 6: 5 | 5 | 3 + 3 | 2
        assert rows_of(feed) == [[1], [3], [2, 4], [0]]
        (window,) = feed
        assert window.totals["sequences"] == 5 and window.totals["pairs"] == 0
        for batch in window.batches:
            assert batch.mismatched is not None
            assert batch.mismatched.num_sequences == batch.num_sequences
            cu = batch.mismatched.cu_seqlens.tolist()
            for s, (_, row) in enumerate(batch.sources):
                ids = batch.mismatched.input_ids[cu[s] : cu[s + 1]].tolist()
                swapped[row] = (ids[0] - 5, ids[-1] - 10)
    # each prompt with the completion of the sequence before it in 1, 3, 2, 4, 0
    assert swapped == {1: (1, 0), 3: (3, 1), 2: (2, 3), 4: (4, 2), 0: (0, 4)}


def test_a_bin_alone_in_its_window_has_other_completions_still(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    settled = config(tmp_path, cache, unpaired(), "kto", gradient_accumulation_steps=1)
    settled = replace(settled, train=replace(settled.train, micro_batch_size=1))
    for window in open_feeds(settled, tok, "unpaired")[0]:
        (batch,) = window.batches
        assert batch.mismatched is not None
        cu, other = batch.mismatched.cu_seqlens.tolist(), batch.mismatched.input_ids
        for s, (_, row) in enumerate(batch.sources):
            assert int(other[cu[s]]) == 5 + row and int(other[cu[s + 1] - 1]) != 10 + row


def test_bins_are_those_of_the_algorithm(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    feed = known(open_feeds(config(tmp_path, cache, pairs(), "dpo"), tok, "preference")[0])
    bins = [[2 * [document] for document, _, _ in each] for each in pack(SUMS, 12).bins]
    assert rows_of(feed) == [sum(each, []) for each in bins]
    kto = config(tmp_path, cache, unpaired(), "kto")
    kto = replace(kto, loss=LossConfig(loss_type="apo_zero_unpaired"))
    feed = known(open_feeds(kto, tok, "unpaired")[0])
    assert [len(rows) for rows in rows_of(feed)] == [1, 1, 2, 1]
