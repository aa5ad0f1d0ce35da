"""The trial at start: each technique shows what it did, and one that did nothing stops the run."""

import pytest
import torch

from lean_trl.data import batch as data_batch
from lean_trl.techniques import trial
from lean_trl.techniques.apply import TECHNIQUES, Applied, apply_techniques
from lean_trl.techniques.checkpointing import ActivationCheckpointing
from lean_trl.techniques.trial import prove, table
from lean_trl.train.optim import build_optimizer

from .tiny import make_config, make_model


def start(**sections):
    config = make_config(**sections)
    model = make_model()
    applied = apply_techniques(model, config)
    optimizer = build_optimizer(model, config.train)
    return prove(applied, model, optimizer, config), model, optimizer


def test_the_table_says_what_was_measured():
    memory = {"activation_checkpointing_kwargs": {"every": 2, "selective": True}}
    evidence, _, _ = start(memory=memory)
    lines = table(evidence).splitlines()[1:]
    assert lines == [
        "  padding_free               0 padding tokens in 64, 32 in a padded batch",
        "  activation_checkpointing   2 of 4 blocks run again in backward, attention kept in 2",
    ]


def test_nothing_is_left_behind():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    evidence, model, optimizer = start()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state
    fresh = make_model()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fresh.get_parameter(name))


def test_a_technique_without_effect_is_refused(monkeypatch):
    monkeypatch.setattr(ActivationCheckpointing, "on_model", lambda self, model: None)
    with pytest.raises(ValueError, match="activation_checkpointing is asked for by memory.*0 of 4"):
        start()


# What each technique is asked for with; all that their bodies change is undone below.
ASKED_FOR = {
    "activation_checkpointing": {},
    "activation_offloading": {"memory": {"activation_offloading": True}},
    "tiled_mlp": {"memory": {"tiled_mlp": 8}},
    "compile": {"memory": {"compile": True}},
    "adapters": {"peft": {"target_modules": "all-linear"}},
    "quantization": {"peft": {}, "quantization": {"load_in_4bit": True}},
    "sharding": {"distributed": {"sharding": "fsdp"}},
    "optimizer_state": {"train": {"optimizer": "adamw_8bit"}},
    "optimizer_in_backward": {
        "train": {"max_grad_norm": None},
        "memory": {"optimizer_in_backward": {}},
    },
    "expandable_segments": {"memory": {"expandable_segments": True}},
    "padding_free": {},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TECHNIQUES, ids=lambda kind: kind.name)
def test_every_technique_without_its_body_is_refused(monkeypatch, kind):
    """Not applied to the model, with plain AdamW and padded batches, each shows nothing."""
    monkeypatch.setattr(kind, "on_model", lambda self, model: None)
    config = make_config(**ASKED_FOR[kind.name])
    model = make_model()
    applied = Applied([kind(config)])
    assert applied.active[0].enabled
    applied.active[0].on_model(model)
    if kind.name == "padding_free":
        monkeypatch.setattr(trial, "build_batch", padded)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match=f"{kind.name} is asked for by"):
        prove(applied, model, optimizer, config)


def padded(examples, **options):
    return data_batch.build_batch(examples, padding_free=False)


def test_selective_that_keeps_nothing_is_refused(monkeypatch):
    monkeypatch.setattr("lean_trl.techniques.checkpointing._keep_attention", plain_contexts)
    with pytest.raises(ValueError, match="attention kept in 0"):
        start(memory={"activation_checkpointing_kwargs": {"selective": True}})


def plain_contexts(count):
    from contextlib import nullcontext

    return nullcontext(), nullcontext()


def test_padding_that_is_there_all_the_same_is_refused(monkeypatch):
    monkeypatch.setattr(trial, "build_batch", padded)
    with pytest.raises(ValueError, match="padding_free is asked for by data.padding_free"):
        start()


def test_a_budget_that_keeps_everything_is_refused():
    with pytest.raises(ValueError, match="0 of 4 blocks"):
        start(memory={"activation_checkpointing_kwargs": {"budget": 1.0}})
