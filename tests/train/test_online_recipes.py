"""The online recipes run on built-in rows, from a model like the one that sft.yaml makes."""

import json
import shutil
from pathlib import Path

import pytest

from lean_trl import builtin
from lean_trl.builtin.dataset import make_rows
from lean_trl.config import load_config
from lean_trl.model import new_model, save_model
from lean_trl.train.loop import train

from .test_golden_grpo import REWARDS

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("method", ["grpo", "rloo", "online_dpo"])
def test_recipe_runs(method, tmp_path):
    start, rows, out = tmp_path / "start", tmp_path / "rows.jsonl", tmp_path / "out"
    shutil.copytree(builtin.model_folder(), start)
    save_model(new_model(json.loads((start / "config.json").read_text()), seed=0), start)
    sample = make_rows()["train_hard"][:16]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sample))
    recipe = RECIPES / f"{method}.yaml"
    assert load_config([str(recipe)]).rollout.reward_funcs == "right_answer"
    changes = {
        "output_dir": out,
        "model.path": start,
        "data.path": rows,
        "data.split": "null",
        "rollout.max_completion_length": 6,
        "rollout.reward_funcs": f"[right_answer, '{REWARDS}:reward_varied']",
        "train.max_steps": 2,
        "train.batch_size": 16,
        "train.micro_batch_size": 8,
        "checkpoint.export_hf": "false",
        "logging.progress": "false",
    }
    train(load_config([str(recipe), *(f"--{key}={value}" for key, value in changes.items())]))
    written = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in written if "loss" in line]
    assert len(steps) == 2 and all(line["grad_norm"] > 0 for line in steps)
    assert steps[0]["rewards/right_answer/mean"] == 0
    assert 0 < steps[0]["rewards/reward_varied/mean"] < 1
