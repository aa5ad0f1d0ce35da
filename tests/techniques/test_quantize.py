"""A base in few bits: its values and bytes, products, and LoRA over it on one rank and two."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from lean_trl.ops.quantized import BLOCK, Format, dequantize, quantize, quantized_linear
from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.quantize import QuantizedLinear
from lean_trl.techniques.trial import prove
from lean_trl.train.optim import build_optimizer

from ..ranks import on_ranks
from .matrix import fill_adapters
from .tiny import gradients, make_batch, make_config, make_model

pytest.importorskip("peft")
FORMATS = [("nf4", False), ("nf4", True), ("fp4", False), ("int8", False)]
QLORA = {"quantization": {"load_in_4bit": True}, "peft": {"target_modules": "all-linear", "r": 4}}


@pytest.mark.parametrize("width", [64, 130, 7])
@pytest.mark.parametrize("kind, double", FORMATS)
def test_values_are_near(kind, double, width):
    weight = torch.randn(6, width) * torch.logspace(-3, 1, 6)[:, None]
    form = Format(kind, width, double)
    again = dequantize(quantize(weight, form), form, torch.float32)
    assert again.shape == weight.shape
    blocks = weight.abs() if kind == "int8" else None
    gap = {"int8": 1 / 127, "nf4": 0.31, "fp4": 1 / 3}[kind]
    for row, near in zip(weight, again, strict=True):
        pieces = [row] if blocks is not None else row.split(BLOCK)
        nears = [near] if blocks is not None else near.split(BLOCK)
        for piece, other in zip(pieces, nears, strict=True):
            slack = 1.02 if double else 1.001
            assert (piece - other).abs().max() <= gap / 2 * slack * piece.abs().max() + (
                piece.abs().max() / 255 if double else 0
            )
    # What is quantised once is a fixed point.
    if not double:
        assert torch.equal(dequantize(quantize(again, form), form, torch.float32), again)


def test_nf4_is_that_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(32, 128)
    codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    form = Format("nf4", 128)
    ours = dequantize(quantize(weight, form), form, torch.float32)
    torch.testing.assert_close(ours, bnb.dequantize_4bit(codes, state), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind, double", FORMATS)
def test_products_are_those_of_the_dequantised_matrix(kind, double):
    form = Format(kind, 66, double)
    stored = quantize(torch.randn(10, 66), form)
    plain = dequantize(stored, form, torch.float32)
    x = torch.randn(5, 66, requires_grad=True)
    y = quantized_linear(x, stored, form, torch.ones(10))
    assert torch.equal(y, x @ plain.T + 1)
    dy = torch.randn(5, 10)
    assert torch.allclose(torch.autograd.grad(y, x, dy)[0], dy @ plain, atol=1e-6)


def qlora(section, batch, **sections):
    config = make_config(**QLORA | {"quantization": section} | sections)
    model = make_model(hidden_size=64, intermediate_size=96)
    around = apply_techniques(model, config)
    fill_adapters(model)
    with around():
        scores = model(batch)
        scores.logprobs.sum().backward()
    return model, scores.logprobs.detach(), gradients(model)


@pytest.mark.parametrize(
    "section",
    [{"load_in_4bit": True, "double_quant": True}, {"load_in_8bit": True}],
    ids=["nf4", "int8"],
)
def test_lora_over_it_is_lora_over_the_dequantised_model(section):
    batch = make_batch()
    model, logprobs, grads = qlora(section, batch)
    other = make_model(hidden_size=64, intermediate_size=96)
    for name, layer in model.named_modules():
        if isinstance(layer, QuantizedLinear):
            target = other.get_submodule(name.removesuffix(".base_layer"))
            target.weight.data.copy_(layer.weight)
    around = apply_techniques(other, make_config(peft=QLORA["peft"]))
    fill_adapters(other)
    with around():
        scores = other(batch)
        scores.logprobs.sum().backward()
    assert torch.allclose(logprobs, scores.logprobs, atol=1e-6)
    for name, grad in gradients(other).items():
        if grad is not None:
            torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-6)


def test_under_fsdp():
    batches = [make_batch(), make_batch(9, 21, seed=3)]
    expected = [qlora({"load_in_4bit": True}, batch) for batch in batches]

    def work(world):
        config = make_config(**QLORA, distributed={"sharding": "fsdp"})
        model = make_model(hidden_size=64, intermediate_size=96)
        around = apply_techniques(model, config)
        fill_adapters(model)
        with around():
            logprobs = model(batches[world.rank]).logprobs
            logprobs.sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        cut = model.blocks[0].mlp.up_proj.base_layer.codes
        assert isinstance(cut, DTensor) and cut.to_local().shape[0] == cut.shape[0] / 2
        return logprobs.detach(), {n: g.full_tensor() for n, g in grads.items()}

    for rank, (logprobs, grads) in enumerate(on_ranks(2, work)):
        assert torch.allclose(logprobs, expected[rank][1], atol=1e-6)
        for name, grad in grads.items():
            whole = expected[0][2][name] + expected[1][2][name]
            torch.testing.assert_close(grad, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "section, bytes_a_weight",
    [
        ({"load_in_4bit": True}, 0.5 + 4 / 64),
        ({"load_in_4bit": True, "double_quant": True}, 0.5 + 1 / 64 + 4 / 256),
        ({"load_in_8bit": True}, 1 + 4 / 256),
    ],
)
def test_evidence_and_bytes(section, bytes_a_weight):
    config = make_config(**QLORA | {"quantization": section})
    model = make_model(hidden_size=256, intermediate_size=256, num_key_value_heads=4)
    applied = apply_techniques(model, config)
    found = prove(applied, model, build_optimizer(model, config.train), config)["quantization"]
    assert found.amount == 7 * 4
    assert found.text.endswith(f"{bytes_a_weight:.3f} bytes a weight")


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"quantization": {"load_in_4bit": True}}, "set peft"),
        ({"quantization": {}, "peft": {}}, "one of load_in_4bit and load_in_8bit"),
        (
            {
                "quantization": {"load_in_4bit": True},
                "peft": {"init_lora_weights": "pissa"},
            },
            "takes a part out of the base",
        ),
        (
            {"quantization": {"load_in_8bit": True, "double_quant": True}, "peft": {}},
            "is for 4 bits",
        ),
    ],
)
def test_settings_at_odds(sections, message):
    with pytest.raises(ValueError, match=message):
        make_config(**sections)
