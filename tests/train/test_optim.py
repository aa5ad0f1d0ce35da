"""Optimizers: states in few bits converge, take the bytes they promise, and know no ranks."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lean_trl.config import SettingsError
from lean_trl.data.batch import build_batch
from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.shard import Precision, shard_model
from lean_trl.techniques.trial import prove
from lean_trl.train.adafactor import Adafactor
from lean_trl.train.compact import CODECS, Blockwise, hash_noise, round_stochastically
from lean_trl.train.compact_adamw import CompactAdamW
from lean_trl.train.distributed import make_mesh
from lean_trl.train.methods import METHODS
from lean_trl.train.muon import Muon, orthogonal
from lean_trl.train.optim import OPTIMIZERS, build_optimizer
from lean_trl.train.step import count_totals, train_step
from lean_trl.types import Example

from ..ranks import on_ranks
from ..techniques.tiny import make_config, make_model

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
RATES = {"adafactor": (1e-2, 3e-2), "muon": (3e-3, 1e-2)}


def window(step):
    """Counting with a stride of 1 to 3, modulo the vocabulary: learnable in a minute."""
    rng = np.random.default_rng(step)
    first, stride = rng.integers(1, 60, 4), rng.integers(1, 4, 4)
    rows = [Example((a + s * np.arange(16)) % 64) for a, s in zip(first, stride, strict=True)]
    return [build_batch(rows)]


@cache
def losses(optimizer, rate, steps=60):
    config = make_config(train={"optimizer": optimizer, "learning_rate": rate})
    model = make_model(initializer_range=0.05, **SHAPE)
    built, method = build_optimizer(model, config.train), METHODS["sft"].bind(config.loss)
    found = []
    for step in range(steps):
        batches = window(step)
        report = train_step(
            model, batches, method, built, totals=count_totals(batches), max_grad_norm=1.0
        )
        found.append(report.loss.item())
    size = sum(t.nbytes for state in built.state.values() for t in state.values())
    return np.mean(found[-10:]), size / sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "optimizer, most_bytes", [("adamw_bf16_sr", 4.5), ("adamw_8bit", 2.8), ("adamw_4bit", 1.9)]
)
def test_few_bits_converge_like_many(optimizer, most_bytes):
    loss, size = losses(optimizer, 3e-3)
    plain, plain_size = losses("adamw", 3e-3)
    assert loss == pytest.approx(plain, rel=0.02)
    assert size < most_bytes < plain_size


@pytest.mark.parametrize("optimizer, most_bytes", [("adafactor", 0.2), ("muon", 4.5)])
def test_other_algorithms_are_no_worse(optimizer, most_bytes):
    results = [losses(optimizer, rate) for rate in RATES[optimizer]]
    assert min(loss for loss, _ in results) < 1.05 * losses("adamw", 3e-3)[0]
    assert results[0][1] < most_bytes


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "adamw"])
def test_evidence(optimizer):
    config = make_config(train={"optimizer": optimizer})
    model = make_model(hidden_size=128, intermediate_size=256)
    before = {name: p.clone() for name, p in model.named_parameters()}
    applied, built = apply_techniques(model, config), build_optimizer(model, config.train)
    found = prove(applied, model, built, config)["optimizer_state"]
    assert found.amount >= 3.9 and optimizer in found.text
    assert not built.state
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    # An optimizer that keeps two fp32 moments all the same is caught.
    plain = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match="optimizer_state is asked for by train.optimizer"):
        prove(applied, model, plain, config)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_make_no_difference(optimizer):
    """Two steps on cut parameters: rows are divided unevenly, and one rank may have none."""
    config = make_config(train={"optimizer": optimizer, "learning_rate": 1e-2})
    method = METHODS["sft"].bind(config.loss)
    shape = SHAPE | {"hidden_size": 72, "vocab_size": 65, "num_attention_heads": 9}
    shape["num_key_value_heads"] = 3

    def work(world):
        model = make_model(**shape)
        if world.size > 1:
            shard_model(model, make_mesh("fsdp", None, "cpu"), Precision())
        built = build_optimizer(model, config.train)
        for step in range(2):
            whole = window(step)
            mine = window(step) if world.rank == 0 else window(step + 7)
            totals = count_totals(whole * world.size)
            batches = mine if world.size > 1 else [*window(step), *window(step + 7)]
            totals = {unit: count * 2 // world.size for unit, count in totals.items()}
            train_step(
                model, batches, method, built, totals=totals, max_grad_norm=1.0, group=world.group
            )
        weights = {n: p.detach() for n, p in model.named_parameters()}
        return {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()}

    (one,) = on_ranks(1, work)
    for other in on_ranks(2, work):
        for name, weight in one.items():
            # Codes jump where rounding differs in the last bit: a few weights, by a small step.
            close = torch.isclose(weight, other[name], rtol=1e-4, atol=1e-5)
            share = close.float().mean().item()
            assert share == 1.0 if optimizer in ("adamw", "adafactor") else share > 0.98, name


def test_adafactor_is_that_of_transformers():
    peer = pytest.importorskip("transformers.optimization")
    if not hasattr(peer, "Adafactor"):
        pytest.skip("this version of transformers has none")
    weights = [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(7))]
    copies = [nn.Parameter(w.detach().clone()) for w in weights]
    ours = Adafactor([{"params": weights}], lr=0.02)
    theirs = peer.Adafactor(copies, lr=0.02, relative_step=False, scale_parameter=True)
    for _ in range(4):
        for weight, copy in zip(weights, copies, strict=True):
            weight.grad = torch.randn_like(weight)
            copy.grad = weight.grad.clone()
        ours.step()
        theirs.step()
    for weight, copy in zip(weights, copies, strict=True):
        torch.testing.assert_close(weight, copy, rtol=1e-5, atol=1e-6)


def test_muon_is_that_of_torch():
    weight = nn.Parameter(torch.randn(12, 20))
    copy = nn.Parameter(weight.detach().clone())
    group = {"params": [weight], "adamw": False, "weight_decay": 0.1}
    ours = Muon([group], lr=0.02, betas=(0.9, 0.99), eps=1e-8)
    theirs = torch.optim.Muon([copy], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        copy.grad = weight.grad.clone()
        ours.step()
        theirs.step()
    assert (weight - copy).abs().max() < 2e-3  # theirs multiplies in bf16


def test_orthogonal_of_a_stack_and_of_tall_matrices():
    stack = torch.randn(3, 20, 8)
    whole = orthogonal(stack)
    for one, matrix in zip(whole, stack, strict=True):
        torch.testing.assert_close(one, orthogonal(matrix), rtol=1e-4, atol=1e-5)
    values = torch.linalg.svdvals(whole)
    assert values.min() > 0.6 and values.max() < 1.2


# -- codes --


@pytest.mark.parametrize("codec", [c for pair in CODECS.values() for c in pair if c.bits < 16])
def test_codes_are_near_what_they_stand_for(codec):
    value = torch.randn(5, 301) * torch.logspace(-6, 2, 5)[:, None]
    value = value if codec.signed else value.square()
    state = codec.new(value)
    assert torch.equal(codec.load(state, 301), torch.zeros_like(value))
    codec.store(value, state, None)
    again = codec.load(state, 301)
    # Half the widest gap between two codes, which is the one at the block's maximum.
    gap = 1 - (1 - 1 / codec.levels) ** codec.power
    assert ((again - value).abs() <= 0.5 * gap * value.abs().amax(1, keepdim=True) * 1.01).all()
    assert (again.sign() * value.sign() >= 0).all()
    largest = value.abs() == value.abs().amax(1, keepdim=True)
    torch.testing.assert_close(again[largest], value[largest])
    if not codec.signed:
        assert (again[value > 0] > 0).all()


def test_width_that_is_odd_and_smaller_than_a_block():
    codec = Blockwise(4, True, 2, 64)
    value = torch.tensor([[1.0, -0.5, 0.25]])
    state = codec.new(value)
    codec.store(value, state, None)
    assert state["codes"].shape == (1, 2) and state["scales"].shape == (1, 1)
    assert codec.load(state, 3).shape == (1, 3)


def test_noise_is_uniform_and_a_matter_of_place():
    step = torch.tensor(3.0)
    noise = hash_noise(torch.empty(1000, 100), 0, step)
    assert noise.min() >= 0 and noise.max() < 2**16
    counts = torch.bincount((noise.flatten() >> 12).long(), minlength=16).double()
    assert ((counts - 6250).square() / 6250).sum() < 40  # chi square, 15 degrees of freedom
    part = hash_noise(torch.empty(10, 100), 500 * 100, step)
    assert torch.equal(part, noise[500:510])
    assert not torch.equal(noise, hash_noise(torch.empty(1000, 100), 0, step + 1))


def test_small_updates_reach_bf16_weights():
    """1000 steps of 1e-3 of a half ulp each: rounding to nearest would leave 1 as it is."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = CompactAdamW([weight], CODECS["adamw_8bit"], lr=4e-6, betas=(0.9, 0.99), eps=1e-8)
    for _ in range(1000):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(1 - 1000 * 4e-6, abs=3e-4)


def test_stochastic_rounding_keeps_what_bf16_can_hold():
    exact = torch.tensor([1.0, -2.5, 0.0, 2.0**-100, -(2.0**120)])
    for step in range(5):
        noise = hash_noise(exact, 0, torch.tensor(float(step)))
        assert torch.equal(round_stochastically(exact, noise), exact.bfloat16())


def test_bf16_parameters_need_an_optimizer_for_them():
    with pytest.raises(SettingsError, match="set float32, or train.optimizer adamw_bf16_sr"):
        make_config(train={"param_dtype": "bfloat16"}, model={"dtype": "bfloat16"})
    make_config(
        train={"param_dtype": "bfloat16", "optimizer": "adamw_4bit"}, model={"dtype": "bfloat16"}
    )


def test_vectors_keep_fp32():
    config = make_config(train={"optimizer": "adamw_4bit"})
    model = make_model(**SHAPE)
    built = build_optimizer(model, config.train)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    built.step()
    assert built.state[model.model.norm.weight]["exp_avg"].dtype == torch.float32
    codes = built.state[model.model.embed_tokens.weight]["exp_avg.codes"]
    assert codes.shape == (64, 32) and codes.dtype == torch.uint8
    assert math.prod(codes.shape) == 64 * 64 / 2
