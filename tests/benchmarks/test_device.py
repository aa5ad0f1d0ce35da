"""What device.sh runs, at sizes for a CPU; and that it skips with a line where there is no GPU."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, child_environment
from shapes import SHAPES, config_of, write

from kernels import KERNELS
from lean_trl.config import load_config
from lean_trl.model.config import read_config
from lean_trl.model.loader import load_model


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_timed(name, monkeypatch, tmp_path, capsys):
    import kernels

    monkeypatch.setattr(sys, "argv", ["kernels.py", name, "--out", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernels.main()
    rows = list(csv.DictReader(open(tmp_path / f"{name}.csv")))
    ran = {row["backend"] for row in rows if row["milliseconds"]}
    if name == "attention":
        assert ran == {"sdpa", "math"}
        assert next(r for r in rows if r["backend"] == "torch_varlen")["note"].endswith("math can")
    else:
        assert ran == {"linear_logprobs", "whole logits"}
    assert all(float(row["tflops"]) > 0 for row in rows if row["milliseconds"])
    assert "TFLOP/s" in capsys.readouterr().out


def test_a_shape_is_a_model_with_rows_and_a_recipe(tmp_path):
    recipe = write("tiny", tmp_path, "float32")
    config = load_config([str(recipe)])
    assert config.data.max_length == 128 and config.train.batch_size == 8
    model = load_model(config.model.path)
    assert model.config.num_layers == 2 and model.config.tied
    assert len(Path(config.data.path).read_text().splitlines()) == 64


@pytest.mark.parametrize("shape, billions", [("0.6b", 0.596), ("1.7b", 1.72)])
def test_shapes_have_their_size(shape, billions):
    from lean_trl.model.decoder import CausalLM

    model = CausalLM(read_config(config_of(shape)), device="meta")
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape in SHAPES


def test_device_sh_stays_under_nine_minutes_and_runs_what_exists():
    script = (ROOT / "benchmarks" / "device.sh").read_text()
    parts = re.findall(r"^ *part (\d+) (\S+)", script, re.M)
    twice = [int(n) for n, name in parts if "$shape" in name]
    once = [int(n) for n, name in parts if "$shape" not in name]
    assert 300 < sum(once) + 2 * sum(twice) < 9 * 60
    for file in re.findall(r"benchmarks/\w+\.py", script):
        assert (ROOT / file).exists(), file


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_sh_skips_with_a_line_without_a_gpu(tmp_path):
    environment = child_environment({"OUT": str(tmp_path / "out"), "PYTHON": sys.executable})
    command = ["bash", str(ROOT / "benchmarks" / "device.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "skipped" in done.stdout and "GPU" in done.stdout
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(700)
def test_device_sh_on_a_gpu(tmp_path):
    environment = child_environment({"OUT": str(tmp_path), "PYTHON": sys.executable})
    command = ["bash", str(ROOT / "benchmarks" / "device.sh")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "attention.csv").exists() and (tmp_path / "ladder_0.6b").is_dir()
