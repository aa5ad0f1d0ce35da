"""Answers to avoid: always wrong, in several ways, about the problems of the conversations."""

import re
from collections import Counter
from itertools import islice
from random import Random

import pytest

from lean_trl.builtin import answer_of
from lean_trl.builtin.dataset import dataset_folder, make_rows
from lean_trl.builtin.preferences import wrong_solution
from lean_trl.builtin.problems import HARD, Problem, problems, solution

STEP = re.compile(r"(\d+) \+ (\d+) = (-?\d+)")


def first_fault(problem: Problem, text: str) -> str:
    *steps, answer = text.split("\n")
    total, *added = problem.numbers
    for step, number in zip(steps, added, strict=False):
        before, number_said, after = map(int, STEP.fullmatch(step).groups())
        if before != total or number_said != number:
            return "left out"
        if after != total + number:
            return "slip"
        total = after
    return "left out" if len(steps) < len(added) else f"line {answer}"


def test_a_wrong_solution_has_another_result_and_no_negative_total():
    rng = Random(0)
    kinds: Counter[str] = Counter()
    for problem in islice(problems(HARD, rng, held_out=False), 2000):
        text = wrong_solution(problem, rng)
        assert answer_of(text) != answer_of(solution(problem)), (problem, text)
        assert "-" not in text, text
        kinds[first_fault(problem, text).split()[0]] += 1
    assert set(kinds) == {"slip", "line", "left"} and min(kinds.values()) > 300


def test_a_single_addition_can_be_wrong_too():
    rng = Random(1)
    for _ in range(50):
        text = wrong_solution(Problem((3, 4)), rng)
        assert answer_of(text) != "7" and "-" not in text and text.startswith("3 + 4 = ")


def test_all_kinds_ask_the_same_questions():
    conversations, pairs, single = (make_rows(kind=k) for k in ("sft", "preference", "unpaired"))
    assert make_rows(kind="reward")["train_easy"][0].keys() == {"prompt", "chosen", "rejected"}
    for split, rows in conversations.items():
        for row, pair, one in zip(rows, pairs[split], single[split], strict=True):
            asked, answer = row["messages"]
            assert pair["prompt"] == one["prompt"] == [asked]
            assert pair["chosen"] == [answer] != pair["rejected"]
            assert (one["completion"] == [answer]) == one["label"]
    labels = [row["label"] for row in single["train_easy"]]
    assert 0.45 < sum(labels) / len(labels) < 0.55


def test_an_unknown_kind_of_rows_is_refused():
    with pytest.raises(ValueError, match="no built-in rows for prompt: set data.path"):
        dataset_folder("prompt")
