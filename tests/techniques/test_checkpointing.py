"""Activation checkpointing: which blocks, what they keep, what runs again, and nothing changes."""

import pytest
import torch

from lean_trl.config import SettingsError
from lean_trl.memory_config import CheckpointingConfig
from lean_trl.ops import attention
from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.checkpointing import blocks_to_run_again

from ..live_bytes import LiveBytes
from .tiny import RAW, gradients, make_batch, make_config, make_model

LAYERS, D, F = RAW["num_hidden_layers"], RAW["hidden_size"], 4  # F: bytes of an element
MODES = {
    "none": {"activation_checkpointing": False},
    "full": {},
    "selective": {"activation_checkpointing_kwargs": {"selective": True}},
    "every 2": {"activation_checkpointing_kwargs": {"every": 2}},
    "budget": {"activation_checkpointing_kwargs": {"budget": 0.5}},
    "selective budget": {"activation_checkpointing_kwargs": {"selective": True, "budget": 0.3}},
}


def run(memory, batch, attention_backend="auto"):
    """(log-probs, gradients, bytes that the blocks keep for backward)"""
    model = make_model()
    model.attention = attention_backend
    around = apply_techniques(model, make_config(memory=memory))
    with around(), LiveBytes() as live:
        scores = model(batch)
        after_forward = live.alive()
        scores.logprobs.sum().backward()
    return scores.logprobs.detach(), gradients(model), after_forward


@pytest.mark.parametrize("backend", ["sdpa", "math"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_changes(mode, backend):
    batch = make_batch()
    plain, grads, _ = run(MODES["none"], batch, backend)
    logprobs, found, _ = run(MODES[mode], batch, backend)
    assert torch.equal(plain, logprobs)
    for name, grad in grads.items():
        assert torch.equal(found[name], grad), name


def kept(mode, batch):
    """Bytes that the blocks keep beyond what a model without blocks would."""
    return run(MODES[mode], batch)[2]


def test_bytes_kept_for_backward():
    batch = make_batch(40, 24)
    T, N = batch.num_tokens, RAW["num_attention_heads"]
    none, full = kept("none", batch), kept("full", batch)
    block_input = T * D * F
    # The same model with one layer less keeps one block input less.
    model = make_model(num_hidden_layers=LAYERS - 1)
    around = apply_techniques(model, make_config())
    with around(), LiveBytes() as live:
        scores = model(batch)
        shorter = live.alive()
    del scores
    assert full - shorter == block_input
    assert none - full > 10 * LAYERS * block_input
    attention_output, lse = T * N * (D // N) * F, T * N * 4
    assert kept("selective", batch) - full == LAYERS * (attention_output + lse)
    per_block = (none - full) / LAYERS
    assert kept("every 2", batch) - full == pytest.approx(LAYERS / 2 * per_block, rel=0.01)
    budget = kept("budget", batch) - full
    assert budget <= 0.5 * (none - full) * 1.01
    assert budget == pytest.approx(0.5 * (none - full), rel=0.01)


def count_attention(monkeypatch, memory):
    """How often attention's forward ran in a step."""
    ran = []
    kind = type(attention.BACKENDS["sdpa"])
    plain = kind.forward

    def counting(self, *args):
        ran.append(1)
        return plain(self, *args)

    monkeypatch.setattr(kind, "forward", counting)
    run(memory, make_batch(), "sdpa")
    return len(ran)


@pytest.mark.parametrize("mode, times", [("none", 1), ("full", 2), ("selective", 1)])
def test_attention_runs(monkeypatch, mode, times):
    assert count_attention(monkeypatch, MODES[mode]) == times * LAYERS


def test_a_forward_without_gradients_is_the_block_itself():
    model, batch = make_model(), make_batch()
    applied = apply_techniques(model, make_config())
    with torch.no_grad():
        model(batch)
    technique = next(t for t in applied.active if t.name == "activation_checkpointing")
    assert [each.calls for each in technique.chosen] == [0] * LAYERS


@pytest.mark.parametrize(
    "share, blocks", [(0.0, [0, 1, 2]), (0.34, [0, 1]), (0.99, [0]), (1.0, [])]
)
def test_budget_keeps_no_more_than_its_share(share, blocks):
    assert blocks_to_run_again(3, CheckpointingConfig(budget=share)) == blocks


@pytest.mark.parametrize(
    "memory, message",
    [
        (
            {
                "activation_checkpointing": False,
                "activation_checkpointing_kwargs": {"selective": True},
            },
            "has no effect while memory.activation_checkpointing is false",
        ),
        ({"activation_checkpointing_kwargs": {"budget": 0.5, "every": 2}}, "leave one of them out"),
        ({"activation_checkpointing_kwargs": {"budget": 1.5}}, "number from 0 to 1"),
        ({"activation_checkpointing_kwargs": {"every": 0}}, "int >= 1"),
    ],
)
def test_settings_at_odds(memory, message):
    with pytest.raises(SettingsError, match=message):
        make_config(memory=memory)
