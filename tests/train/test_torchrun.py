"""Real ranks under torchrun: failures, restarts and signals, with bit-identical results."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_trl.config import save_config
from lean_trl.train import loop
from lean_trl.train.distributed import World

from .test_resume import settings

ROOT = Path(__file__).resolve().parents[2]
RANK = Path(__file__).with_name("rank.py")


def start(
    folder: Path,
    *arguments: str,
    ranks: int = 2,
    restarts: int = 0,
    script: Path = RANK,
) -> subprocess.Popen:
    """torchrun on the settings of test_resume.py, checkpoints every 2 of 10 steps."""
    recipe = folder / "recipe.yaml"
    if not recipe.exists():
        save_config(settings(folder, checkpoint={"every": 2}), recipe)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"),
        *(str(script), str(recipe), *arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen, timeout_s: float = 60.0) -> str:
    """All it printed; killed when it takes too long."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def outcome(folder: Path) -> tuple[list[tuple], dict[str, torch.Tensor]]:
    text = (folder / "out" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [(x["step"], x["loss"], x["grad_norm"], x["learning_rate"]) for x in lines]
    return steps, load_file(folder / "out" / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> tuple[list[tuple], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("whole")
    out = finish(start(folder))
    steps, weights = outcome(folder)
    assert len(steps) == 10, out
    return steps, weights


def check_same_bits(folder: Path, expected: tuple[list[tuple], dict[str, torch.Tensor]]) -> None:
    steps, weights = outcome(folder)
    assert steps == expected[0]
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected[1].items())


def test_a_rank_that_raises_is_named_and_torchrun_goes_on(uninterrupted, tmp_path):
    """Rank 1 raises in its data loader at step 5: all end, restart, resume from step 4."""
    process = start(tmp_path, "--fail", "1:5:raise", restarts=1)
    out = finish(process)
    assert process.returncode == 0, out
    assert "KeyError: 'broken row" in out
    row = out.partition("KeyError: 'broken row ")[2].partition("'")[0]
    told = f"rank 0 ends at step 5, {tmp_path}/rows.jsonl row "
    assert told in out
    assert f"rank 1 failed at step 5, {tmp_path}/rows.jsonl row {row}" in out
    assert "resumed from" in out and "step-4" in out
    check_same_bits(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_losses_and_gradient_norms_are_those_of_one_process(ranks, tmp_path):
    folders = [tmp_path / name for name in ("one", "many")]
    for folder in folders:
        folder.mkdir()
    loop.train_as(World(0, 1, torch.device("cpu"), None), settings(folders[0]))
    process = start(folders[1], ranks=ranks, script=ROOT / "scripts" / "train.py")
    out = finish(process)
    assert process.returncode == 0, out
    (ours, weights), (theirs, whole) = outcome(folders[1]), outcome(folders[0])
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)  # later steps add up rounding
    for step, expected in zip(ours, theirs, strict=True):
        assert step == pytest.approx(expected, rel=2e-5)
    for name, weight in whole.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["async", "streaming"])
def test_two_variants_restart_with_the_same_bits(variant, tmp_path):
    settings_of = {
        "async": ("--checkpoint.async_save", "true"),
        "streaming": ("--data.streaming", "true", "--train.max_steps", "10"),
    }[variant]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder, fail in ((whole, ()), (stopped, ("--fail", "0:7:raise"))):
        folder.mkdir()
        process = start(folder, *settings_of, *fail, restarts=1)
        out = finish(process, 90)
        assert process.returncode == 0, out
    assert "resumed from" in out
    check_same_bits(stopped, outcome(whole))


@pytest.mark.slow
def test_a_rank_that_is_killed_and_a_fresh_launch(uninterrupted, tmp_path):
    start_time = time.monotonic()
    process = start(tmp_path, "--fail", "1:6:kill", "--checkpoint.async_save", "true")
    out = finish(process)
    assert process.returncode != 0
    assert time.monotonic() - start_time < 50, out
    process = start(tmp_path)
    out = finish(process)
    assert process.returncode == 0 and "step-4" in out, out
    check_same_bits(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["one rank", "torchrun"])
def test_sigterm_saves_and_the_next_launch_goes_on(to, uninterrupted, tmp_path):
    if to == "one rank":
        process = start(tmp_path, "--fail", "1:3:term")
    else:
        process = start(tmp_path)
        while not (tmp_path / "out" / "checkpoints" / "step-2").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert process.returncode != 0
    if to == "one rank":
        assert "stopped by SIGTERM after step 4" in out
    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert all(name.startswith("step-") and "." not in name for name in saved), saved
    process = start(tmp_path)
    out = finish(process)
    assert process.returncode == 0 and "resumed from" in out, out
    check_same_bits(tmp_path, uninterrupted)
