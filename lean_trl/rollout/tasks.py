"""Tasks: endless prompts made from a seed, with a scorer of their own.

rollout: {task: "reasoning_gym:chain_sum", task_options: {max_terms: 3}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lean_trl.config import Config
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.rollout.arithmetic import Arithmetic
from lean_trl.rollout.prompts import Prompt
from lean_trl.rollout.reward_functions import text_of
from lean_trl.rollout.rewards import Reward


class Generator(Protocol):
    """What is needed of a generator of problems, such as reasoning_gym's datasets."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """A problem with `question` and `answer`; the same index gives the same problem."""

    def score_answer(self, answer: str | None, entry: Any) -> float:
        """From 0 to 1."""


class TaskPrompts:
    """Problem after problem: generation g holds the ones that follow those of g - 1."""

    def __init__(
        self,
        name: str,
        problems: Generator,
        tokenizer: Tokenizer,
        arithmetic: Arithmetic,
        steps: int,
        max_prompt_length: int | None = None,
    ) -> None:
        self.name, self.problems, self.tokenizer = name, problems, tokenizer
        self.arithmetic, self.steps, self.limit = arithmetic, steps, max_prompt_length
        self.dropped = 0  # too long
        self._used: list[int] = []  # indices of the problems that are asked, in order
        self._next = 0

    def generation(self, number: int) -> list[Prompt]:
        size = self.arithmetic.prompts
        while len(self._used) < (number + 1) * size:
            if self.limit is None or len(self._ids(self._next)) <= self.limit:
                self._used.append(self._next)
            else:
                self.dropped += 1
                if self.dropped > 1000 and not self._used:
                    raise ValueError(
                        f"rollout.task {self.name}: the first 1000 prompts are all over "
                        f"data.max_prompt_length {self.limit}: raise it"
                    )
            self._next += 1
        return [self._prompt(i) for i in self._used[number * size : (number + 1) * size]]

    def _text(self, index: int) -> Any:
        question = self.problems[index]["question"]
        chat = self.tokenizer.chat is not None
        return [{"role": "user", "content": question}] if chat else question

    def _ids(self, index: int) -> list[int]:
        text = self._text(index)
        if isinstance(text, str):
            return self.tokenizer.encode(text)
        return self.tokenizer.encode_chat(text, add_generation_prompt=True)

    def _prompt(self, index: int) -> Prompt:
        columns = {"entry": dict(self.problems[index])}
        ids = np.array(self._ids(index), np.int32)
        return Prompt(index, ids, self._text(index), columns, (self.name, index))

    def epoch_after(self, number: int) -> float:
        return 0.0  # there is no end

    def fingerprint(self) -> list[int]:
        first = self.generation(0)
        return [len(first), sum(len(prompt.ids) for prompt in first)]

    def reward(self) -> Reward:
        """The task's own scorer."""

        def score(completions: Sequence[Any], entry: Sequence[Any], **columns: Any) -> list[float]:
            return [
                self.problems.score_answer(answer_in(text_of(said)), one)
                for said, one in zip(completions, entry, strict=True)
            ]

        return Reward(self.name.rpartition(":")[2], score)


def answer_in(text: str) -> str:
    """What stands in the last <answer>...</answer>, else all of it, without spaces around.

    >>> answer_in("I think <answer> 42 </answer>."), answer_in(" 42")
    ('42', '42')
    """
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (tagged[-1] if tagged else text).strip()


def open_task(config: Config, tokenizer: Tokenizer, arithmetic: Arithmetic) -> TaskPrompts:
    """The task of rollout.task. Raises ValueError when it is not to be had."""
    name, rollout, train = config.rollout.task, config.rollout, config.train
    assert name is not None and train.max_steps is not None
    kind, _, which = name.partition(":")
    if kind != "reasoning_gym" or not which:
        raise ValueError(f"rollout.task: got {name!r}, expected reasoning_gym:<name>")
    try:
        import reasoning_gym  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ValueError(
            f"rollout.task {name} needs reasoning-gym: pip install 'lean_trl[tasks]'"
        ) from None
    seed = config.seed if rollout.seed is None else rollout.seed
    try:
        problems = reasoning_gym.create_dataset(
            which, seed=seed, size=2**31 - 1, **(rollout.task_options or {})
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ValueError(f"rollout.task {name}: {error}") from error
    limit = config.data.max_prompt_length
    return TaskPrompts(name, problems, tokenizer, arithmetic, train.max_steps, limit)
