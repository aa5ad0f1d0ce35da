"""GRPO on replayed completions with adapters, plain and over a base in 4 bits, through the loop."""

from dataclasses import replace

import pytest
import torch

from lean_trl.peft_config import PeftConfig, QuantizationConfig
from lean_trl.train.loop import train

from ..train.golden import lines
from ..train.test_golden_grpo import SHAPE, replayed

pytest.importorskip("peft")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits, start", [(None, True), (None, "olora"), (4, True)])
def test_grpo_with_adapters(tmp_path, bits, start):
    """The first step is that of the base model; kl to it starts at 0, and grows as it moves."""
    config = replayed(tmp_path, {"beta": 0.04}, SHAPE, steps_per_generation=2)
    config = replace(
        config,
        peft=PeftConfig(target_modules="all-linear", r=8, init_lora_weights=start),
        quantization=QuantizationConfig(load_in_4bit=True) if bits else None,
        train=replace(config.train, learning_rate=1e-2, max_steps=4),
    )
    torch.manual_seed(0)
    train(config)
    steps = lines(tmp_path)
    assert len(steps) == 4
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["kl"] > 1e-6
