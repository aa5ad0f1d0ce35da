"""A step with techniques on fake tensors: memory can be planned, and nothing is read back."""

import pytest
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lean_trl.model.config import read_config
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.apply import apply_techniques
from lean_trl.train.methods import METHODS
from lean_trl.train.optim import OPTIMIZERS, build_optimizer
from lean_trl.train.step import count_totals, train_step

from .tiny import RAW, make_batch, make_config

SETTINGS = {
    "selective, offloaded": {
        "memory": {
            "activation_checkpointing_kwargs": {"selective": True},
            "activation_offloading": True,
        }
    },
    "tiled": {"memory": {"tiled_mlp": 8}},
    "in backward": {
        "train": {"max_grad_norm": 1.0},
        "memory": {"optimizer_in_backward": {"clip": "two_passes"}},
    },
    **{name: {"train": {"optimizer": name}} for name in OPTIMIZERS if name != "adamw"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_reads_nothing_back(name):
    config = make_config(**SETTINGS[name])
    window, method = [make_batch()], METHODS["sft"].bind(config.loss)
    totals = count_totals(window)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = CausalLM(read_config(RAW), device="cpu")
        around = apply_techniques(model, config)
        optimizer = build_optimizer(model, config.train, config.memory.optimizer_in_backward)
        report = train_step(
            model, window, method, optimizer, totals=totals, max_grad_norm=1.0, around=around
        )
    assert isinstance(report.grad_norm, FakeTensor) and optimizer.state
