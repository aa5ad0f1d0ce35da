"""Sums in words with worked steps: the problems behind the built-in dataset.

A problem is a few numbers to add up; the question and the worked answer follow from it. A row of
any kind (a conversation, a pair of right and wrong answers, a prompt with its gold answer) is a
small function of a Problem and a random.Random, so one stream of problems serves every method.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

NAMES = {
    "Mia": "she",
    "Tom": "he",
    "Ana": "she",
    "Ben": "he",
    "Zoe": "she",
    "Sam": "he",
    "Eva": "she",
    "Max": "he",
}
ITEMS = ("apples", "coins", "books", "cards", "shells", "stamps", "marbles", "pens")
VERBS = ("finds", "buys", "gets", "wins")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HELD_OUT_SHARE = 8  # one problem in so many is for tests only


@dataclass(frozen=True)
class Level:
    """How hard a problem may be: numbers to add, at most one a day, and the range of each."""

    count: tuple[int, int]
    size: tuple[int, int]


EASY = Level(count=(2, 4), size=(1, 9))
HARD = Level(count=(3, 5), size=(2, 29))


@dataclass(frozen=True)
class Problem:
    """Numbers to add up, two or more.

    >>> Problem((14, 7, 5)).totals
    (14, 21, 26)
    """

    numbers: tuple[int, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """The running totals, one for each number."""
        totals = [self.numbers[0]]
        for number in self.numbers[1:]:
            totals.append(totals[-1] + number)
        return tuple(totals)

    @property
    def held_out(self) -> bool:
        """It is for tests only. A property of the numbers: no split, level or seed can mix it up.

        >>> Problem((8, 5)).held_out, Problem((5, 8)).held_out
        (False, False)
        """
        text = " ".join(map(str, self.numbers))
        return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def problems(level: Level, rng: Random, *, held_out: bool) -> Iterator[Problem]:
    """Endless random problems of a level, all of them held out or none; they may repeat."""
    while True:
        count = rng.randint(*level.count)
        problem = Problem(tuple(rng.randint(*level.size) for _ in range(count)))
        if problem.held_out == held_out:
            yield problem


def question(problem: Problem, rng: Random) -> str:
    """The problem as a bare sum or as a story."""
    if rng.random() < 0.5:
        return f"What is {' + '.join(map(str, problem.numbers))}?"
    name, items = rng.choice(list(NAMES)), rng.choice(ITEMS)
    first, *rest = problem.numbers
    parts = [f"{first} {items} on {DAYS[0]}"]
    parts += [f"{number} on {day}" for number, day in zip(rest, DAYS[1:], strict=False)]
    told = f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{name} {rng.choice(VERBS)} {told}. How many {items} does {NAMES[name]} have?"


def solution(problem: Problem) -> str:
    r"""The worked answer: one addition a line, then the result.

    >>> solution(Problem((14, 7, 5)))
    '14 + 7 = 21\n21 + 5 = 26\nAnswer: 26'
    """
    totals, added = problem.totals, problem.numbers[1:]
    steps = [
        f"{before} + {number} = {after}"
        for before, number, after in zip(totals, added, totals[1:], strict=False)
    ]
    return "\n".join([*steps, f"Answer: {totals[-1]}"])


def answer_of(text: str) -> str | None:
    r"""What a worked answer says in the end; None when it says nothing.

    >>> answer_of("14 + 7 = 21\nAnswer: 21"), answer_of("I do not know.")
    ('21', None)
    """
    answers = re.findall(r"Answer: (-?\d+)", text)
    return answers[-1] if answers else None


def conversation_row(problem: Problem, rng: Random) -> dict[str, Any]:
    """{"messages": [the question, the worked answer]}."""
    return {
        "messages": [
            {"role": "user", "content": question(problem, rng)},
            {"role": "assistant", "content": solution(problem)},
        ]
    }
