"""From settings to windows:

recorded token counts, coverage, truncation, packing, resuming, the report.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_trl.config import Config, DataConfig, TrainConfig
from lean_trl.data.feed import Feed, open_feeds
from lean_trl.data.items import swap_completion
from lean_trl.data.plan import Window
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer
from lean_trl.types import Example

from .fixtures import write_jsonl

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDED = json.loads((GOLDEN / "trl_offline.json").read_text())


def settings(
    cache: Path,
    data: dict[str, Any],
    train: dict[str, Any] | None = None,
    method: str = "sft",
    seed: int = 0,
) -> Config:
    data = {"cache_dir": str(cache), "shuffle": False, **data}
    return Config(
        method=method, seed=seed, data=DataConfig(**data), train=TrainConfig(**(train or {}))
    )


def tokens_of(windows: list[Window]) -> list[list[int]]:
    """The ids of every sequence, in order."""
    found = []
    for window in windows:
        for batch in window.batches:
            cu = batch.cu_seqlens.tolist()
            for s in range(batch.num_sequences):
                found.append(batch.input_ids[cu[s] : cu[s] + batch.lengths[s]].tolist())
    return found


CASES = {
    "sft/text": ("text", "sft", {"max_length": 128}),
    "sft/prompt_completion": ("prompt_completion", "sft", {"max_length": 128}),
    "sft/messages": ("messages", "sft", {"max_length": 128}),
    "sft/text_short": ("text", "sft", {"max_length": 32}),
    "dpo/sigmoid": ("preference", "dpo", {"max_length": 256}),
    "dpo/chat": ("preference_chat", "dpo", {"max_length": 256}),
    "reward/plain": ("preference", "reward", {"max_length": 256}),
}
KIND = {"sft": "sft", "dpo": "preference", "reward": "reward"}


@pytest.mark.parametrize("name", CASES)
def test_recorded_token_counts(name: str, cache: Path) -> None:
    file, method, data = CASES[name]
    train = {"micro_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6}
    config = settings(
        cache, {"path": str(GOLDEN / "data" / f"{file}.jsonl"), **data}, train, method
    )
    feed, _, _ = open_feeds(config, load_tokenizer(GOLDEN / "tokenizer"), KIND[method])
    windows = list(feed)
    log = RECORDED[name]["log"]
    recorded = [entry["num_tokens"] for entry in (log if isinstance(log, list) else log["log"])[:6]]
    assert np.cumsum([w.totals["processed"] for w in windows]).tolist() == recorded
    for window in windows:
        assert [b.num_sequences for b in window.batches] == [4 if method == "sft" else 8] * 2
        for unit, total in window.totals.items():
            assert total == sum(batch.totals[unit] for batch in window.batches)


# -- coverage --


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_covers_each_row_once(
    tok: Tokenizer, tmp_path: Path, cache: Path, size: int, world: int
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "ab" * n} for n in (4, 2, 1, 3, 2)])
    config = settings(
        cache, {"path": str(rows), "eval_path": str(rows)}, {"micro_batch_size": size}
    )
    feeds = [open_feeds(config, tok, "sft", rank, world)[1] for rank in range(world)]
    for _ in range(2):  # every evaluation starts at the first row
        ranks = [list(feed) for feed in feeds if feed is not None]
        assert len({len(windows) for windows in ranks}) == 1
        found = [ids for windows in ranks for ids in tokens_of(windows)]
        assert sorted(map(len, found)) == [3, 5, 5, 7, 9]
        assert sum(window.totals["tokens"] for window in ranks[0]) == 8 + 4 + 2 + 6 + 4
        for together in zip(*ranks, strict=True):
            assert len({len(window.batches) for window in together}) == 1
            counted = sum(b.num_units for window in together for b in window.batches)
            assert counted == together[0].totals["tokens"] == together[-1].totals["tokens"]


@pytest.mark.parametrize("world", [1, 2])
def test_announced_steps_are_executed(
    tok: Tokenizer, tmp_path: Path, cache: Path, world: int
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}] * 5)
    train = {"micro_batch_size": 1, "gradient_accumulation_steps": 2}
    for rank in range(world):
        feed, held_out, _ = open_feeds(
            settings(cache, {"path": str(rows)}, train), tok, "sft", rank, world
        )
        assert held_out is None
        assert feed.steps == len(list(feed)) == (3 if world == 1 else 2)


def test_max_steps_wins_and_batch_size_is_over_ranks(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}] * 5)
    train = {"batch_size": 3, "micro_batch_size": 2, "max_steps": 5, "num_epochs": 9}
    feeds = [
        open_feeds(settings(cache, {"path": str(rows)}, train), tok, "sft", r, 2)[0] for r in (0, 1)
    ]
    windows = [list(feed) for feed in feeds]
    assert [len(w) for w in windows] == [5, 5]
    assert [w.totals["sequences"] for w in windows[0]] == [3, 2, 3, 2, 3]
    assert [w.epoch for w in windows[0]] == [0.6, 1.0, 1.6, 2.0, 2.6]


def test_a_rank_without_rows_runs_fillers(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])
    windows = [
        list(open_feeds(settings(cache, {"path": str(rows)}), tok, "sft", rank, 2)[0])
        for rank in (0, 1)
    ]
    assert [[b.num_sequences for b in w.batches] for w in windows[0] + windows[1]] == [[1], [0]]


def test_resuming_gives_the_windows_that_were_left(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "ab"[i % 2] * (i + 1)} for i in range(7)])
    config = settings(
        cache, {"path": str(rows), "shuffle": True}, {"micro_batch_size": 2, "max_steps": 9}
    )
    feed = open_feeds(config, tok, "sft")[0]
    windows, states = [], [feed.state_dict()]
    for window in feed:
        windows.append(window)
        states.append(json.loads(json.dumps(feed.state_dict())))
    for done in (0, 3, 4, 8):
        again = open_feeds(config, tok, "sft")[0]
        again.load_state_dict(states[done])
        rest = list(again)
        assert tokens_of(rest) == tokens_of(windows[done:])
        assert [w.epoch for w in rest] == [w.epoch for w in windows[done:]]
    other = open_feeds(replace(config, data=replace(config.data, max_length=2)), tok, "sft")[0]
    with pytest.raises(ValueError, match="the data have changed"):
        other.load_state_dict(states[1])


# -- truncation --


def chat(words: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": "a" * words},
            {"role": "assistant", "content": "bbbb"},
        ]
    }


def test_rows_cut_down_to_nothing_are_dropped_and_counted(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [chat(10)] * 7 + [chat(200)])
    data = {"path": str(rows), "max_length": 64, "assistant_only_loss": True}
    feed, _, report = open_feeds(settings(cache, data), tok, "sft")
    assert len(feed.items) == 7
    assert "1 of 8 rows dropped: no trainable tokens after truncation" in report
    assert f"(first: {rows}, row 7)" in report and "7 of 8 rows" in report
    all_long = write_jsonl(tmp_path / "long.jsonl", [chat(200)] * 8)
    with pytest.raises(ValueError, match="8 of 8 rows dropped: no trainable tokens"):
        open_feeds(settings(cache, {**data, "path": str(all_long)}), tok, "sft")


def test_an_answer_cut_in_half_is_kept(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "de")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": messages}])
    data = {"path": str(rows), "max_length": 11, "assistant_only_loss": True}
    batch = list(open_feeds(settings(cache, data), tok, "sft")[0])[0].batches[0]
    assert batch.num_tokens == 11 and batch.targets.tolist() == [8, 5, 10]


def test_which_end_survives(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "abc", "completion": "de"}])
    for mode, ids, targets in (
        ("keep_start", [7, 8, 9, 10], [10]),
        ("keep_end", [9, 10, 11, 2], [10, 11, 2]),
    ):
        config = settings(cache, {"path": str(rows), "max_length": 4, "truncation_mode": mode})
        batch = list(open_feeds(config, tok, "sft")[0])[0].batches[0]
        assert batch.input_ids.tolist() == ids and batch.targets.tolist() == targets


def test_pairs_stay_whole(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    pair = {"prompt": "ab", "chosen": "c", "rejected": "defghij"}
    rows = write_jsonl(tmp_path / "rows.jsonl", [pair, {**pair, "prompt": "abcdef"}])
    cut, _, report = open_feeds(
        settings(cache, {"path": str(rows), "max_length": 5}, None, "dpo"), tok, "preference"
    )
    assert tokens_of(list(cut)) == [[7, 8, 9, 2], [7, 8, 10, 11, 12]]
    assert "1 of 2 rows dropped: no trainable tokens after truncation" in report
    config = settings(cache, {"path": str(rows), "max_length": 12}, None, "reward")
    kept, _, report = open_feeds(config, tok, "reward")
    assert len(kept.items) == 1 and "1 of 2 rows dropped: over data.max_length" in report
    assert next(iter(kept)).totals["chosen_tokens"] == 0


def test_token_budget(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a" * n} for n in (3, 3, 5, 1, 7, 2)])
    train = {"batch_size": 6, "max_tokens_per_micro_batch": 8}
    (window,) = open_feeds(settings(cache, {"path": str(rows)}, train), tok, "sft")[0]
    assert [batch.num_tokens for batch in window.batches] == [8, 8, 8, 3]
    with pytest.raises(
        ValueError, match="max_tokens_per_micro_batch 7 is less than the longest item, 8"
    ):
        open_feeds(
            settings(cache, {"path": str(rows)}, {**train, "max_tokens_per_micro_batch": 7}),
            tok,
            "sft",
        )


def test_padded_batches(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a" * n} for n in (3, 5, 1, 7)])
    data = {"path": str(rows), "padding_free": False, "pad_to_multiple_of": 5}
    feed, _, report = open_feeds(settings(cache, data), tok, "sft")
    (window,) = feed
    assert window.batches[0].seqlens == (10, 10, 10, 10) and window.totals["processed"] == 20
    assert "37.5% of the tokens of micro-batches of 4 are padding" in report  # 4 rows of 8, 20 real


# -- packing --


def split_bins(feed: Feed) -> list[list[list[int]]]:
    offsets, store = feed.items.offsets, feed.items.store
    return [
        [store[s].input_ids.tolist() for s in range(offsets[i], offsets[i + 1])]
        for i in range(len(feed.items))
    ]


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packed_bins(tok: Tokenizer, tmp_path: Path, cache: Path, strategy: str) -> None:
    words = ["abcdefg", "hij", "klm", "no"]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": word} for word in words])
    data = {"path": str(rows), "max_length": 5, "packing": True, "packing_strategy": strategy}
    feed, _, report = open_feeds(settings(cache, data, {"micro_batch_size": 1}), tok, "sft")
    bins = split_bins(feed)
    expected = {
        "bfd": ["abcde", "hij.", "klm.", "no."],
        "bfd_split": ["abcde", "hij.", "klm.", "fg.no."],
        "wrapped": ["abcde", "fg.hi", "j.klm", ".no."],
    }[strategy]
    if strategy == "bfd_split":
        assert sorted(len(ids) for b in bins for ids in b) == [3, 3, 4, 4, 5]
    else:
        assert [
            "".join(tok.decode(ids).replace("<eos>", ".") for ids in b) for b in bins
        ] == expected
    assert feed.steps == len(bins) and f"packed into {len(bins)} bins of 5" in report
    windows = list(feed)
    assert sum(w.totals["processed"] for w in windows) == sum(len(ids) for b in bins for ids in b)
    assert all(
        batch.num_sequences == len(b)
        for w, b in zip(windows, bins, strict=True)
        for batch in w.batches
    )
    assert [w.totals["tokens"] for w in windows] == [sum(len(ids) - 1 for ids in b) for b in bins]


def test_wrapped_attention_joins_a_bin(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "abcdefg"}, {"text": "hij"}])
    data = {"path": str(rows), "max_length": 5, "packing": True, "packing_strategy": "wrapped"}
    apart = open_feeds(settings(cache, data), tok, "sft")[0]
    joined = open_feeds(settings(cache, {**data, "wrapped_attention": True}), tok, "sft")[0]
    assert [len(b) for b in split_bins(apart)] == [1, 2, 1]
    assert [len(b) for b in split_bins(joined)] == [1, 1, 1]
    assert next(iter(joined)).totals["tokens"] == 4 + 4 + 1
    assert next(iter(apart)).totals["tokens"] == 4 + (2 + 1) + 1


def test_packed_rows_without_trainable_tokens_are_dropped(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    long_prompt = {"prompt": "a" * 10, "completion": "b"}
    rows = write_jsonl(tmp_path / "rows.jsonl", [long_prompt, {"prompt": "c", "completion": "d"}])
    data = {"path": str(rows), "max_length": 5, "packing": True}
    bfd = open_feeds(settings(cache, data), tok, "sft")
    assert len(bfd[0].items) == 1 and "1 of 2 rows dropped" in bfd[2]
    split, _, report = open_feeds(
        settings(cache, {**data, "packing_strategy": "bfd_split"}), tok, "sft"
    )
    assert (
        sorted(map(len, split_bins(split))) == [2] and split.items.table.counts["tokens"].sum() == 3
    )
    assert split.items.cut == 10 and "10 tokens cut off" in report  # two fragments of the prompt
    unscored = {"input_ids": [7, 8, 9], "labels": [-100] * 3}
    rows = write_jsonl(tmp_path / "more.jsonl", [unscored, {"input_ids": [7, 8], "labels": [7, 8]}])
    more = {**data, "path": str(rows), "packing_strategy": "bfd_split"}
    report = open_feeds(settings(cache, more), tok, "sft")[2]
    assert "train data: 1 of 2 rows" in report
    assert f"1 of 2 rows dropped: no trainable tokens (first: {rows}, row 0)" in report
    wrapped = open_feeds(settings(cache, {**data, "packing_strategy": "wrapped"}), tok, "sft")
    assert len(wrapped[0].items) == 1 and "2 bins without trainable tokens dropped" in wrapped[2]


def test_bins_need_a_size(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    rows = write_jsonl(tmp_path / "text.jsonl", [{"text": "a"}])
    data = {"path": str(rows), "packing": True, "max_length": None}
    with pytest.raises(ValueError, match="needs data.max_length"):
        open_feeds(settings(cache, data), tok, "sft")


# -- sources --


def test_weighted_sources(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 30)
    b = write_jsonl(tmp_path / "b.jsonl", [{"text": "b"}] * 10)
    path = [{"path": str(a), "weight": 1}, {"path": str(b), "weight": 3}]
    feed, _, report = open_feeds(settings(cache, {"path": path, "shuffle": True}), tok, "sft")
    found = [ids[0] for ids in tokens_of(list(feed))]
    assert found.count(7) == 10 and found.count(8) == 30
    assert f"{a}: 10 rows an epoch of 30" in report and f"{b}: 30 rows an epoch of 10" in report
    plain = open_feeds(settings(cache, {"path": [str(a), str(b)]}), tok, "sft")[0]
    assert [ids[0] for ids in tokens_of(list(plain))] == [7] * 30 + [8] * 10
    packed = {"path": path, "packing": True, "max_length": 6}
    bins = split_bins(open_feeds(settings(cache, packed), tok, "sft")[0])
    assert all(len({ids[0] for ids in b}) == 1 for b in bins)


def test_a_sources_own_split_is_not_what_is_held_out(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    write_jsonl(tmp_path / "rows" / "train.jsonl", [{"text": "a"}])
    write_jsonl(tmp_path / "rows" / "test.jsonl", [{"text": "b"}])
    path = [{"path": str(tmp_path / "rows"), "split": "train"}]
    feed, held_out, _ = open_feeds(
        settings(cache, {"path": path, "eval_split": "test"}), tok, "sft"
    )
    assert held_out is not None
    assert tokens_of(list(feed)) == [[7, 2]] and tokens_of(list(held_out)) == [[8, 2]]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([], "empty list"),
        ([{"weight": 1}], "no source"),
        ([{"path": "{a}", "weight": 1}, "{a}"], "every source a weight"),
        ([{"path": "{a}", "weight": 0}], "above 0"),
        ([{"path": "{a}", "colour": 0}], "path, weight, split, revision"),
    ],
)
def test_wrong_sources(
    tok: Tokenizer, tmp_path: Path, cache: Path, path: Any, message: str
) -> None:
    file = str(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]))
    path = json.loads(json.dumps(path).replace("{a}", file))
    with pytest.raises(ValueError, match=message):
        open_feeds(settings(cache, {"path": path}), tok, "sft")


# -- KTO --


def test_mismatched_completions(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    pairs = [("a", "b"), ("cc", "d"), ("e", "ff")]
    rows = [{"prompt": p, "completion": c, "label": True} for p, c in pairs]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    config = settings(cache, {"path": str(file)}, {"micro_batch_size": 2, "batch_size": 3}, "kto")
    swapped: list[list[int]] = []
    for rank in (0, 1):
        (window,) = open_feeds(config, tok, "unpaired", rank, 2)[0]
        (batch,) = window.batches
        assert batch.mismatched is not None
        assert batch.mismatched.num_sequences == batch.num_sequences
        swapped += tokens_of([Window([batch.mismatched], {}, 0.0)])
    assert sorted(swapped) == [[7, 12, 12, 2], [9, 9, 8, 2], [11, 10, 2]]
    lone = swap_completion(Example([5, 6], [False, True]), Example([7, 8, 9], [False, True, True]))
    assert lone.input_ids.tolist() == [5, 8, 9] and lone.num_scored == 2


@pytest.mark.parametrize(("size", "world"), [(1, 1), (2, 1), (4, 2)])
def test_statistics_of_an_evaluation_depend_on_no_batch_size(
    tok: Tokenizer, tmp_path: Path, cache: Path, size: int, world: int
) -> None:
    rows = [{"prompt": p, "completion": p, "label": True} for p in "abcde"]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    config = settings(cache, {"path": path, "eval_path": path}, {"micro_batch_size": size}, "kto")
    swapped: list[list[int]] = []
    for rank in range(world):
        held_out = open_feeds(config, tok, "unpaired", rank, world)[1]
        assert held_out is not None
        (window,) = held_out
        others = [b.mismatched for b in window.batches if b.mismatched is not None]
        swapped += tokens_of([Window(others, {}, 0.0)])
    assert sorted(swapped) == [[7, 11, 2], [8, 7, 2], [9, 8, 2], [10, 9, 2], [11, 10, 2]]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_loss_without_kl_gets_no_other_completions(
    tok: Tokenizer, tmp_path: Path, cache: Path, streaming: bool
) -> None:
    rows = [{"prompt": p, "completion": p, "label": True} for p in "abc"]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    train = {"micro_batch_size": 2, "max_steps": 1}
    config = settings(cache, {"path": path, "streaming": streaming}, train, "kto")
    for loss_type, mismatched in (("kto", True), ("apo_zero_unpaired", False)):
        loss = replace(config.loss, loss_type=loss_type)
        (window,) = open_feeds(replace(config, loss=loss), tok, "unpaired")[0]
        assert {b.mismatched is not None for b in window.batches} == {mismatched}


def test_a_row_alone_in_its_window_gets_the_completion_of_another(
    tok: Tokenizer, tmp_path: Path, cache: Path
) -> None:
    rows = [{"prompt": p, "completion": p, "label": True} for p in "abc"]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    feed = open_feeds(settings(cache, {"path": path}, {"batch_size": 2}, "kto"), tok, "unpaired")[0]
    others = [b.mismatched for window in feed for b in window.batches if b.mismatched is not None]
    assert tokens_of([Window(others, {}, 0.0)]) == [[7, 8, 2], [8, 7, 2], [9, 7, 2]]


# -- settings without effect --


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"text": "a"}, {"completion_only_loss": True}),
        ({"prompt": "a", "completion": "b"}, {"assistant_only_loss": True}),
    ],
)
def test_a_setting_without_effect_is_an_error(
    tok: Tokenizer, tmp_path: Path, cache: Path, row: dict[str, Any], data: dict[str, Any]
) -> None:
    rows = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match=f"{next(iter(data))} has no effect"):
        open_feeds(settings(cache, {"path": str(rows), **data}), tok, "sft")


def test_report(tok: Tokenizer, tmp_path: Path, cache: Path) -> None:
    rows = write_jsonl(
        tmp_path / "rows.jsonl",
        [{"text": "a" * 9}, {"text": ""}, {"prompt": "a", "completion": "b"}],
    )
    data = {"path": str(rows), "max_length": 8}
    _, _, report = open_feeds(settings(cache, data), tok, "sft")
    assert report.split("\n") == [
        "train data: 2 of 3 rows (1 text, 1 prompt completion), 11 tokens, 9 of them supervised "
        "(81.8%)",
        "  2 tokens cut off by max_length 8 (15.4%)",
        f"  1 of 3 rows dropped: text is empty (first: {rows}, row 1)",
        "  no padding (micro-batches of 4 padded to their longest row: 31.2%)",
    ]
