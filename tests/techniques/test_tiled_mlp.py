"""The tiled MLP: the same gradients, wide intermediates of one tile, no second recomputation."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lean_trl.model.modules import MLP
from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.tiled_mlp import TiledMLP
from lean_trl.techniques.trial import prove
from lean_trl.train.optim import build_optimizer

from .tiny import RAW, gradients, make_batch, make_config, make_model

SHAPE = {"intermediate_size": 640}  # wider than anything else


class Largest(TorchDispatchMode):
    """The most rows of a tensor that is as wide as the MLP."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in tree_iter(out):
            if isinstance(item, torch.Tensor) and item.ndim == 2 and item.shape[1] == 640:
                self.rows = max(self.rows, item.shape[0])
        return out


def run(memory, batch, **shape):
    model = make_model(**SHAPE | shape)
    around = apply_techniques(model, make_config(memory=memory))
    with around(), Largest() as largest:
        scores = model(batch)
        scores.logprobs.sum().backward()
    return scores.logprobs.detach(), gradients(model), largest.rows


@pytest.mark.parametrize("size", [1, 7, 31, 64, 1000])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_nothing_changes(size, checkpointing):
    batch = make_batch(40, 24)
    memory = {"activation_checkpointing": checkpointing}
    plain, grads, _ = run(memory, batch)
    logprobs, found, _ = run(memory | {"tiled_mlp": size}, batch)
    torch.testing.assert_close(logprobs, plain, rtol=1e-6, atol=1e-6)
    for name, grad in grads.items():
        assert (found[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def test_wide_intermediates_are_those_of_a_tile():
    batch = make_batch(40, 24)
    weights = RAW["hidden_size"]  # down_proj [32, 640] and its gradient are as wide
    assert run({}, batch)[2] == 64
    assert run({"tiled_mlp": 8}, batch)[2] == weights
    assert run({"tiled_mlp": 40}, batch)[2] == 40


def forwards(monkeypatch, memory):
    """Tokens that went through MLPs in a step, over layers and tokens."""
    seen = []
    plain = MLP.forward

    def counting(self, x):
        seen.append(x.shape[0])
        return plain(self, x)

    monkeypatch.setattr(MLP, "forward", counting)
    batch = make_batch(40, 24)
    run(memory, batch)
    return sum(seen) / (RAW["num_hidden_layers"] * batch.num_tokens)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_each_token_runs_twice_and_no_third_time(monkeypatch, checkpointing):
    memory = {"activation_checkpointing": checkpointing, "tiled_mlp": 16}
    assert forwards(monkeypatch, memory) == 2


def test_evidence(monkeypatch):
    config = make_config(memory={"tiled_mlp": 16})
    model = make_model()
    applied = apply_techniques(model, config)
    found = prove(applied, model, build_optimizer(model, config.train), config)["tiled_mlp"]
    assert found.text == "4 MLPs ran 16 of 64 tokens at a time"
    monkeypatch.setattr(TiledMLP, "on_model", lambda self, model: None)
    model = make_model()
    with pytest.raises(ValueError, match="tiled_mlp is asked for by memory.tiled_mlp"):
        applied = apply_techniques(model, config)
        prove(applied, model, build_optimizer(model, config.train), config)


def test_without_gradients_it_tiles_too():
    model, batch = make_model(**SHAPE), make_batch(40, 24)
    plain = model(batch).logprobs
    apply_techniques(model, make_config(memory={"tiled_mlp": 8}))
    with torch.no_grad(), Largest() as largest:
        tiled = model(batch).logprobs
    assert largest.rows == RAW["hidden_size"]  # of down_proj
    torch.testing.assert_close(tiled, plain, rtol=1e-6, atol=1e-6)
