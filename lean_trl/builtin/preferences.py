"""Answers to prefer and to avoid: rows for preference methods from the same problems.

A wrong answer looks like a right one: it has a slip in a step, leaves a number out, or reads off
the wrong line in the end.
"""

from __future__ import annotations

from random import Random
from typing import Any

from lean_trl.builtin.problems import Problem, solution


def preference_row(row: dict[str, Any], problem: Problem, rng: Random) -> dict[str, Any]:
    """A conversation as {"prompt", "chosen", "rejected"}, each a list of messages."""
    asked, answer = row["messages"]
    wrong = {"role": "assistant", "content": wrong_solution(problem, rng)}
    return {"prompt": [asked], "chosen": [answer], "rejected": [wrong]}


def unpaired_row(row: dict[str, Any], problem: Problem, rng: Random) -> dict[str, Any]:
    """{"prompt", "completion", "label"}: the right answer or a wrong one, as often."""
    pair = preference_row(row, problem, rng)
    label = rng.random() < 0.5
    completion = pair["chosen" if label else "rejected"]
    return {"prompt": pair["prompt"], "completion": completion, "label": label}


def wrong_solution(problem: Problem, rng: Random) -> str:
    """A worked answer with another result than solution(problem), and no total below 0."""
    faults = [_slip, _left_out] if len(problem.numbers) > 2 else [_slip]
    text = rng.choice([*faults, _wrong_line])(problem, rng)
    # Right answers have no negative numbers, so one would give the fault away.
    return text if "= -" not in text else _wrong_line(problem, rng)


def _slip(problem: Problem, rng: Random) -> str:
    """A step comes out wrong, and the following ones go on from there."""
    before, *added = problem.numbers
    at = rng.randrange(len(added))
    error = rng.choice((-10, -2, -1, 1, 2, 10))
    steps = []
    for index, number in enumerate(added):
        after = before + number + (error if index == at else 0)
        steps.append(f"{before} + {number} = {after}")
        before = after
    return "\n".join([*steps, f"Answer: {before}"])


def _wrong_line(problem: Problem, rng: Random) -> str:
    r"""Every step is right, and the answer is the total before the last one.

    >>> _wrong_line(Problem((14, 7, 5)), Random(0))
    '14 + 7 = 21\n21 + 5 = 26\nAnswer: 21'
    """
    steps = solution(problem).rpartition("\n")[0]
    return f"{steps}\nAnswer: {problem.totals[-2]}"


def _left_out(problem: Problem, rng: Random) -> str:
    """One of the numbers is forgotten."""
    at = rng.randrange(len(problem.numbers))
    return solution(Problem(problem.numbers[:at] + problem.numbers[at + 1 :]))
