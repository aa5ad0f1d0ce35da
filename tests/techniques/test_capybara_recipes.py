"""The Capybara recipes run as they are from a local hub: a tiny Qwen2.5 and a few conversations."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lean_trl.model.loader import new_model, save_model

from ..train.golden import GOLDEN
from .tiny import RAW

COMMIT = "0123456789abcdef0123456789abcdef01234567"
QWEN = RAW | {"model_type": "qwen2", "use_sliding_window": False, "num_hidden_layers": 2}


def snapshot(cache: Path, kind: str, name: str) -> Path:
    """The folder of a repository in the hub client's cache."""
    repo = cache / f"{kind}s--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("hub")
    model = snapshot(cache, "model", "Qwen/Qwen2.5-0.5B")
    shutil.copytree(GOLDEN / "tokenizer", model, dirs_exist_ok=True)
    vocabulary = json.loads((GOLDEN / "models/qwen3/config.json").read_text())["vocab_size"]
    save_model(new_model(QWEN | {"vocab_size": vocabulary}), model)
    data = snapshot(cache, "dataset", "trl-lib/Capybara") / "data"
    data.mkdir()
    turns = ["hello there", "general question", "one more word", "and the answer"]
    roles = ("user", "assistant") * 2
    for split, count in (("train", 64), ("test", 4)):
        rows = [
            [{"role": r, "content": f"{t} {i}"} for r, t in zip(roles, turns, strict=True)]
            for i in range(count)
        ]
        table = pa.table({"source": ["x"] * count, "messages": rows})
        pq.write_table(table, data / f"{split}-00000-of-00001.parquet")
    return cache


@pytest.mark.parametrize("name", ["qwen2.5_capybara_lora", "qwen2.5_capybara"])
def test_the_recipe_runs(name, hub, root, tmp_path):
    if name.endswith("lora"):
        pytest.importorskip("peft")
    command = [sys.executable, "scripts/train.py", f"recipes/{name}.yaml"]
    command += ["--output_dir", str(tmp_path), "--data.cache_dir", str(tmp_path / "cache")]
    command += ["--train.max_steps", "2", "--train.gradient_accumulation_steps", "1"]
    command += ["--data.max_length", "128"]  # a 64-row stand-in fills few bins of 1024
    environment = os.environ | {"HF_HUB_CACHE": str(hub)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == [1, 2]
    assert any("eval_loss" in line for line in steps)
    written = "adapter/adapter_model.safetensors" if "lora" in name else "model/model.safetensors"
    assert (tmp_path / written).is_file()
