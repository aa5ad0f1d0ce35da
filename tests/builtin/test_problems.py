"""Problems, their wording and their worked answers, checked by an independent calculator."""

import re
from collections import Counter
from itertools import islice
from random import Random

import pytest

from lean_trl.builtin.problems import (
    EASY,
    HARD,
    Level,
    Problem,
    answer_of,
    conversation_row,
    problems,
    question,
    solution,
)

LEVELS = pytest.mark.parametrize("level", [EASY, HARD], ids=["easy", "hard"])


@LEVELS
@pytest.mark.parametrize("held_out", [False, True])
def test_words_and_steps_agree_with_the_problem(level: Level, held_out: bool) -> None:
    rng = Random(1)
    for problem in islice(problems(level, rng, held_out=held_out), 300):
        messages = conversation_row(problem, rng)["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"]
        told = re.findall(r"\d+", messages[0]["content"])
        assert told == [str(number) for number in problem.numbers]
        total, *added = problem.numbers
        *steps, last = messages[1]["content"].split("\n")
        for step, number in zip(steps, added, strict=True):
            assert step == f"{total} + {number} = {total + number}"
            total += number
        assert last == f"Answer: {total}"
        assert answer_of(messages[1]["content"]) == str(sum(problem.numbers))


@LEVELS
def test_problems_stay_within_their_level(level: Level) -> None:
    drawn = list(islice(problems(level, Random(2), held_out=False), 1000))
    counts = Counter(len(problem.numbers) for problem in drawn)
    assert set(counts) == set(range(level.count[0], level.count[1] + 1))
    assert min(counts.values()) > 200  # no length is rare
    sizes = {number for problem in drawn for number in problem.numbers}
    assert sizes == set(range(level.size[0], level.size[1] + 1))


def test_held_out_is_about_one_in_eight_of_every_length() -> None:
    pairs = [Problem((a, b)) for a in range(1, 10) for b in range(1, 10)]
    assert sum(problem.held_out for problem in pairs) == 10  # of 81
    for problem in pairs:
        assert Problem(problem.numbers).held_out == problem.held_out
    longer = [Problem((a, b, c)) for a in range(1, 20) for b in range(1, 20) for c in range(1, 20)]
    assert 0.11 < sum(problem.held_out for problem in longer) / len(longer) < 0.14
    for held_out in (False, True):
        stream = problems(EASY, Random(0), held_out=held_out)
        assert {problem.held_out for problem in islice(stream, 300)} == {held_out}


def test_both_wordings_occur_as_often() -> None:
    rng = Random(3)
    asked = [question(Problem((5, 3)), rng) for _ in range(400)]
    assert 150 < asked.count("What is 5 + 3?") < 250
    stories = [text for text in asked if text != "What is 5 + 3?"]
    story = re.compile(
        r"(\w+) \w+ 5 (\w+) on Monday and 3 on Tuesday\. How many \2 does (he|she) have\?"
    )
    assert all(story.fullmatch(text) for text in stories)
    assert len(set(stories)) > 100


@pytest.mark.parametrize(
    "text, answer",
    [
        (solution(Problem((3, 4))), "7"),
        ("Answer: 7 no, Answer: 12", "12"),
        ("Answer: -4", "-4"),
        ("Answer:", None),
        ("the answer is 12", None),
        ("", None),
    ],
)
def test_answer_of(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer
