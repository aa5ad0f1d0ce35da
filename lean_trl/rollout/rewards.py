"""Reward functions: found by name, called in threads beside the trainer, never trusted.

A function that takes too long or raises has abstained: its completions have no reward from it,
which is not a reward of 0. What happened is counted and said once for each generation.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lean_trl.rollout.reward_functions import RewardFunction, built_in


@dataclass(frozen=True)
class Reward:
    """A function with the name that metrics show."""

    name: str
    function: RewardFunction


@dataclass(frozen=True)
class Questions:
    """What reward functions look at: N completions, each with its prompt and row."""

    prompts: list[Any]  # as in the row: text or messages
    completions: list[Any]  # text, or a list of one message when the prompt is messages
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]  # name -> [N]; None where a row lacks it

    def __len__(self) -> int:
        return len(self.prompts)

    def only(self, index: int) -> Questions:
        """One of them."""
        one = slice(index, index + 1)
        columns = {name: values[one] for name, values in self.columns.items()}
        return Questions(
            self.prompts[one], self.completions[one], self.completion_ids[one], columns
        )


@dataclass
class Verdicts:
    """rewards fp32 [N, K], NaN where a function abstained; problems say why, with the sample."""

    rewards: np.ndarray
    problems: list[str] = field(default_factory=list)


def find_rewards(names: Sequence[str], max_completion_length: int) -> list[Reward]:
    """The functions of rollout.reward_funcs.

    A name is a built-in, package.module.function, or path/file.py:function. Raises ValueError for
    one that leads nowhere: before any model is loaded.
    """
    known = built_in(max_completion_length)
    rewards = []
    for name in names:
        function = known[name] if name in known else _imported(name, list(known))
        if name == "accuracy" or name == "cosine_scaled":
            _need("math_verify", name)
        rewards.append(Reward(name.replace(":", ".").rpartition(".")[2], function))
    duplicates = {r.name for r in rewards if [o.name for o in rewards].count(r.name) > 1}
    if duplicates:
        raise ValueError(f"rollout.reward_funcs: two functions are called {duplicates.pop()}")
    return rewards


def _imported(name: str, known: list[str]) -> RewardFunction:
    path, colon, attribute = name.rpartition(":")
    try:
        if colon:
            module = _module_of_file(Path(path))
        else:
            path, _, attribute = name.rpartition(".")
            if not path:
                raise ImportError(f"it is no built-in name ({', '.join(known)})")
            module = importlib.import_module(path)
    except ImportError as error:
        raise ValueError(f"rollout.reward_funcs: {name} cannot be loaded: {error}") from error
    function = vars(module).get(attribute)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"rollout.reward_funcs: {path} has no function {attribute!r}, "
            f"only {', '.join(functions) or 'none'}"
        )
    return function


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _need(module: str, reward: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"rollout.reward_funcs: {reward} needs math-verify: pip install it")


class Scoring:
    """Rewards under way, one thread for each function; `result()` waits for them.

    Daemon threads: a function that never returns must not keep the process alive.
    """

    def __init__(
        self, rewards: Sequence[Reward], questions: Questions, timeout_s: float | None
    ) -> None:
        self._rewards, self._questions, self._timeout_s = rewards, questions, timeout_s
        self._started = time.monotonic()
        self._values: list[list[float] | None] = [None] * len(rewards)
        self._problems: list[list[str]] = [[] for _ in rewards]
        self._threads = [
            threading.Thread(target=self._run, args=(k,), name=f"reward {r.name}", daemon=True)
            for k, r in enumerate(rewards)
        ]
        for thread in self._threads:
            thread.start()

    def result(self) -> Verdicts:
        """Raises ValueError for a function that returns something else than rewards."""
        count = len(self._questions)
        verdicts = Verdicts(np.full((count, len(self._rewards)), np.nan, np.float32))
        for k, (reward, thread) in enumerate(zip(self._rewards, self._threads, strict=True)):
            if self._timeout_s is None:
                thread.join()
            else:
                left = self._started + self._timeout_s - time.monotonic()
                thread.join(max(left, 0))
            if thread.is_alive():
                verdicts.problems.append(
                    f"{reward.name} took more than {self._timeout_s:g} s: it abstains for "
                    f"{count} completions"
                )
                continue
            verdicts.problems += self._problems[k]
            values = self._values[k]
            if values is None:
                raise ValueError(self._problems[k][-1])
            verdicts.rewards[:, k] = values
        return verdicts

    def _run(self, k: int) -> None:
        reward, problems = self._rewards[k], self._problems[k]
        try:
            self._values[k] = _checked(reward, self._questions)
        except _BadReturn as error:
            problems.append(str(error))
        except BaseException as error:  # whatever a user's function raises
            problems.append(f"{reward.name} raised {error!r}: asked again one by one")
            self._values[k] = self._one_by_one(reward, problems)

    def _one_by_one(self, reward: Reward, problems: list[str]) -> list[float]:
        """So that one bad completion costs no other its reward."""
        values = []
        for index in range(len(self._questions)):
            try:
                values += _checked(reward, self._questions.only(index))
            except BaseException as error:
                problems.append(f"{reward.name} abstains for completion {index}: {error!r}")
                values.append(math.nan)
        return values


class _BadReturn(ValueError):
    """A reward function is broken, not merely at a loss."""


def _checked(reward: Reward, questions: Questions) -> list[float]:
    returned = call(reward.function, questions)
    try:
        values = [math.nan if value is None else float(value) for value in returned]
    except TypeError as error:
        raise _BadReturn(
            f"reward {reward.name} must return a list of numbers or None, got {returned!r:.80}"
        ) from error
    if len(values) != len(questions):
        raise _BadReturn(
            f"reward {reward.name} returned {len(values)} values for {len(questions)} completions: "
            "one each is expected"
        )
    return values


def call(function: RewardFunction, questions: Questions) -> Sequence[Any]:
    """f(prompts=, completions=, completion_ids=, **columns), without what its signature does not
    take. Coroutines run to their end in an event loop of this thread.
    """
    arguments: dict[str, Any] = {
        **questions.columns,
        "prompts": questions.prompts,
        "completions": questions.completions,
        "completion_ids": questions.completion_ids,
    }
    returned = function(**accepted(function, arguments))
    if inspect.isawaitable(returned):

        async def wait() -> Any:
            return await returned

        return asyncio.run(wait())
    return returned


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function's signature takes; one that a partial fills stays its own.

    >>> accepted(lambda completions, k=1: None, {"completions": [], "prompts": []})
    {'completions': []}
    """
    filled = function.keywords if isinstance(function, partial) else {}
    arguments = {name: value for name, value in arguments.items() if name not in filled}
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
