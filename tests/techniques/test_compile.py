"""Compiled blocks: one graph for all of them and for every length, and the same gradients."""

import pytest
import torch
from torch._dynamo.utils import counters

from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.compile import Compile
from lean_trl.techniques.trial import prove
from lean_trl.train.optim import build_optimizer

from .tiny import gradients, make_batch, make_config, make_model


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """The graph is what is tested; inductor takes a minute for its first kernels here."""
    torch._dynamo.reset()
    monkeypatch.setattr(Compile, "backend", "aot_eager")


def test_one_graph_and_no_other_after_the_first_batch():
    config = make_config(memory={"compile": True})
    model, plain = make_model(), make_model()
    applied = apply_techniques(model, config)
    found = prove(applied, model, build_optimizer(model, config.train), config)["compile"]
    assert found.amount > 0 and found.text.endswith("0 graph breaks")
    before = dict(counters["stats"])
    for step, lengths in enumerate(((19, 12), (30, 9), (40, 24), (5,))):
        batch = make_batch(*lengths, seed=step)
        with applied():
            scores = model(batch)
            scores.logprobs.sum().backward()
        expected = plain(batch)
        expected.logprobs.sum().backward()
        torch.testing.assert_close(scores.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
        grads = gradients(model)
        for name, grad in gradients(plain).items():
            assert (grads[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name
    assert dict(counters["stats"]) == before


def test_without_gradients_the_plain_block_runs():
    model = make_model()
    apply_techniques(model, make_config(memory={"compile": True}))
    before = counters["stats"]["calls_captured"]
    with torch.no_grad():
        model(make_batch())
    assert counters["stats"]["calls_captured"] == before


def test_a_block_that_was_not_compiled_is_noticed(monkeypatch):
    monkeypatch.setattr(Compile, "on_model", lambda self, model: None)
    config, model = make_config(memory={"compile": True}), make_model()
    applied = apply_techniques(model, config)
    with pytest.raises(ValueError, match="compile is asked for by memory.compile"):
        prove(applied, model, build_optimizer(model, config.train), config)


@pytest.mark.parametrize(
    "other", [{"activation_checkpointing_kwargs": {"selective": True}}, {"tiled_mlp": 8}]
)
def test_settings_at_odds(other):
    with pytest.raises(ValueError, match="leave one of them out"):
        make_config(memory={"compile": True} | other)
