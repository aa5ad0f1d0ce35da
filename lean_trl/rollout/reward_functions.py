"""Rewards that need no code of one's own: names for rollout.reward_funcs.

A reward function is f(prompts, completions, completion_ids, **columns) -> list[float | None], one
number for each completion; None abstains. completions are texts, or for prompts of messages lists
of one assistant message; columns are those of the rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lean_trl import builtin

Rewards = list[float | None]
RewardFunction = Callable[..., Any]


def text_of(completion: Any) -> str:
    """What was said: the completion itself, or the content of its message."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def think_format(completions: Sequence[Any], **columns: Any) -> Rewards:
    """1 for one <think>...</think> at the beginning and something after it, else 0.

    >>> think_format(["<think>so</think>4", "4", "<think>a<think>b</think>4"])
    [1.0, 0.0, 0.0]
    """
    pattern = re.compile(r"<think>(?:(?!</?think>).)*</think>(?:(?!</?think>).)+", re.DOTALL)
    return [1.0 if pattern.fullmatch(text_of(c)) else 0.0 for c in completions]


def accuracy(completions: Sequence[Any], solution: Sequence[str], **columns: Any) -> Rewards:
    """1 when the answer is mathematically that of the column `solution`, by math-verify; 0 when
    not; None where the solution itself cannot be read.

    Raises ImportError when math-verify is not installed.
    """
    from math_verify import parse, verify  # type: ignore[import-not-found,unused-ignore]

    rewards: Rewards = []
    for completion, gold_text in zip(completions, solution, strict=True):
        gold = parse(gold_text)
        rewards.append(float(verify(gold, parse(text_of(completion)))) if gold else None)
    return rewards


def soft_overlong_punishment(
    completion_ids: Sequence[Sequence[int]], *, max_length: int, soft: int, **columns: Any
) -> Rewards:
    """0 up to max_length - soft tokens, then falling to -1 at max_length, and -1 beyond.

    Yu et al., "DAPO" (arXiv 2503.14476), equation 13.

    >>> soft_overlong_punishment([[0] * 6, [0] * 9, [0] * 11], max_length=10, soft=4)
    [0.0, -0.75, -1.0]
    """
    start = max_length - soft
    return [0.0 - min(max(len(ids) - start, 0) / soft, 1.0) for ids in completion_ids]


def repetition_penalty(
    completions: Sequence[Any], *, ngram_size: int = 3, max_penalty: float = -1.0, **columns: Any
) -> Rewards:
    """(1 - different n-grams / n-grams) * max_penalty, of words; 0 for texts of fewer than n.

    Yeo et al., "Demystifying Long Chain-of-Thought Reasoning in LLMs" (arXiv 2502.03373),
    appendix C.3.

    >>> repetition_penalty(["a b a b a b"], ngram_size=2)
    [-0.6]
    """
    rewards: Rewards = []
    for completion in completions:
        words = text_of(completion).lower().split()
        grams = list(zip(*(words[i:] for i in range(ngram_size)), strict=False))
        share = 1 - len(set(grams)) / len(grams) if grams else 0.0
        rewards.append(round(share * max_penalty, 12) + 0.0)
    return rewards


def cosine_scaled(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    right: Callable[..., Sequence[float | None]],
    max_length: int,
    values_right: tuple[float, float] = (1.0, 0.5),
    values_wrong: tuple[float, float] = (-1.0, -0.5),
    **columns: Any,
) -> Rewards:
    """Right answers earn more when short, wrong ones lose less when long, along half a cosine.

    The first of each pair of values is for length 0, the second for max_length (`right` says what
    is right). Yeo et al. (arXiv 2502.03373), equation 1.

    >>> cosine_scaled(["a", "b"], [[0] * 5, [0] * 10], right=lambda **c: [1, 0], max_length=10)
    [0.75, -0.5]
    """
    verdicts = right(completions=completions, completion_ids=completion_ids, **columns)
    rewards: Rewards = []
    for verdict, ids in zip(verdicts, completion_ids, strict=True):
        if verdict is None:
            rewards.append(None)
            continue
        at_zero, at_max = values_right if verdict > 0 else values_wrong
        share = min(len(ids) / max_length, 1.0)
        value = at_max + 0.5 * (at_zero - at_max) * (1 + math.cos(share * math.pi))
        rewards.append(round(value, 12))
    return rewards


def right_answer(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> Rewards:
    """1 when the completion ends with what the row's answer ends with, else 0: built-in problems.

    >>> right_answer(["2 + 2 = 4\\nAnswer: 4", "Answer: 5"], ["Answer: 4", "Answer: 4"])
    [1.0, 0.0]
    """
    return [
        float(builtin.answer_of(text_of(c)) == builtin.answer_of(gold))
        for c, gold in zip(completions, answer, strict=True)
    ]


def built_in(max_completion_length: int) -> dict[str, RewardFunction]:
    """{name: function}, those that know the longest completion with it filled in."""
    soft = max(1, max_completion_length // 5)
    return {
        "think_format": think_format,
        "accuracy": accuracy,
        "right_answer": right_answer,
        "repetition_penalty": repetition_penalty,
        "soft_overlong_punishment": partial(
            soft_overlong_punishment, max_length=max_completion_length, soft=soft
        ),
        "cosine_scaled": partial(cosine_scaled, right=accuracy, max_length=max_completion_length),
    }
