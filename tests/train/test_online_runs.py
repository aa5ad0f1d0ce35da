"""Whole online runs with the native engine: replayed bit for bit, resumed, on sharded weights."""

import json
import shutil

import pytest

from lean_trl.config import save_config
from lean_trl.train.loop import train
from lean_trl.train.resume import read_manifest

from .golden import lines, recorded_config
from .test_golden_grpo import REWARDS
from .test_golden_sft import torchrun


def online(folder, *, method="grpo", loss=None, steps=4, rollout=None, **changes):
    settings = {
        "num_generations": 2 if method == "online_dpo" else 4,
        "max_completion_length": 10,
        "reward_funcs": f"{REWARDS}:reward_varied",
        "log_completions": True,
        "temperature": 0.9,
    }
    shape = {"gradient_accumulation_steps": None, "batch_size": 8, "max_steps": steps}
    return recorded_config(
        folder,
        "prompts",
        method=method,
        loss=loss or {},
        rollout={**settings, **(rollout or {})},
        train={**shape, **changes.pop("train", {})},
        memory={"activation_checkpointing": False},
        **changes,
    )


def numbers(folder):
    return [(line["loss"], line["grad_norm"], line.get("reward")) for line in lines(folder)]


RUNS = {
    "grpo": {"method": "grpo", "loss": {"beta": 0.04}},
    "rloo": {"method": "rloo"},
    "online_dpo": {"method": "online_dpo"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_replayed_run_is_the_live_one_bit_for_bit(name, tmp_path):
    live, again = tmp_path / "live", tmp_path / "again"
    train(online(live, **RUNS[name]))
    file = live / "out" / "completions.jsonl"
    assert len(file.read_text().splitlines()) == 4 * 8
    replay = {"engine": "replay", "replay_path": str(file)}
    train(online(again, rollout=replay, **RUNS[name]))
    assert numbers(again) == numbers(live)
    assert len(set(numbers(live))) == 4  # it does learn
    # A file that brings its rewards needs no function.
    recorded = tmp_path / "recorded"
    train(online(recorded, rollout={**replay, "reward_funcs": None}, **RUNS[name]))
    assert numbers(recorded) == numbers(live)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Stopped inside a generation: the buffer, its old log-probs and the bonus come back."""
    loss = {"beta": 0.04, "use_adaptive_entropy": True, "entropy_target": 6.0}
    options = {
        "loss": loss,
        "rollout": {"steps_per_generation": 4, "num_iterations": 2},
        "train": {"micro_batch_size": 4, "batch_size": 8},
        "steps": 7,
    }
    whole = tmp_path / "whole"
    train(online(whole, checkpoint={"every": 3, "keep": 9}, **options))
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    for folder in (part / "out" / "checkpoints").iterdir():
        if folder.name != "step-3":
            shutil.rmtree(folder)
    assert read_manifest(part / "out" / "checkpoints" / "step-3")["state"]["feed"]["rollouts"]
    # Another folder of the same weights: "always" does not ask whether it is the same.
    train(online(part, checkpoint={"every": 3, "keep": 9, "resume": "always"}, **options))
    assert numbers(part)[3:] == numbers(whole)[3:]
    logs = [(f / "out" / "completions.jsonl").read_text() for f in (whole, part)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("gather", [True, False])
def test_sharded_weights_generate_the_same(gather, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(online(one, steps=2))
    config = online(two, steps=2, rollout={"gather_for_generation": gather})
    save_config(config, tmp_path / "recipe.yaml")
    torchrun(2, tmp_path / "recipe.yaml")
    for a, b in zip(lines(one), lines(two), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
    files = [(f / "out" / "completions.jsonl").read_text().splitlines() for f in (one, two)]
    ids = [[json.loads(line)["completion_ids"] for line in file] for file in files]
    assert ids[0][:8] == ids[1][:8]  # before the weights differ in their last bits
