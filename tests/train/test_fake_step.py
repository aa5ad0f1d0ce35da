"""A whole train_step on fake tensors: memory can be planned, and nothing is read back.

FakeTensorMode raises on .item(), .tolist(), nonzero and boolean indexing.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lean_trl.config import config_from_dict
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.model.config import read_config
from lean_trl.model.decoder import CausalLM
from lean_trl.model.value_head import RewardModel
from lean_trl.techniques import apply_techniques
from lean_trl.train.methods import METHODS
from lean_trl.train.optim import build_optimizer
from lean_trl.train.score import with_ref_logprobs
from lean_trl.train.step import count_totals, train_step
from lean_trl.types import Example

from .golden import GOLDEN


@pytest.mark.parametrize("name", ["qwen3", "llama3rope_tied"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_a_step_reads_nothing_back(name, checkpointing):
    raw = json.loads((GOLDEN / "models" / name / "config.json").read_text())
    config = config_from_dict({"memory": {"activation_checkpointing": checkpointing}})
    scored = [False, False, True, True]
    shared = [Example([5, 6, 7, t], scored, group=0) for t in (8, 9)]
    window = [
        build_batch([Example(np.arange(9)), Example(np.arange(4))]),
        build_batch(shared, share_prefixes=True),
        filler_batch(),
    ]
    totals = count_totals(window)
    method = METHODS["sft"].bind(config.loss)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = CausalLM(read_config(raw), device="cpu")
        around = apply_techniques(model, config)
        optimizer = build_optimizer(model, config.train)
        report = train_step(
            model, window, method, optimizer, totals=totals, max_grad_norm=1.0, around=around
        )
    assert isinstance(report.loss, FakeTensor) and report.loss.shape == ()
    assert isinstance(report.grad_norm, FakeTensor)
    assert {"entropy", "mean_token_accuracy", "padding_fraction"} == set(report.metrics)
    assert optimizer.state  # the update ran


PREFERENCES = {
    "dpo": {"loss_type": ["sigmoid", "aot", "aot_unpaired", "sft"], "use_weighting": False},
    "dpo weighted": {"loss_type": ["sigmoid", "exo_pair"], "use_weighting": True, "ld_alpha": 0.5},
    "reward": {"loss_type": "bradley_terry"},
    "kto": {"loss_type": "kto"},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_steps_read_nothing_back(name):
    raw = json.loads((GOLDEN / "models" / "qwen3" / "config.json").read_text())
    method, loss = name.split()[0], dict(PREFERENCES[name])
    if method == "dpo":
        loss["label_smoothing"] = 0.1
    config = config_from_dict({"method": method, "loss": loss})
    bound = METHODS[method].bind(config.loss)
    single = method == "kto"
    rows = [
        Example([5, 6, 7, t], [0, 0, 1, 1], {"label": t > 8} if single else {}, -1 if single else 0)
        for t in (8, 9)
    ]
    window = [build_batch(rows), filler_batch(mismatched=single)]
    if single:
        window[0] = replace(window[0], mismatched=build_batch(rows))
    totals = count_totals(window)
    with FakeTensorMode(allow_non_fake_inputs=True):
        kind = RewardModel if method == "reward" else CausalLM
        model = kind(read_config(raw), device="cpu")
        if bound.reference:
            window = [with_ref_logprobs(model, batch) for batch in window]
        optimizer = build_optimizer(model, config.train)
        report = train_step(model, window, bound, optimizer, totals=totals, max_grad_norm=1.0)
    assert isinstance(report.loss, FakeTensor) and report.loss.shape == ()
    assert optimizer.state
