"""The reference in whole runs: another model, a moving one across a restart, log-probs on disk."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_trl.config import Config, save_config
from lean_trl.model import load_model, save_model
from lean_trl.train import loop, reference
from lean_trl.train.distributed import World

from .golden import lines, model_folder, recorded_config

ALONE = World(0, 1, torch.device("cpu"), None)
DATA = {"max_length": 256}


def config(folder: Path, **changes: Any) -> Config:
    train = {"max_steps": 4, "learning_rate": 1e-4, **changes.pop("train", {})}
    keys: dict[str, Any] = {"method": "dpo", "data": DATA, "train": train, **changes}
    return recorded_config(folder, "preference", **keys)


def other_model(folder: Path) -> Path:
    """The tiny model with other weights."""
    start = model_folder("qwen3", folder)
    model = load_model(start)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.02)
    target = folder / "other"
    save_model(model, target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / name).write_bytes((start / name).read_bytes())
    return target


def with_ref_path(settings: Config, path: Path) -> Config:
    return replace(settings, model=replace(settings.model, ref_path=str(path)))


def test_ref_path_in_memory_and_on_disk_agree_and_differ_from_the_start(tmp_path: Path) -> None:
    other = other_model(tmp_path)
    runs = {}
    for name, precompute in (("memory", False), ("disk", True)):
        loss = {"precompute_ref_log_probs": precompute}
        loop.train(with_ref_path(config(tmp_path / name, loss=loss), other))
        runs[name] = lines(tmp_path / name)
    for memory, disk in zip(runs["memory"], runs["disk"], strict=True):
        assert disk["loss"] == pytest.approx(memory["loss"], rel=1e-5)
        assert disk["grad_norm"] == pytest.approx(memory["grad_norm"], rel=1e-5)
    assert abs(runs["memory"][0]["loss"] - math.log(2)) > 1e-3


def test_a_reference_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = other_model(tmp_path)
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**raw, "vocab_size": raw["vocab_size"] + 8}))
    with pytest.raises(ValueError, match="has 520 tokens, the model 512: a reference must share"):
        loop.train(with_ref_path(config(tmp_path), other))


def test_log_probs_on_disk_leave_no_reference_in_memory(tmp_path: Path) -> None:
    run = loop.set_up(config(tmp_path, loss={"precompute_ref_log_probs": True}), ALONE)
    assert run.reference is None
    (window, *_) = run.train_feed
    stored = np.load(tmp_path / "out" / "ref_logprobs" / "train" / "logprobs.npy")
    first = window.batches[0].extras["ref_logprobs"]
    assert np.array_equal(first, stored[: len(first)])  # rows in file order


def test_losses_without_a_reference_load_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a reference was loaded")

    monkeypatch.setattr(reference, "frozen_model", refuse)
    loop.train(config(tmp_path, loss={"loss_type": ["simpo", "sft"], "beta": 2.0}))
    losses = [line["loss"] for line in lines(tmp_path)]
    assert len(losses) == 4 and all(map(math.isfinite, losses))


SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}


def test_a_moving_reference_survives_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop.train(config(tmp_path / "whole", loss=SYNC))

    class Stopped(Exception):
        pass

    steps = []
    real_step = loop.train_step

    def stop_after_three(*arguments: Any, **options: Any) -> Any:
        if len(steps) == 3:
            raise Stopped
        steps.append(None)
        return real_step(*arguments, **options)

    parts = config(tmp_path / "parts", loss=SYNC, checkpoint={"export_hf": False, "every": 3})
    monkeypatch.setattr(loop, "train_step", stop_after_three)
    with pytest.raises(Stopped):
        loop.train(parts)
    monkeypatch.setattr(loop, "train_step", real_step)
    loop.train(parts)
    for whole, part in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert (whole["loss"], whole["grad_norm"]) == (part["loss"], part["grad_norm"])


def test_the_reference_moves_only_when_asked(tmp_path: Path) -> None:
    start = load_model(model_folder("qwen3", tmp_path)).model.norm.weight
    run = loop.set_up(config(tmp_path, loss=SYNC), ALONE)
    assert run.reference is not None
    with torch.no_grad():
        run.model.model.norm.weight.add_(1.0)
    moved = []
    for run.step in (1, 2, 3):
        loop.sync_reference(run)
        moved.append((run.reference.model.norm.weight - start).mean().item())
    assert moved == pytest.approx([0.0, 0.5, 0.5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_0_costs_ln_two_whatever_computes_and_with_dropout_configured(
    dtype: str, tmp_path: Path
) -> None:
    folder = model_folder("qwen3", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "attention_dropout": 0.2}))
    settings = config(tmp_path, train={"max_steps": 1})
    loop.train(replace(settings, model=replace(settings.model, dtype=dtype)))
    (line,) = lines(tmp_path)
    assert line["loss"] == pytest.approx(0.693147, abs=1e-6)
    assert line["rewards/chosen"] == line["rewards/margins"] == 0


def test_score_script_writes_what_the_run_reads(tmp_path: Path) -> None:
    settings = config(tmp_path, loss={"precompute_ref_log_probs": True})
    save_config(settings, tmp_path / "recipe.yaml")
    script = Path(__file__).parents[2] / "scripts" / "score.py"
    command = [sys.executable, str(script), str(tmp_path / "recipe.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=environment)
    file = tmp_path / "out" / "ref_logprobs" / "train" / "logprobs.npy"
    written = file.stat().st_mtime_ns
    loop.train(settings)
    assert file.stat().st_mtime_ns == written
    assert lines(tmp_path)[0]["loss"] == pytest.approx(0.693147, abs=1e-6)


def test_a_method_without_a_reference_cannot_be_scored(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dpo with loss simpo has no reference"):
        reference.score_rows(config(tmp_path, loss={"loss_type": "simpo"}))
