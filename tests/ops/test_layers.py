"""The layer ops against their textbook twins, transformers, and what they may keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lean_trl.ops.layers import (
    ACTIVATIONS,
    embedding,
    geglu,
    rms_norm,
    rms_norm_plain,
    rotary,
    rotary_plain,
    swiglu,
    swiglu_plain,
)

T, N, H, D, EPS = 7, 3, 8, 12, 1e-5


def randn(*shape: int, dtype=torch.float32, seed=0, grad=True) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng).to(dtype).requires_grad_(grad)


def angles(pairs: int = H // 2, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.linspace(0, 5, T * pairs, dtype=torch.float64).view(T, pairs)
    return angle.cos().to(dtype), angle.sin().to(dtype)


Op = Callable[..., Tensor]
# name -> (op, twin, inputs that need gradients)
CASES: dict[str, tuple[Op, Op, Callable[[torch.dtype], tuple[Tensor, ...]]]] = {
    "rms_norm": (
        lambda x, w: rms_norm(x, w, EPS),
        lambda x, w: rms_norm_plain(x, w, EPS),
        lambda dtype: (randn(T, D, dtype=dtype), randn(D, dtype=dtype, seed=1)),
    ),
    "rms_norm of heads": (
        lambda x, w: rms_norm(x, w, EPS),
        lambda x, w: rms_norm_plain(x, w, EPS),
        lambda dtype: (randn(T, N, H, dtype=dtype), randn(H, dtype=dtype, seed=1)),
    ),
    "rms_norm with offset": (
        lambda x, w: rms_norm(x, w, EPS, offset=1.0),
        lambda x, w: rms_norm_plain(x, w, EPS, offset=1.0),
        lambda dtype: (randn(T, D, dtype=dtype), randn(D, dtype=dtype, seed=1)),
    ),
    "rotary": (
        lambda x: rotary(x, *angles()),
        lambda x: rotary_plain(x, *angles(dtype=torch.float64)),
        lambda dtype: (randn(T, N, H, dtype=dtype),),
    ),
    "partial rotary": (
        lambda x: rotary(x, *angles(3)),
        lambda x: rotary_plain(x, *angles(3, torch.float64)),
        lambda dtype: (randn(T, N, H, dtype=dtype),),
    ),
    "interleaved rotary": (
        lambda x: rotary(x, *angles(), interleaved=True),
        lambda x: rotary_plain(x, *angles(dtype=torch.float64), interleaved=True),
        lambda dtype: (randn(T, N, H, dtype=dtype),),
    ),
    **{
        f"swiglu {name}": (
            lambda gate, up, name=name: swiglu(gate, up, activation=name),
            lambda gate, up, name=name: swiglu_plain(gate, up, activation=name),
            lambda dtype: (randn(T, D, dtype=dtype), randn(T, D, dtype=dtype, seed=1)),
        )
        for name in ACTIVATIONS
    },
}


def outputs(op: Op, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The result and the gradients under a fixed upstream gradient."""
    out = op(*inputs)
    grads = torch.autograd.grad(out, inputs, randn(*out.shape, seed=9, grad=False).to(out.dtype))
    return [out.detach(), *grads]


def rms(error: Tensor) -> float:
    return error.double().square().mean().sqrt().item()


@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case):
    op, twin, make = CASES[case]
    inputs = make(torch.float64)
    if "rotary" in case:  # fp64 angles too: those of the case are fp32 on purpose
        op = twin_angles(case)
    assert gradcheck(op, inputs)
    for got, expected in zip(outputs(op, inputs), outputs(twin, inputs), strict=True):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


def twin_angles(case: str) -> Op:
    pairs = 3 if case.startswith("partial") else H // 2
    cos, sin = angles(pairs, torch.float64)
    return lambda x: rotary(x, cos, sin, interleaved=case.startswith("interleaved"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 2.0), (torch.bfloat16, 1.05)])
def test_error_against_fp64_is_no_worse_than_the_plain_formula(case, dtype, factor):
    op, twin, make = CASES[case]
    inputs = make(dtype)
    exact = outputs(twin, tuple(t.detach().double().requires_grad_() for t in inputs))
    for reference, ours, plain in zip(
        exact, outputs(op, inputs), outputs(twin, inputs), strict=True
    ):
        assert ours.dtype == dtype
        assert rms(ours - reference) <= factor * rms(plain - reference)


@pytest.mark.parametrize("case", CASES)
def test_each_gradient_alone(case):
    op, _, make = CASES[case]
    together = outputs(op, make(torch.float32))[1:]
    for i, expected in enumerate(together):
        inputs = make(torch.float32)
        for j, leaf in enumerate(inputs):
            leaf.requires_grad_(i == j)
        out = op(*inputs)
        out.backward(randn(*out.shape, seed=9, grad=False))
        assert torch.equal(inputs[i].grad, expected)
        assert all(leaf.grad is None for j, leaf in enumerate(inputs) if i != j)


@pytest.mark.parametrize("case", CASES)
def test_twice_under_activation_checkpointing(case):
    op, _, make = CASES[case]
    inputs = make(torch.float32)

    def twice(*inputs: Tensor) -> Tensor:
        return op(torch.tanh(op(*inputs)), *inputs[1:])

    got = outputs(lambda *inputs: checkpoint(twice, *inputs, use_reentrant=False), inputs)
    for a, b in zip(got, outputs(twice, inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", CASES)
def test_views_of_a_fused_projection(case):
    """The pieces of one big matmul are strided; gradients may be expanded."""
    op, _, make = CASES[case]
    inputs = make(torch.float32)
    first = inputs[0].detach()
    wide = torch.cat((first, torch.zeros_like(first)), -1)[..., : first.shape[-1]].requires_grad_()
    assert not wide.is_contiguous()
    for a, b in zip(outputs(op, (wide, *inputs[1:])), outputs(op, inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-6)  # another vector width rounds otherwise
    got = torch.autograd.grad(op(wide, *inputs[1:]).sum(), wide)
    expected = torch.autograd.grad(op(*inputs).sum(), inputs[0])
    assert torch.allclose(got[0], expected[0], atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_no_tokens(case):
    op, _, make = CASES[case]
    inputs = make(torch.float32)
    empty = inputs[0].detach()[:0].requires_grad_()
    if "swiglu" in case:
        rest = (inputs[1].detach()[:0],)
    elif "rotary" in case:
        return  # cos and sin have one row a token: the next test
    else:
        rest = inputs[1:]
    out = op(empty, *rest)
    out.sum().backward()
    assert out.shape == empty.shape == empty.grad.shape


def test_rotary_of_no_tokens():
    x = torch.empty(0, N, H, requires_grad=True)
    rotary(x, torch.empty(0, 4), torch.empty(0, 4)).sum().backward()
    assert x.grad.shape == (0, N, H)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_runs_without_reading_a_tensor_back(case, dtype):
    op, _, make = CASES[case]
    shapes = [t.shape for t in make(dtype)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = tuple(torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes)
        op(*inputs).sum().backward()
        assert [t.grad.shape for t in inputs] == shapes


# -- what is kept for the backward pass ------------------------------------------------------------


def kept_bytes(op: Op, inputs: tuple[Tensor, ...]) -> int:
    """Bytes of distinct storages saved for the backward pass."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = op(*inputs)
    del out
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_bytes(dtype):
    size, tokens, width = dtype.itemsize, 64, 128
    x, gate, up = (randn(tokens, width, dtype=dtype, seed=i) for i in range(3))
    weight = randn(width, dtype=dtype)
    matrix, row = tokens * width * size, width * size
    assert kept_bytes(lambda *a: rms_norm(*a, EPS), (x, weight)) == matrix + row + tokens * 4
    assert kept_bytes(lambda *a: rms_norm(*a, EPS, offset=1.0), (x, weight)) == (
        matrix + row + tokens * 4
    )
    for name in ACTIVATIONS:
        assert kept_bytes(lambda *a, name=name: swiglu(*a, activation=name), (gate, up)) == (
            2 * matrix
        )
    cos, sin = torch.zeros(2, tokens, 16).unbind()
    heads = x.view(tokens, 4, 32)
    # Two views of one storage; queries and keys of all layers share it.
    assert kept_bytes(lambda x: rotary(x, cos, sin), (heads,)) == 2 * tokens * 16 * 4
    ids = torch.zeros(tokens, dtype=torch.int64)
    assert kept_bytes(lambda w: embedding(ids, w), (x,)) == tokens * 8


def test_the_plain_formulas_keep_more():
    """What the ops are for: 2 bytes against 6 a token and channel for the norm, 4 against 6."""
    tokens, width = 64, 128
    x, gate, up = (randn(tokens, width, dtype=torch.bfloat16, seed=i) for i in range(3))
    weight = randn(width, dtype=torch.bfloat16)
    assert kept_bytes(lambda *a: rms_norm_plain(*a, EPS), (x, weight)) >= 6 * x.numel()
    assert kept_bytes(lambda *a: swiglu_plain(*a), (gate, up)) == 6 * x.numel()


# -- by hand, and against transformers -------------------------------------------------------------


def test_rotary_turns_by_the_angle():
    """Complex multiplication by exp(i angle), pair by pair."""
    x = randn(T, N, H, dtype=torch.float64, grad=False)
    cos, sin = angles(dtype=torch.float64)
    turn = torch.complex(cos, sin)[:, None]
    expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn)
    got = rotary(x, cos, sin, interleaved=True)
    assert torch.allclose(got, expected.flatten(-2), atol=1e-12)
    halves = torch.complex(x[..., :4], x[..., 4:]) * turn
    assert torch.allclose(
        rotary(x, cos, sin), torch.cat((halves.real, halves.imag), -1), atol=1e-12
    )


def test_partial_rotary_passes_the_rest():
    x = randn(T, N, H, grad=False)
    assert torch.equal(rotary(x, *angles(3))[..., 6:], x[..., 6:])


def test_geglu_by_hand():
    """0.5 g (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) u at g = 1, u = 2."""
    expected = 1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715)
    assert geglu(torch.tensor(1.0), torch.tensor(2.0)).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_transformers(dtype):
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    gemma = pytest.importorskip("transformers.models.gemma2.modeling_gemma2")
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    x = randn(T, 32, dtype=dtype, grad=False)
    weight = randn(32, dtype=dtype, seed=1, grad=False)
    for module, offset in (
        (llama.LlamaRMSNorm(32, EPS), 0.0),
        (gemma.Gemma2RMSNorm(32, EPS), 1.0),
    ):
        module.weight.data = weight
        expected = module(x).detach()
        assert expected.dtype == dtype
        assert (rms_norm(x, weight, EPS, offset=offset) - expected).abs().max() <= tolerance

    q, k = (randn(T, n, H, dtype=dtype, seed=n, grad=False) for n in (3, 1))
    cos, sin = angles(dtype=dtype)
    double = [torch.cat((t, t), -1)[None] for t in (cos, sin)]
    expected = llama.apply_rotary_pos_emb(q[None], k[None], *double, unsqueeze_dim=2)
    for got, (want,) in zip((rotary(q, cos, sin), rotary(k, cos, sin)), expected, strict=True):
        assert (got - want).abs().max() <= tolerance


# -- embedding -------------------------------------------------------------------------------------


def test_embedding_gradient_adds_repeats():
    ids, weight = torch.tensor([2, 0, 2, 2]), randn(4, 3)
    upstream = randn(4, 3, seed=1, grad=False)
    out = embedding(ids, weight)
    assert torch.equal(out, weight[ids])
    out.backward(upstream)
    expected = torch.stack(
        (upstream[1], torch.zeros(3), upstream[0] + upstream[2] + upstream[3], torch.zeros(3))
    )
    assert torch.allclose(weight.grad, expected, atol=1e-6)


@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
def test_embedding_grad_into_accumulates(buffer_dtype):
    ids, weight = torch.tensor([[2, 0], [2, 2]]), randn(4, 3, dtype=torch.bfloat16)
    upstream = randn(2, 2, 3, dtype=torch.bfloat16, seed=1, grad=False)
    buffer = torch.ones(4, 3, dtype=buffer_dtype)
    for _ in range(2):
        embedding(ids, weight, grad_into=buffer).backward(upstream)
    assert weight.grad is None
    exact = weight.detach().double().requires_grad_()
    F.embedding(ids, exact).backward(upstream.double())
    tolerance = 1e-6 if buffer_dtype == torch.float32 else 0.05
    assert (buffer.double() - (1 + 2 * exact.grad)).abs().max() <= tolerance


def test_frozen_embedding_leaves_the_buffer_alone():
    weight, buffer = randn(4, 3, grad=False), torch.ones(4, 3)
    scale = torch.ones(3, requires_grad=True)
    (embedding(torch.tensor([1]), weight, grad_into=buffer) * scale).sum().backward()
    assert torch.equal(buffer, torch.ones(4, 3))


def test_embedding_same_bits_every_time():
    ids = torch.randint(0, 5, (4000,), generator=torch.Generator().manual_seed(0))
    upstream = randn(4000, 8, seed=1, grad=False)

    def run(into: bool) -> Tensor:
        weight = randn(5, 8)
        buffer = torch.zeros(5, 8) if into else None
        embedding(ids, weight, grad_into=buffer).backward(upstream)
        return weight.grad if buffer is None else buffer

    for into in (False, True):
        assert torch.equal(run(into), run(into))


def test_embedding_without_reading_a_tensor_back():
    with FakeTensorMode():
        ids, weight = torch.zeros(5, dtype=torch.int64), torch.zeros(4, 3, requires_grad=True)
        embedding(ids, weight, grad_into=torch.zeros(4, 3)).sum().backward()
        assert weight.grad is None
        embedding(ids, weight).sum().backward()
        assert weight.grad.shape == (4, 3)
