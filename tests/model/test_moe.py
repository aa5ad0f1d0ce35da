"""Experts: the grouped product, routing, what is counted, and the load-balancing loss."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lean_trl.data.batch import build_batch
from lean_trl.losses.router import expert_shares, router_aux_loss
from lean_trl.model import load_model, new_model
from lean_trl.ops.grouped_mm import grouped_mm
from lean_trl.types import Example

from .tiny import BASE, CONFIGS, make

MOE = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]


def loop(x, weight, ends, transposed):
    parts, begin = [], 0
    for matrix, end in zip(weight, ends.tolist(), strict=True):
        parts.append(x[begin:end] @ (matrix.t() if transposed else matrix))
        begin = end
    return torch.cat(parts)


# 16 bytes: 4 fp32 or 8 bf16 values. Sizes that are no multiple take the other path.
@pytest.mark.parametrize("sizes", [(16, 24), (5, 7), (16, 7), (1, 1)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 4, 5], [0, 0, 0, 12], [12, 0, 0, 0], [0, 0, 0, 0]])
def test_grouped_product(sizes, transposed, counts):
    size_in, size_out = sizes
    generator = torch.Generator().manual_seed(0)
    shape = (4, size_out, size_in) if transposed else (4, size_in, size_out)
    x = torch.randn(sum(counts), size_in, generator=generator, requires_grad=True)
    weight = torch.randn(shape, generator=generator, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    y = grouped_mm(x, weight, ends, transposed=transposed)
    expected = loop(x, weight, ends, transposed)
    torch.testing.assert_close(y, expected)
    grad = torch.randn(y.shape, generator=generator)
    got = torch.autograd.grad(y, (x, weight), grad)
    wanted = torch.autograd.grad(expected, (x, weight), grad)
    torch.testing.assert_close(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1])
    assert got[1].stride() == weight.stride()  # becomes .grad as it is


def test_grouped_product_in_fp64_has_the_right_gradient():
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda a, b: grouped_mm(a, b, ends), (x, weight))


def test_grouped_product_in_bf16_is_no_worse_than_a_loop():
    x = torch.randn(40, 64).bfloat16()
    weight = torch.randn(3, 64, 32).bfloat16()
    ends = torch.tensor([10, 10, 40], dtype=torch.int32)
    exact = loop(x.double(), weight.double(), ends, False)
    error = (grouped_mm(x, weight, ends).double() - exact).square().mean().sqrt()
    plain = (loop(x, weight, ends, False).double() - exact).square().mean().sqrt()
    assert error <= 1.05 * plain


def test_grouped_product_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        grouped_mm(torch.zeros(2, 3), torch.zeros(2, 4, 5), torch.tensor([1, 2]))


@pytest.mark.parametrize("family", MOE)
def test_runs_under_fake_tensors(family):
    """Forward and backward read nothing back and know every shape beforehand."""
    raw = BASE | CONFIGS[family] | {"model_type": family}
    batch = build_batch([Example(list(range(9))), Example([1, 2])], pad_to_multiple_of=16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = new_model(raw)
        scores = model(batch)
        (scores.logprobs.sum() + scores.router_probs.sum()).backward()
        assert scores.router_probs.shape == (model.config.moe.num_experts, 16)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name


@pytest.mark.parametrize("family", MOE)
def test_padding_is_routed_but_counts_nowhere(family):
    raw = BASE | CONFIGS[family] | {"model_type": family}
    model = new_model(raw, seed=1)
    examples = [Example([5, 6, 7]), Example([8, 9, 10, 11, 12])]
    plain = model(build_batch(examples))
    for layout in ({"padding_free": False}, {"pad_to_multiple_of": 32}):
        batch = build_batch(examples, **layout)
        padded = model(batch)
        assert batch.num_tokens > 8
        assert torch.equal(padded.expert_counts, plain.expert_counts)
        torch.testing.assert_close(padded.logprobs, plain.logprobs)
        real = padded.router_probs.sum(0) > 0.5
        assert real.sum() == 8
        torch.testing.assert_close(padded.router_probs[:, real], plain.router_probs)
        assert not padded.router_probs[:, ~real].any()
    num_sparse = sum(layer.sparse for layer in model.config.layers)
    assert plain.expert_counts.sum() == 8 * num_sparse * model.config.moe.top_k
    torch.testing.assert_close(plain.router_probs.sum(0), torch.ones(8))


def test_counts_in_a_tree_are_those_of_its_tokens():
    raw = BASE | CONFIGS["mixtral"] | {"model_type": "mixtral"}
    model = new_model(raw)
    scored = [False] * 4 + [True] * 3
    pair = [Example([1, 2, 3, 4, *tail], scored, group=0) for tail in ([5, 6, 7], [8, 9, 10])]
    tree = build_batch(pair, share_prefixes=True, pad_to_multiple_of=16)
    assert tree.num_real_tokens == 10 and tree.num_tokens == 16
    assert model(tree).expert_counts.sum() == 10 * 4 * 2
    torch.testing.assert_close(model(tree).logprobs, model(build_batch(pair)).logprobs)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_aux_loss_is_that_of_transformers(family, tmp_path):
    pytest.importorskip("transformers")
    peer = make(family, tmp_path)
    model = load_model(tmp_path)
    ids = torch.randint(0, 96, (2, 30), generator=torch.Generator().manual_seed(3))
    expected = peer(ids, output_router_logits=True).aux_loss
    scores = model(build_batch([Example(row.numpy()) for row in ids]))
    shares = expert_shares(scores.expert_counts, model.config.moe.top_k)
    values = router_aux_loss(scores.router_probs, shares)
    torch.testing.assert_close(values.mean(), expected, atol=1e-6, rtol=1e-5)
    gates = [name for name, _ in model.named_parameters() if name.endswith("mlp.gate.weight")]
    expected.backward()
    values.mean().backward()
    grads = {name: p.grad for name, p in peer.named_parameters()}
    for name in gates:
        grad = model.get_parameter(name).grad
        assert grads[name].abs().max() > 1e-5
        torch.testing.assert_close(grad, grads[name], atol=1e-6, rtol=1e-3)


def test_aux_loss_does_not_depend_on_the_cut_into_micro_batches():
    raw = BASE | CONFIGS["mixtral"] | {"model_type": "mixtral"}
    model = new_model(raw)
    examples = [Example(list(range(n, 3 * n))) for n in (3, 9, 5, 2)]

    def loss(cuts):
        batches = [build_batch(part) for part in cuts]
        scores = [model(batch) for batch in batches]
        shares = expert_shares(sum(s.expert_counts for s in scores), 2)
        total = sum(batch.num_real_tokens for batch in batches)
        return sum(router_aux_loss(s.router_probs, shares).sum() for s in scores) / total

    whole = loss([examples])
    assert whole >= 2  # top_k, reached by a perfect balance
    torch.testing.assert_close(loss([[each] for each in examples]), whole)
    torch.testing.assert_close(loss([examples[:1], examples[1:]]), whole)


def test_group_routing_by_hand():
    """Four experts in two groups, one group allowed: the groups' two best sums decide."""
    raw = BASE | CONFIGS["deepseek_v3"] | {"model_type": "deepseek_v3"}
    raw |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "hidden_size": 4}
    router = new_model(raw).blocks[1].mlp.gate
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
        router.e_score_correction_bias.zero_()
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.7]])  # groups: 1.0 and 1.3
    _, weights, experts = router(torch.logit(scores))
    assert sorted(experts[0].tolist()) == [2, 3]
    order = experts[0].argsort()
    torch.testing.assert_close(weights[0][order], 2.5 * torch.tensor([0.6, 0.7]) / 1.3)
    # The bias moves the choice, not the weight.
    with torch.no_grad():
        router.e_score_correction_bias[1] = 0.5
    _, weights, experts = router(torch.logit(scores))
    assert sorted(experts[0].tolist()) == [0, 1]
    torch.testing.assert_close(weights[0].sort().values, 2.5 * torch.tensor([0.1, 0.9]))


def mxfp4_checkpoint(folder):
    """A gpt-oss checkpoint whose experts are MXFP4, and the same one with plain weights."""
    from safetensors.torch import load_file, save_file

    make("gpt_oss", folder / "plain")
    tensors = load_file(folder / "plain" / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    packed = {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        num, size_in, size_out = tensor.shape
        blocks = torch.randint(0, 256, (num, size_out, size_in // 32, 16), generator=generator)
        scales = torch.randint(120, 127, (num, size_out, size_in // 32), generator=generator)
        packed[name + "_blocks"] = blocks.to(torch.uint8)
        packed[name + "_scales"] = scales.to(torch.uint8)
    (folder / "packed").mkdir()
    save_file(packed, folder / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "packed" / "config.json").write_text(json.dumps(config))
    return folder / "packed", packed


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    from lean_trl.model import save_model

    folder, packed = mxfp4_checkpoint(tmp_path)
    model = load_model(folder)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    expected = mxfp4.convert_moe_packed_tensors(
        packed[name + "_blocks"], packed[name + "_scales"], dtype=torch.bfloat16
    )
    assert torch.equal(model.get_parameter(name), expected.float())
    save_model(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = load_model(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_mxfp4_with_a_scale_that_is_not_a_number(tmp_path):
    from safetensors.torch import save_file

    folder, packed = mxfp4_checkpoint(tmp_path)
    packed["model.layers.2.mlp.experts.down_proj_scales"][1, 3] = 255
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.down_proj .*not finite"):
        load_model(folder)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "fp8"])
def test_other_quantised_checkpoints_are_refused(method, tmp_path):
    folder, _ = mxfp4_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=f"quantised \\({method}\\); of quantised checkpoints only"
    ):
        load_model(folder)


def test_whose_routers_are_balanced_by_a_loss():
    """DeepSeek-V3 balances by its correction bias: no loss unless its config.json asks for one."""
    coefs = {
        family: new_model(BASE | CONFIGS[family] | {"model_type": family}).config.moe.aux_loss_coef
        for family in MOE
    }
    assert coefs == {"mixtral": 0.001, "qwen3_moe": 0.001, "gpt_oss": 0.001, "deepseek_v3": 0.0}
