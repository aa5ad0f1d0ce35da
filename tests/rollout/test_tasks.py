"""Tasks: the same problems for the same seed, their own scorer, and what can be missing."""

import doctest

import pytest
import torch

from lean_trl.config import config_from_dict
from lean_trl.data.tokenizer import load_tokenizer
from lean_trl.recipe import SettingsError
from lean_trl.rollout import tasks
from lean_trl.rollout.arithmetic import Arithmetic
from lean_trl.rollout.feed import open_rollouts
from lean_trl.rollout.rewards import Questions, call
from lean_trl.rollout.tasks import TaskPrompts
from lean_trl.train.distributed import World
from tests.train.golden import GOLDEN

ALONE = World(0, 1, torch.device("cpu"), None)


class Sums:
    """Every third question is long."""

    def __getitem__(self, index):
        words = " please" * 20 if index % 3 == 2 else ""
        return {"question": f"{index} + 1 =?{words}", "answer": str(index + 1)}

    def score_answer(self, answer, entry):
        return float(answer == entry["answer"])


def prompts(limit=None):
    tokenizer = load_tokenizer(GOLDEN / "tokenizer")
    return TaskPrompts("sums", Sums(), tokenizer, Arithmetic(2, 4, 4, 1), 3, limit)


def test_examples_in_docstrings():
    assert doctest.testmod(tasks).failed == 0


def test_problems_follow_one_another_and_long_ones_are_left_out():
    task = prompts(limit=40)
    items = [[prompt.item for prompt in task.generation(g)] for g in (2, 0, 1)]
    assert items == [[6, 7], [0, 1], [3, 4]] and task.dropped == 2
    assert [prompt.item for prompt in prompts().generation(1)] == [2, 3]
    first = task.generation(0)[0]
    assert first.text == [{"role": "user", "content": "0 + 1 =?"}]
    assert task.tokenizer.decode(first.ids).endswith("assistant\n")
    with pytest.raises(ValueError, match="raise it"):
        prompts(limit=1).generation(0)


def test_the_scorer():
    task = prompts()
    said = [[{"role": "assistant", "content": text}] for text in ("1", "<answer>2</answer>", "4")]
    entries = [task.problems[i] for i in range(3)]
    asked = Questions([None] * 3, said, [[1]] * 3, {"entry": entries})
    assert call(task.reward().function, asked) == [1, 1, 0]


def settings(**rollout):
    return config_from_dict(
        {
            "method": "grpo",
            "model": {"path": str(GOLDEN / "tokenizer")},
            "rollout": {"num_generations": 2, **rollout},
            "train": {"batch_size": 4, "max_steps": 2},
        }
    )


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    config = settings(task="reasoning_gym:chain_sum", task_options={"max_terms": 2})
    tokenizer = load_tokenizer(GOLDEN / "tokenizer")
    feed, _ = open_rollouts(config, tokenizer, ALONE)
    other, _ = open_rollouts(config, tokenizer, ALONE)
    one, two = feed.prompts.generation(3), other.prompts.generation(3)
    assert [p.text for p in one] == [p.text for p in two] and one[0].text != one[1].text
    assert feed.judges.names == ["chain_sum"]
    with pytest.raises(ValueError, match="nothing"):
        open_rollouts(settings(task="reasoning_gym:nothing"), tokenizer, ALONE)


def test_what_can_be_wrong(monkeypatch):
    tokenizer = load_tokenizer(GOLDEN / "tokenizer")
    with pytest.raises(ValueError, match="expected reasoning_gym:<name>"):
        open_rollouts(settings(task="sums"), tokenizer, ALONE)
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install"):
        open_rollouts(settings(task="reasoning_gym:chain_sum"), tokenizer, ALONE)
    with pytest.raises(SettingsError, match=r"set train\.max_steps"):
        config_from_dict({"method": "grpo", "rollout": {"task": "reasoning_gym:chain_sum"}})
    with pytest.raises(SettingsError, match="without rollout.task"):
        settings(task_options={"a": 1}, reward_funcs="a.b")
