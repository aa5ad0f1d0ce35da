"""The recipes run on built-in rows, from a model like the one that recipes/sft.yaml makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lean_trl import builtin
from lean_trl.builtin.dataset import make_rows
from lean_trl.config import load_config
from lean_trl.model import new_model, save_model
from lean_trl.train.loop import train
from lean_trl.train.methods import METHODS

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    shutil.copytree(builtin.model_folder(), folder, dirs_exist_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    save_model(new_model(raw, seed=0), folder)
    return folder


@pytest.mark.parametrize("method", ["dpo", "reward", "kto"])
def test_recipe_runs(method: str, start: Path, tmp_path: Path) -> None:
    recipe, rows = RECIPES / f"{method}.yaml", tmp_path / "rows.jsonl"
    kind = METHODS[method].examples
    sample = make_rows(kind=kind)["train_easy"][:16]
    rows.write_text("".join(json.dumps(row) + "\n" for row in sample))
    assert load_config([str(recipe)]).model.path == "outputs/sft/model"
    changes = {
        "output_dir": tmp_path,
        "model.path": start,
        "data.path": rows,  # without one, held-out questions would be answered too
        "train.max_steps": 2,
        "train.warmup_steps": 0,
        "train.batch_size": 4,
        "train.micro_batch_size": 2,
        "data.eval_split": "null",
        "logging.progress": "false",
    }
    train(load_config([str(recipe), *(f"--{key}={value}" for key, value in changes.items())]))
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in written if "loss" in line]
    assert len(losses) == 2 and losses[0] != losses[1]
    architectures = json.loads((tmp_path / "model" / "config.json").read_text())["architectures"]
    head = "SequenceClassification" if method == "reward" else "CausalLM"
    assert architectures == [f"Qwen3For{head}"]
