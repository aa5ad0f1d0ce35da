"""GRPO on replayed completions against the numbers that TRL showed (tests/golden/README.md)."""

import json
from pathlib import Path

import pytest

from lean_trl.config import save_config
from lean_trl.train.loop import train

from .golden import GOLDEN, lines, recorded_config
from .test_golden_sft import torchrun

RECORDS = json.loads((GOLDEN / "trl_grpo.json").read_text())
REWARDS = Path(__file__).parent / "rewards.py"
RECORDED = {
    "grpo/grpo": {"loss_type": "grpo"},
    "grpo/dapo": {},
    "grpo/cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "grpo/seq_level": {"importance_sampling_level": "sequence"},
    "grpo/beta": {"beta": 0.04},
    "grpo/scale_batch": {"scale_rewards": "batch"},
}
SHAPE = {"micro_batch_size": 8, "gradient_accumulation_steps": 2}


def replayed(folder, loss, train_shape, *, method="grpo", **rollout):
    settings = {
        "engine": "replay",
        "replay_path": str(GOLDEN / "data" / "rollouts.jsonl"),
        "num_generations": 4,
        "max_completion_length": 128,
        "num_iterations": 2,
        "reward_funcs": [f"{REWARDS}:reward_correct", f"{REWARDS}:reward_short"],
    }
    return recorded_config(
        folder,
        "prompts",
        method=method,
        loss=loss,
        train={"gradient_accumulation_steps": None, **train_shape},
        rollout={**settings, **rollout},
    )


def check(ours, name):
    """loss and grad_norm of all six steps; a loss near 0 is a difference of larger numbers."""
    steps = [entry for entry in RECORDS[name]["log"] if "loss" in entry]
    assert len(ours) == len(steps) == 6
    for line, entry in zip(ours, steps, strict=True):
        where = (name, entry["step"])
        assert line["loss"] == pytest.approx(entry["loss"], rel=1e-4, abs=1e-5), where
        assert line["grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-4), where


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_shape(name, tmp_path):
    train(replayed(tmp_path, RECORDED[name], SHAPE, steps_per_generation=2))
    check(lines(tmp_path), name)


SHAPES = {
    "16x1": {"micro_batch_size": 16},
    "2x8": {"micro_batch_size": 2, "gradient_accumulation_steps": 8},
    "3 of 16": {"micro_batch_size": 3, "batch_size": 16},
    "300 tokens": {"max_tokens_per_micro_batch": 300, "batch_size": 16},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["grpo/beta", "grpo/grpo"])
def test_the_same_window_in_another_shape(name, shape, tmp_path):
    train(replayed(tmp_path, RECORDED[name], SHAPES[shape]))
    check(lines(tmp_path), name)


def test_metrics_of_one_micro_batch(tmp_path):
    """Where the window is one micro-batch the peer's other metrics are those of the window too."""
    train(replayed(tmp_path, {"beta": 0.04}, {"micro_batch_size": 16}))
    ours = lines(tmp_path)
    check(ours, "grpo/beta_ga1")
    compared = set()
    for line, entry in zip(ours, RECORDS["grpo/beta_ga1"]["log"], strict=False):
        for key, value in entry.items():
            if "/" in key or key.startswith(("kl", "entropy", "reward", "frac")):
                assert line[key] == pytest.approx(value, rel=2e-4, abs=1e-5), (entry["step"], key)
                compared.add(key)
    assert {"kl", "entropy", "reward_std", "frac_reward_zero_std"} <= compared
    assert {"clip_ratio/region_mean", "rewards/reward_short/std"} <= compared


def test_two_ranks(tmp_path):
    config = replayed(tmp_path, {"beta": 0.04}, {"micro_batch_size": 4, "batch_size": 16})
    save_config(config, tmp_path / "recipe.yaml")
    torchrun(2, tmp_path / "recipe.yaml")
    check(lines(tmp_path), "grpo/beta")
