"""Arithmetic in words with worked steps: the problems behind the built-in dataset.

A problem is a start and some signed moves; the question and the worked answer follow from it. A row
of any kind (a conversation, a pair of right and wrong answers, a prompt with its gold answer) is a
small function of a Problem and a random.Random, so one stream of problems serves every method.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

NAMES = ("Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Max")
ITEMS = ("apples", "coins", "books", "cards", "shells", "stamps", "marbles", "pens")
GAINS = ("finds {} more", "buys {} more", "wins {} more", "gets {} more")
LOSSES = ("loses {}", "sells {}", "gives away {}", "drops {}")


@dataclass(frozen=True)
class Level:
    """How hard a problem may be; every running total stays in 0 .. max_total."""

    moves: tuple[int, int]  # fewest and most
    amounts: tuple[int, int]  # smallest and largest amount of one move
    max_total: int  # at least twice the largest amount, so that some move always fits


EASY = Level(moves=(1, 3), amounts=(1, 9), max_total=99)
HARD = Level(moves=(3, 5), amounts=(2, 19), max_total=99)


@dataclass(frozen=True)
class Problem:
    """A start to which moves are added one by one; a negative move takes away.

    >>> Problem(14, (7, -5)).totals
    (14, 21, 16)
    """

    start: int
    moves: tuple[int, ...]

    @property
    def totals(self) -> tuple[int, ...]:
        """The running totals, [len(moves) + 1]: the start, then one after each move."""
        totals = [self.start]
        for move in self.moves:
            totals.append(totals[-1] + move)
        return tuple(totals)


def draw(level: Level, rng: Random) -> Problem:
    """One random problem of this level."""
    total = start = rng.randint(1, level.max_total)
    moves = []
    for _ in range(rng.randint(*level.moves)):
        amount = rng.randint(*level.amounts)
        signs = [sign for sign in (1, -1) if 0 <= total + sign * amount <= level.max_total]
        moves.append(rng.choice(signs) * amount)
        total += moves[-1]
    return Problem(start, tuple(moves))


def problems(level: Level, rng: Random, seen: set[Problem]) -> Iterator[Problem]:
    """Endless new problems of this level: none is in `seen`, which each one joins."""
    while True:
        problem = draw(level, rng)
        if problem not in seen:
            seen.add(problem)
            yield problem


def question(problem: Problem, rng: Random) -> str:
    """The problem in one of three wordings: a sum, orders, or a story."""
    wording = rng.choice((_sum, _orders, _story))
    return wording(problem, rng)


def _sum(problem: Problem, rng: Random) -> str:
    return f"What is {problem.start}{''.join(f' {_signed(move)}' for move in problem.moves)}?"


def _orders(problem: Problem, rng: Random) -> str:
    orders = [f"{'Add' if move > 0 else 'Subtract'} {abs(move)}." for move in problem.moves]
    return " ".join([f"Start with {problem.start}.", *orders, "What do you get?"])


def _story(problem: Problem, rng: Random) -> str:
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    events = [
        f"{name} {rng.choice(GAINS if move > 0 else LOSSES).format(abs(move))}."
        for move in problem.moves
    ]
    start = f"{name} has {problem.start} {items}."
    return " ".join([start, *events, f"How many {items} does {name} have now?"])


def solution(problem: Problem) -> str:
    r"""The worked answer: one line a move, then the result.

    >>> solution(Problem(14, (7, -5)))
    '14 + 7 = 21\n21 - 5 = 16\nAnswer: 16'
    """
    totals = problem.totals
    steps = [
        f"{before} {_signed(move)} = {after}"
        for before, move, after in zip(totals, problem.moves, totals[1:], strict=False)
    ]
    return "\n".join([*steps, f"Answer: {totals[-1]}"])


def _signed(move: int) -> str:
    return f"{'+' if move > 0 else '-'} {abs(move)}"


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
