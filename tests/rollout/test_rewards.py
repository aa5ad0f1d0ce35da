"""Reward functions: where they are found, what they are given, and what they may not break."""

import asyncio
import doctest
import math
import threading
import time

import numpy as np
import pytest

from lean_trl.rollout import reward_functions, rewards
from lean_trl.rollout.rewards import Questions, Reward, Scoring, find_rewards


def questions(count=3, **columns):
    texts = [f"text {i}" for i in range(count)]
    ids = [[i] * (i + 1) for i in range(count)]
    return Questions(["p"] * count, texts, ids, columns)


def score(*functions, timeout_s=None, asked=None):
    named = [Reward(f.__name__, f) for f in functions]
    return Scoring(named, asked or questions(), timeout_s).result()


def test_examples_in_docstrings():
    for module in (reward_functions, rewards):
        assert doctest.testmod(module).failed == 0


def test_what_a_function_is_given():
    seen = {}

    def all_of_it(prompts, completions, completion_ids, **columns):
        seen.update(locals())
        return [1.0] * len(prompts)

    score(all_of_it, asked=questions(gold=["a", "b", None]))
    assert seen["completions"] == ["text 0", "text 1", "text 2"]
    assert seen["completion_ids"] == [[0], [1, 1], [2, 2, 2]]
    assert seen["columns"] == {"gold": ["a", "b", None]}

    def picky(completion_ids, gold):
        return [float(len(ids)) for ids in completion_ids]

    assert score(picky, asked=questions(gold=[1] * 3)).rewards[:, 0].tolist() == [1, 2, 3]


def test_none_abstains_and_functions_run_side_by_side():
    barrier = threading.Barrier(2, timeout=5)

    def first(completions):
        barrier.wait()
        return [1, None, 0]

    async def second(completions):
        await asyncio.sleep(0)
        barrier.wait()
        return [0.5] * 3

    verdicts = score(first, second)
    assert verdicts.rewards.dtype == np.float32
    assert verdicts.rewards[:, 1].tolist() == [0.5] * 3
    assert math.isnan(verdicts.rewards[1, 0]) and verdicts.rewards[[0, 2], 0].tolist() == [1, 0]
    assert not verdicts.problems


def test_too_slow_abstains_in_time():
    release = threading.Event()

    def slow(completions):
        release.wait(10)
        return [1.0] * 3

    def fast(completions):
        return [2.0] * 3

    start = time.monotonic()
    verdicts = score(slow, fast, timeout_s=0.2)
    assert time.monotonic() - start < 2
    release.set()
    assert np.isnan(verdicts.rewards[:, 0]).all() and (verdicts.rewards[:, 1] == 2).all()
    assert "slow took more than 0.2 s" in verdicts.problems[0]


def test_one_sample_that_raises_costs_only_itself():
    def division(completion_ids):
        return [6 / (len(ids) - 2) for ids in completion_ids]

    verdicts = score(division)
    assert verdicts.rewards[[0, 2], 0].tolist() == [-6, 6] and math.isnan(verdicts.rewards[1, 0])
    assert any("completion 1" in problem for problem in verdicts.problems)


@pytest.mark.parametrize("returned", [[1.0], 1.0, ["x"] * 3, None])
def test_a_broken_function_is_an_error(returned):
    def broken(completions):
        return returned

    if returned == ["x"] * 3:  # float("x") raises ValueError: it abstains for each
        assert np.isnan(score(broken).rewards).all()
        return
    with pytest.raises(ValueError, match="reward broken"):
        score(broken)


def test_finding(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def short(completion_ids):\n    return [-len(i) for i in completion_ids]\n")
    found = find_rewards(["think_format", "math.isnan", f"{file}:short"], 100)
    assert [reward.name for reward in found] == ["think_format", "isnan", "short"]
    assert rewards.call(found[2].function, questions()) == [-1, -2, -3]
    for name, answer in (
        ("nothing", "no built-in name"),
        ("math.nothing", "no function 'nothing'"),
        (f"{file}:long", "only short"),
        (f"{tmp_path}/x.py:short", "no file"),
    ):
        with pytest.raises(ValueError, match=answer):
            find_rewards([name], 100)
    with pytest.raises(ValueError, match="two functions"):
        find_rewards([f"{file}:short", f"{file}:short"], 100)


def test_built_ins_know_the_longest_completion():
    (reward,) = find_rewards(["soft_overlong_punishment"], 10)
    asked = Questions(["p"], ["t"], [[0] * 9], {})
    assert rewards.call(reward.function, asked) == [-0.5]


def test_messages():
    said = [[{"role": "assistant", "content": "<think>x</think> 4"}]]
    assert reward_functions.think_format(said) == [1.0]
