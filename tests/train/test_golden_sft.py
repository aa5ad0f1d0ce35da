"""SFT against the numbers that TRL showed on the same weights and rows (tests/golden/README.md)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lean_trl.config import save_config
from lean_trl.train.loop import train

from .golden import check_against_record, lines, recorded_config

RECORDED = {
    "sft/text": ("text", {"data": {"max_length": 128}}),
    "sft/prompt_completion": ("prompt_completion", {"data": {"max_length": 128}}),
    "sft/messages": ("messages", {"data": {"max_length": 128}}),
    "sft/text_dft": ("text", {"loss": {"loss_type": "dft"}, "data": {"max_length": 128}}),
    "sft/text_short": ("text", {"data": {"max_length": 32}}),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_shape(name, tmp_path):
    rows, changes = RECORDED[name]
    train(recorded_config(tmp_path, rows, **changes))
    check_against_record(lines(tmp_path), name)


SHAPES = {
    "1x8": {"micro_batch_size": 1, "gradient_accumulation_steps": 8},
    "2x4": {"micro_batch_size": 2, "gradient_accumulation_steps": 4},
    "8x1": {"micro_batch_size": 8, "gradient_accumulation_steps": 1},
    "3 of 8": {"micro_batch_size": 3, "gradient_accumulation_steps": None, "batch_size": 8},
    "200 tokens": {
        "max_tokens_per_micro_batch": 200,
        "gradient_accumulation_steps": None,
        "batch_size": 8,
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_window_in_another_shape(shape, tmp_path):
    changes = {"data": {"max_length": 128}, "train": SHAPES[shape]}
    train(recorded_config(tmp_path, "prompt_completion", **changes))
    check_against_record(lines(tmp_path), "sft/prompt_completion")


def test_without_checkpointing_the_losses_are_the_same_bits(tmp_path):
    runs = []
    for checkpointing in (True, False):
        folder = tmp_path / str(checkpointing)
        train(recorded_config(folder, "text", memory={"activation_checkpointing": checkpointing}))
        runs.append([(line["loss"], line["grad_norm"]) for line in lines(folder)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", ["sft/prompt_completion", "sft/messages"])
def test_two_ranks(name, tmp_path):
    rows, changes = RECORDED[name]
    train_shape = {"micro_batch_size": 4, "gradient_accumulation_steps": None, "batch_size": 8}
    save_config(
        recorded_config(tmp_path, rows, train=train_shape, **changes), tmp_path / "recipe.yaml"
    )
    torchrun(2, tmp_path / "recipe.yaml")
    check_against_record(lines(tmp_path), name)


def torchrun(ranks: int, *arguments: Path | str) -> None:
    script = Path(__file__).parents[2] / "scripts" / "train.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(script),
    ]
    subprocess.run(
        [*command, *map(str, arguments)],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
