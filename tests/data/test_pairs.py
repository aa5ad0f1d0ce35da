"""Pairs from rows to batches: cut each side by itself, dropped whole, equal answers counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lean_trl.config import Config, config_from_dict
from lean_trl.data.feed import open_feeds
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer

from .fixtures import write_tokenizer


@pytest.fixture
def tok(tmp_path: Path) -> Tokenizer:
    folder = write_tokenizer(tmp_path / "tok")
    return load_tokenizer(config_from_dict({"model": {"path": str(folder)}}).model)


def settings(folder: Path, rows: list[dict[str, Any]], method: str, **data: Any) -> Config:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"path": str(file), "shuffle": False, "cache_dir": str(folder / "cache"), **data}
    return config_from_dict({"method": method, "data": keys})


def ids(prompt: list[int], chosen: list[int], rejected: list[int]) -> dict[str, list[int]]:
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}


ROW = ids([7, 8, 9, 10], [11, 12, 13], [14, 15])


@pytest.mark.parametrize(
    ("mode", "chosen", "rejected", "units"),
    [
        ("keep_end", [9, 10, 11, 12, 13], [8, 9, 10, 14, 15], (3, 2)),
        ("keep_start", [7, 8, 9, 10, 11], [7, 8, 9, 10, 14], (1, 1)),
    ],
)
def test_each_side_is_cut_by_itself(
    tok: Tokenizer,
    tmp_path: Path,
    mode: str,
    chosen: list[int],
    rejected: list[int],
    units: tuple[int, int],
) -> None:
    config = settings(tmp_path, [ROW], "dpo", max_length=5, truncation_mode=mode)
    (window,) = open_feeds(config, tok, "preference")[0]
    batch = window.batches[0]
    assert batch.input_ids.tolist() == chosen + rejected and batch.units == units
    assert window.totals["pairs"] == 1 and window.totals["chosen_tokens"] == units[0]


def test_a_pair_whose_answer_would_vanish_is_dropped_and_counted(
    tok: Tokenizer, tmp_path: Path
) -> None:
    rows = [ROW, ids([7] * 5, [8], [9])]
    feed, _, report = open_feeds(settings(tmp_path, rows, "dpo", max_length=5), tok, "preference")
    assert len(feed.items) == 1 and "1 of 2 rows dropped" in report and "row 1" in report


def test_reward_pairs_are_dropped_when_a_side_is_too_long(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [ROW, ids([7], [8, 9], [10])]
    feed, _, report = open_feeds(settings(tmp_path, rows, "reward", max_length=6), tok, "reward")
    (window,) = feed
    assert window.batches[0].lengths == (3, 2) and window.batches[0].units == (0, 0)
    assert "1 of 2 rows dropped: over data.max_length" in report


def test_equal_answers_are_kept_and_counted(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [ROW, ids([7], [8, 9], [8, 9]), ids([7], [8, 9], [9, 8])]
    feed, _, report = open_feeds(settings(tmp_path, rows, "dpo"), tok, "preference")
    assert len(feed.items) == 3
    assert "1 pairs whose chosen and rejected are the same" in report


def test_margins_travel_with_the_pairs(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [{**ROW, "margin": 0.5}, {**ROW, "margin": 2}]
    (window,) = open_feeds(settings(tmp_path, rows, "reward"), tok, "reward")[0]
    assert window.batches[0].extras["margin"].tolist() == [0.5, 2.0]


def test_pairs_with_and_without_a_margin_stand_in_one_batch(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "margin": 2}, {**ROW, "margin": None}, {**ROW, "margin": float("nan")}]
    feed, _, report = open_feeds(settings(tmp_path, rows, "reward"), tok, "reward")
    (window,) = feed
    assert window.batches[0].extras["margin"].tolist() == [0.0, 2.0, 0.0]
    assert "1 of 4 rows dropped: margin is not finite" in report


def test_completions_on_other_prompts_keep_to_max_length(tok: Tokenizer, tmp_path: Path) -> None:
    rows = [
        {"prompt_ids": [7, 8, 9], "completion_ids": [10], "label": True},
        {"prompt_ids": [11], "completion_ids": [12, 13, 14], "label": False},
    ]
    (window,) = open_feeds(settings(tmp_path, rows, "kto", max_length=5), tok, "unpaired")[0]
    batch = window.batches[0]
    assert batch.extras["label"].tolist() == [True, False]
    assert batch.mismatched is not None
    assert batch.mismatched.input_ids.tolist() == [7, 8, 9, 12, 13, 11, 10]
    assert batch.mismatched.units == (2, 1)
