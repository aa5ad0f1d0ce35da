"""linear_logprobs against materialised logits, closed forms and its own promises."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lean_trl.ops.linear_logprobs_torch as backend
from lean_trl.ops import linear_logprobs
from lean_trl.ops.linear_logprobs import linear_logprobs_plain
from lean_trl.types import WANT, Scores

N, D, V, IGNORED = 37, 32, 131, 12


@pytest.fixture
def small_tiles(monkeypatch):
    """Several row chunks and several vocabulary slices, both uneven."""
    monkeypatch.setattr(backend, "WORKSPACE_BYTES", {"cpu": 4 * 500, "cuda": 4 * 500})
    monkeypatch.setattr(backend, "MAX_ROWS", 10)


def problem(dtype=torch.float32, n=N, d=D, v=V, seed=0):
    """hidden [n, d], weight [v, d], bias [v] as leaves; targets [n]."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=rng).to(dtype).requires_grad_()
    weight = (torch.randn(v, d, generator=rng) * 0.3).to(dtype).requires_grad_()
    bias = torch.randn(v, generator=rng).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=rng)
    return hidden, weight, bias, targets


def ignore_some(targets: Tensor, count: int = IGNORED) -> Tensor:
    targets = targets.clone()
    targets[torch.randperm(len(targets), generator=torch.Generator().manual_seed(3))[:count]] = -100
    return targets


def weighted_loss(scores: Scores, entropy: bool = True) -> Tensor:
    """A loss in which every unit has its own upstream gradients."""
    rng = torch.Generator().manual_seed(7)
    g, h = torch.randn(2, len(scores.logprobs), generator=rng, dtype=torch.float64)
    loss = (scores.logprobs.double() * g).sum()
    return loss + (scores.entropy.double() * h).sum() if entropy else loss


def assert_close(got: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Within tolerance of the largest expected entry (or of 1)."""
    assert got is not None and expected is not None
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if got.numel():
        scale = max(1.0, expected.abs().max().item())
        assert (got - expected).abs().max().item() <= tolerance * scale


# -- an adapter on the head ----------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["adapter", "all"])
@pytest.mark.parametrize("softcap, temperature", [(None, 1.0), (20.0, 0.7)])
def test_adapter_is_a_low_rank_change_of_the_weight(small_tiles, trained, softcap, temperature):
    """Scores and every gradient as with the weight W + s B A, which is never made."""
    hidden, weight, bias, targets = problem()
    targets = targets[:20]
    rows = torch.arange(20) // 2  # repeated rows
    rng = torch.Generator().manual_seed(5)
    a, b = (torch.randn(s, generator=rng).requires_grad_() for s in ((4, D), (V, 4)))
    weight.requires_grad_(trained == "all")
    leaves = [leaf for leaf in (hidden, weight, a, b) if leaf.requires_grad]
    options = dict(bias=bias.detach(), softcap=softcap, temperature=temperature, want=WANT)
    low = 0.5 * hidden @ a.t()
    scores = linear_logprobs(hidden, weight, targets, rows, adapter=(low, b), **options)
    folded = linear_logprobs_plain(hidden, weight + 0.5 * b @ a, targets, rows, **options)
    assert_close(scores.logprobs, folded.logprobs, 1e-6)
    assert torch.equal(scores.top1, folded.top1)
    got = torch.autograd.grad(weighted_loss(scores), leaves)
    for each, expected in zip(got, torch.autograd.grad(weighted_loss(folded), leaves), strict=True):
        assert expected.abs().max() > 1e-3
        assert_close(each, expected, 2e-6)


def test_adapter_of_bf16_hidden_states():
    hidden, weight, _, targets = problem(torch.bfloat16)
    rng = torch.Generator().manual_seed(5)
    low, up = (torch.randn(s, generator=rng).requires_grad_() for s in ((N, 4), (V, 4)))
    scores = linear_logprobs(hidden, weight, targets, adapter=(low, up), want=("entropy",))
    plain = linear_logprobs_plain(
        hidden.float(), weight.float(), targets, adapter=(low, up), want=("entropy",)
    )
    assert_close(scores.logprobs, plain.logprobs, 1e-2)
    leaves = (low, up)
    got = torch.autograd.grad(weighted_loss(scores), leaves)
    for each, expected in zip(got, torch.autograd.grad(weighted_loss(plain), leaves), strict=True):
        assert_close(each, expected, 2e-2)


# -- closed forms ----------------------------------------------------------------------------------


def test_three_logits_by_hand():
    hidden, weight = torch.tensor([[2.0, 1.0, 0.0]]).repeat(3, 1), torch.eye(3)
    scores = linear_logprobs(hidden, weight, torch.tensor([0, 1, 2]), want=WANT)
    assert scores.logprobs.tolist() == pytest.approx([-0.407606, -1.407606, -2.407606], abs=1e-6)
    assert scores.entropy.tolist() == pytest.approx([0.832396] * 3, abs=1e-6)
    assert scores.log_sum_sq.tolist() == pytest.approx([-0.672280] * 3, abs=1e-6)
    assert scores.top1.tolist() == [True, False, False]
    cold = linear_logprobs(hidden, weight, torch.tensor([0, 1, 2]), temperature=0.5)
    assert cold.logprobs.tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)


def test_order_is_scale_then_softcap_then_temperature():
    """30 tanh(0.5 (2 + 1) / 30) / 0.5 for token 0, 0 for the other."""
    hidden, weight, bias = (
        torch.tensor([[1.0]]),
        torch.tensor([[2.0], [0.0]]),
        torch.tensor([1.0, 0]),
    )
    scores = linear_logprobs(
        hidden, weight, torch.tensor([0]), bias=bias, scale=0.5, softcap=30.0, temperature=0.5
    )
    z = 30 * math.tanh(0.5 * 3 / 30) / 0.5
    assert scores.logprobs.item() == pytest.approx(-math.log1p(math.exp(-z)), abs=1e-6)


def test_gradient_by_hand():
    """At logits 0, 0 with target 0: g (1/2, -1/2) of logprob, 0 of the entropy (it is maximal)."""
    hidden = torch.zeros(1, 2, requires_grad=True)
    scores = linear_logprobs(hidden, torch.eye(2), torch.tensor([0]), want=("entropy",))
    (3 * scores.logprobs + 5 * scores.entropy).sum().backward()
    assert hidden.grad.tolist() == [pytest.approx([1.5, -1.5], abs=1e-6)]


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_tie_with_an_earlier_token_is_wrong(monkeypatch, slices):
    """All logits equal: only token 0 is top-1, whether or not the tie crosses a slice."""
    room = {"cpu": 4 * 4 * (4 // slices), "cuda": 0}
    monkeypatch.setattr(backend, "WORKSPACE_BYTES", room)
    scores = linear_logprobs(torch.ones(4, 1), torch.ones(4, 1), torch.arange(4), want=("top1",))
    assert scores.top1.tolist() == [True, False, False, False]


# -- CASES: chunked cross-entropy is exact ---------------------------------------------------------

VARIANTS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.5},
    "softcap": {"softcap": 30.0},
    "temperature": {"temperature": 0.7},
    "row temperature": {"temperature": "rows"},
    "everything": {"bias": True, "scale": 0.5, "softcap": 3.0, "temperature": "rows"},
}


def settings_of(variant: str, bias: Tensor) -> dict:
    settings = dict(VARIANTS[variant])
    if "bias" in settings:
        settings["bias"] = bias
    if settings.get("temperature") == "rows":
        settings["temperature"] = torch.linspace(0.5, 2.0, N)
    return settings


@pytest.mark.parametrize("chunk_size", [1, 7, 25, 64])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_cross_entropy_is_exact(small_tiles, variant, chunk_size, dtype):
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    hidden, weight, bias, targets = problem(dtype)
    targets = ignore_some(targets)
    settings = settings_of(variant, bias)
    inputs = (hidden, weight, bias) if "bias" in settings else (hidden, weight)

    scores = linear_logprobs(hidden, weight, targets, want=WANT, chunk_size=chunk_size, **settings)
    plain = linear_logprobs_plain(hidden, weight, targets, want=WANT, **settings)
    for name in ("logprobs", "entropy", "log_sum_sq"):
        assert_close(getattr(scores, name), getattr(plain, name), 3 * tolerance)
    if dtype == torch.float32:
        assert torch.equal(scores.top1, plain.top1)

    loss = -scores.logprobs.sum() / (N - IGNORED)
    expected = -plain.logprobs.sum() / (N - IGNORED)
    assert_close(loss, expected, tolerance)
    grads = torch.autograd.grad(loss, inputs)
    for got, want in zip(grads, torch.autograd.grad(expected, inputs), strict=True):
        assert_close(got, want, tolerance)
    assert torch.equal(grads[0][targets == -100], torch.zeros(IGNORED, D, dtype=dtype))


def test_agrees_with_torch_cross_entropy():
    hidden, weight, bias, targets = problem()
    targets = ignore_some(targets)
    loss = -linear_logprobs(hidden, weight, targets, bias=bias).logprobs.sum() / (N - IGNORED)
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, ignore_index=-100)
    assert_close(loss, expected, 1e-6)


def test_all_ignored():
    hidden, weight, bias, targets = problem()
    scores = linear_logprobs(hidden, weight, targets.fill_(-100), bias=bias, want=WANT)
    assert not scores.top1.any()
    for values in (scores.logprobs, scores.entropy, scores.log_sum_sq):
        assert torch.equal(values, torch.zeros(N))
    weighted_loss(scores).backward()
    for leaf in (hidden, weight, bias):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_tied_weight(small_tiles):
    """The head's matrix is the embedding too: both gradients meet."""
    _, weight, _, targets = problem()
    ids = targets.roll(1)

    def loss(op) -> Tensor:
        return -op(torch.tanh(F.embedding(ids, weight)), weight, targets).logprobs.mean()

    got = torch.autograd.grad(loss(linear_logprobs), weight)
    expected = torch.autograd.grad(loss(linear_logprobs_plain), weight)
    assert_close(got[0], expected[0], 1e-6)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7, "rows"])
@pytest.mark.parametrize("repeated", [False, True])
def test_gradcheck(small_tiles, softcap, temperature, repeated):
    hidden, weight, bias, targets = problem(torch.float64, n=11, d=2, v=31)
    rows = torch.tensor([0, 10, 5, 5, 5, 3, 0, 7]) if repeated else None
    targets = targets[:8] if repeated else ignore_some(targets, 4)
    if temperature == "rows":
        temperature = torch.linspace(0.5, 2.0, 11, dtype=torch.float64)

    def f(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        scores = linear_logprobs(
            *inputs[:2],
            targets,
            rows,
            bias=inputs[2],
            temperature=temperature,
            softcap=softcap,
            scale=0.5,
            want=("entropy",),
        )
        return scores.logprobs, scores.entropy

    assert gradcheck(f, (hidden, weight, bias))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("alone", ["hidden", "weight", "bias"])
def test_each_gradient_alone(small_tiles, alone, entropy):
    """Asking for one gradient gives what asking for all gives."""

    def grads(names: set[str]) -> dict[str, Tensor | None]:
        hidden, weight, bias, targets = problem()
        leaves = {"hidden": hidden, "weight": weight, "bias": bias}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name in names)
        scores = linear_logprobs(hidden, weight, targets, bias=bias, softcap=3.0, want=("entropy",))
        weighted_loss(scores, entropy).backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    together, single = grads({"hidden", "weight", "bias"}), grads({alone})
    for name, grad in single.items():
        assert torch.equal(grad, together[name]) if name == alone else grad is None


def test_entropy_alone_has_a_gradient():
    hidden, weight, _, targets = problem()
    got, expected = (
        torch.autograd.grad(op(hidden, weight, targets, want=("entropy",)).entropy.sum(), hidden)
        for op in (linear_logprobs, linear_logprobs_plain)
    )
    assert_close(got[0], expected[0], 1e-6)


def test_log_sum_sq_and_top1_carry_no_gradient():
    hidden, weight, _, targets = problem()
    scores = linear_logprobs(hidden, weight, targets, want=WANT)
    assert scores.logprobs.requires_grad and scores.entropy.requires_grad
    assert not scores.log_sum_sq.requires_grad and not scores.top1.requires_grad


def test_work_is_two_passes_and_no_more():
    """2 N D V for the forward pass, as much again for each of recompute, d hidden, d weight."""
    unit = 2 * N * D * V

    def flops(frozen: bool, backward: bool) -> int:
        hidden, weight, _, targets = problem()
        weight.requires_grad_(not frozen)
        with FlopCounterMode(display=False) as counter:
            scores = linear_logprobs(hidden, weight, targets)
            if backward:
                scores.logprobs.sum().backward()
        return counter.get_total_flops()

    assert flops(frozen=False, backward=False) == unit
    assert flops(frozen=False, backward=True) == 4 * unit
    assert flops(frozen=True, backward=True) == 3 * unit


def test_under_activation_checkpointing():
    hidden, weight, _, targets = problem()

    def f(hidden: Tensor) -> Tensor:
        scores = linear_logprobs(torch.tanh(hidden), weight, targets, want=("entropy",))
        return weighted_loss(scores)

    got = torch.autograd.grad(checkpoint(f, hidden, use_reentrant=False), (hidden, weight))
    for a, b in zip(got, torch.autograd.grad(f(hidden), (hidden, weight)), strict=True):
        assert torch.equal(a, b)


# -- grad_into -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "buffer_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_grad_into_accumulates(small_tiles, dtype, buffer_dtype):
    hidden, weight, _, targets = problem(dtype)
    linear_logprobs(hidden, weight, targets).logprobs.sum().backward()
    expected, hidden_grad = 1 + 2 * weight.grad.float(), hidden.grad
    weight.grad = hidden.grad = None

    buffer = torch.ones(V, D, dtype=buffer_dtype)
    for _ in range(2):
        hidden.grad = None
        scores = linear_logprobs(hidden, weight, targets, grad_into=buffer)
        scores.logprobs.sum().backward()
    assert weight.grad is None
    assert torch.equal(hidden.grad, hidden_grad)
    assert_close(buffer.float(), expected, 1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("into", [None, torch.float32, torch.bfloat16])
def test_matmuls_of_low_precision_into_fp32(small_tiles, monkeypatch, into):
    """The way of a GPU, whose matmuls take bf16 and return fp32; here they are imitated."""
    real_mm = torch.mm

    def mm(a: Tensor, b: Tensor, *, out_dtype=None, out=None) -> Tensor:
        if out_dtype is not None:
            assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == torch.float32
        return real_mm(a.float(), b.float(), out=out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(backend, "matmul_dtype", lambda hidden: hidden.dtype)
    hidden, weight, bias, targets = problem(torch.bfloat16)
    rows = torch.tensor([4, 4, 9, 30, 2])
    settings = {"bias": bias, "softcap": 3.0, "temperature": 0.7, "want": ("entropy",)}
    buffer = None if into is None else torch.zeros(V, D, dtype=into)
    scores = linear_logprobs(hidden, weight, targets[:5], rows, grad_into=buffer, **settings)
    plain = linear_logprobs_plain(hidden, weight, targets[:5], rows, **settings)
    weighted_loss(scores).backward()
    got = (hidden.grad, bias.grad, weight.grad if buffer is None else buffer)
    expected = torch.autograd.grad(weighted_loss(plain), (hidden, bias, weight))
    assert_close(scores.logprobs, plain.logprobs, 1e-2)
    for a, b in zip(got, expected, strict=True):
        assert_close(a.float(), b.float(), 1e-2)


def test_fp32_buffer_of_a_low_precision_weight_is_not_rounded(small_tiles):
    hidden, weight, _, targets = problem(torch.bfloat16)
    buffer = torch.zeros(V, D)
    linear_logprobs(hidden, weight, targets, grad_into=buffer).logprobs.sum().backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    linear_logprobs_plain(*exact, targets).logprobs.sum().backward()
    assert_close(buffer, exact[1].grad.float(), 1e-6)


def test_frozen_weight_leaves_the_buffer_alone():
    hidden, weight, _, targets = problem()
    buffer = torch.ones(V, D)
    linear_logprobs(hidden, weight.detach(), targets, grad_into=buffer).logprobs.sum().backward()
    assert torch.equal(buffer, torch.ones(V, D))


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest storage that appears while it is on."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.bytes = max(self.bytes, storage.nbytes())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_weight_sized_buffer_and_no_logits(monkeypatch, dtype):
    hidden, weight, _, targets = problem(dtype, n=32, d=64, v=1024)
    workspace = 8192  # the whole logits would be 131072 bytes, a gradient of the weight 262144
    monkeypatch.setattr(backend, "WORKSPACE_BYTES", {"cpu": workspace, "cuda": workspace})
    buffer = torch.zeros(weight.shape)
    with LargestAllocation([hidden, weight, targets, buffer]) as largest:
        scores = linear_logprobs(hidden, weight, targets, grad_into=buffer, want=WANT)
        weighted_loss(scores).backward()
    # Besides tiles: row statistics of each slice, and fp32 rows of hidden or of a slice of weight.
    assert largest.bytes <= 4 * workspace


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1, 7])
@pytest.mark.parametrize("mode", ["auto", "pair", "none"])
def test_repeated_rows(small_tiles, mode, chunk_size):
    hidden, weight, bias, _ = problem()
    rng = torch.Generator().manual_seed(5)
    rows = torch.randint(0, N, (90,), generator=rng)
    targets = torch.randint(0, V, (90,), generator=rng)
    rows[:4], targets[:4] = 2, 9  # the same row and target more than once
    row_map = {"auto": "auto", "pair": torch.unique(rows, return_inverse=True), "none": None}[mode]
    temperature = torch.linspace(0.5, 2.0, N)
    settings = {"bias": bias, "softcap": 3.0, "temperature": temperature, "want": WANT}

    scores = linear_logprobs(
        hidden, weight, targets, rows, row_map=row_map, chunk_size=chunk_size, **settings
    )
    plain = linear_logprobs_plain(hidden, weight, targets, rows, **settings)
    for name in ("logprobs", "entropy", "log_sum_sq"):
        assert_close(getattr(scores, name), getattr(plain, name), 1e-6)
    assert torch.equal(scores.top1, plain.top1)
    leaves = (hidden, weight, bias)
    got = torch.autograd.grad(weighted_loss(scores), leaves)
    expected = torch.autograd.grad(weighted_loss(plain), leaves)
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, 1e-6)


def test_one_logits_row_per_distinct_row():
    hidden, weight, _, _ = problem()
    rows = torch.tensor([4, 4, 4, 9, 9, 30])
    with FlopCounterMode(display=False) as counter:
        linear_logprobs(hidden, weight, torch.zeros(6, dtype=torch.int64), rows)
    assert counter.get_total_flops() == 3 * 2 * D * V


def test_rows_that_nothing_is_predicted_from_get_zero_gradient():
    hidden, weight, _, targets = problem()
    rows = torch.tensor([3, 8])
    linear_logprobs(hidden, weight, targets[:2], rows).logprobs.sum().backward()
    assert hidden.grad[rows].abs().min(1).values.gt(0).all()
    hidden.grad[rows] = 0
    assert not hidden.grad.any()


@pytest.mark.parametrize("row_map", ["auto", None])
@pytest.mark.parametrize("into", [False, True])
def test_no_units(row_map, into):
    """A filler micro-batch: empty results, and a backward pass that gives zeros."""
    hidden, weight, bias, _ = problem()
    none = torch.empty(0, dtype=torch.int64)
    buffer = torch.ones(V, D) if into else None
    scores = linear_logprobs(
        hidden, weight, none, none, bias=bias, want=WANT, grad_into=buffer, row_map=row_map
    )
    for name in ("logprobs", *WANT):
        assert getattr(scores, name).shape == (0,)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros(N, D))
    assert torch.equal(bias.grad, torch.zeros(V))
    if into:
        assert weight.grad is None and torch.equal(buffer, torch.ones(V, D))
    else:
        assert torch.equal(weight.grad, torch.zeros(V, D))


# -- numerics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 2.0), (torch.bfloat16, 1.05)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_error_against_fp64_is_no_worse_than_the_plain_op(small_tiles, dtype, factor, softcap):
    hidden, weight, bias, targets = problem(dtype, n=64, v=257)
    settings = {"softcap": softcap, "temperature": 0.7, "want": ("entropy",)}

    def run(op, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias)]
        scores = op(*leaves[:2], targets, bias=leaves[2], **settings)
        grads = torch.autograd.grad(weighted_loss(scores), leaves)
        return [t.detach().double() for t in (scores.logprobs, scores.entropy, *grads)]

    exact = run(linear_logprobs_plain, torch.float64)
    ours, plain = run(linear_logprobs, dtype), run(linear_logprobs_plain, dtype)
    for reference, a, b in zip(exact, ours, plain, strict=True):
        rms = (b - reference).square().mean().sqrt()
        assert (a - reference).square().mean().sqrt() <= factor * rms


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_extreme_logits_stay_finite(offset):
    """Logits of +-1e4: a certain token has log-probability 0, the other -2e4, and no NaN."""
    hidden = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], requires_grad=True)
    weight = torch.tensor([[1e4, offset], [-1e4, offset]], requires_grad=True)
    scores = linear_logprobs(hidden, weight, torch.tensor([0, 0]), want=WANT)
    assert scores.logprobs.tolist() == [0.0, -2e4]
    assert scores.entropy.tolist() == [0.0, 0.0]
    assert scores.log_sum_sq.tolist() == [0.0, 0.0]
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert hidden.grad.tolist() == [[0.0, 0.0], [2e4, 0.0]]
    assert torch.isfinite(weight.grad).all()


def test_a_shared_offset_changes_nothing():
    """Adding 4096 to all logits keeps the rounding of the logits as the only error."""
    hidden, weight, _, targets = problem()
    hidden = (hidden.detach() * 16).round() / 16
    weight = (weight.detach() * 16).round() / 16
    scores = linear_logprobs(hidden, weight, targets, bias=torch.zeros(V), want=WANT)
    shifted = linear_logprobs(hidden, weight, targets, bias=torch.full((V,), 4096.0), want=WANT)
    # Products of sixteenths: logits + 4096 are exact to 1/256 at 24 bits.
    for name in ("logprobs", "entropy", "log_sum_sq"):
        assert_close(getattr(shifted, name), getattr(scores, name), 1e-6)


def test_same_bits_every_time(small_tiles):
    def run() -> list[Tensor]:
        hidden, weight, bias, targets = problem()
        scores = linear_logprobs(hidden, weight, targets, bias=bias, want=WANT)
        grads = torch.autograd.grad(weighted_loss(scores), (hidden, weight, bias))
        return [scores.logprobs, scores.entropy, scores.log_sum_sq, *grads]

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


# -- no host sync ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["no rows", "all differ", "map"])
def test_runs_without_reading_a_tensor_back(mode, dtype):
    with FakeTensorMode():
        hidden = torch.zeros(N, D, dtype=dtype, requires_grad=True)
        weight = torch.zeros(V, D, dtype=dtype, requires_grad=True)
        bias = torch.zeros(V, dtype=dtype, requires_grad=True)
        buffer, ids = torch.zeros(V, D), torch.zeros(N, dtype=torch.int64)
        rows = {} if mode == "no rows" else {"rows": ids, "row_map": None}
        if mode == "map":
            rows["row_map"] = (torch.zeros(5, dtype=torch.int64), ids)
        scores = linear_logprobs(
            hidden,
            weight,
            ids,
            bias=bias,
            temperature=torch.ones(N),
            softcap=3.0,
            want=WANT,
            grad_into=buffer,
            **rows,
        )
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
        for name in ("logprobs", *WANT):
            assert getattr(scores, name).shape == (N,)
        assert hidden.grad.shape == (N, D) and bias.grad.shape == (V,) and weight.grad is None


# -- errors ----------------------------------------------------------------------------------------


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 8)}, "flatten batch dimensions"),
        ({"hidden": torch.zeros(4, 7)}, "expected hidden"),
        ({"hidden": torch.zeros(4, 8, dtype=torch.bfloat16)}, "cast one of them"),
        ({"targets": ids(3)}, "3 targets for 4 rows of hidden"),
        ({"targets": torch.zeros(4)}, "targets must be a vector of int64"),
        ({"targets": ids(4, 1)}, "targets must be a vector"),
        ({"rows": ids(3)}, "4 targets for 3 rows"),
        ({"rows": torch.zeros(4)}, "rows must be a vector"),
        ({"rows": ids(4), "row_map": (ids(1), ids(3))}, "row_map's index"),
        ({"rows": ids(4), "row_map": "guess"}, "row_map must be"),
        ({"row_map": (ids(1), ids(4))}, "needs rows"),
        ({"bias": torch.zeros(4)}, r"bias must be \[5\]"),
        (
            {"adapter": (torch.zeros(N, 2), torch.zeros(V, 3))},
            r"adapter must be \(\[4, r\], \[5, r\]\), got \[37, 2\] and \[131, 3\]",
        ),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"temperature": torch.ones(3)}, "one float per row of hidden"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"want": ("entropi",)}, "want must be a tuple out of"),
        ({"want": "entropy"}, "want must be a tuple out of"),
        ({"grad_into": torch.zeros(5, 7)}, "grad_into must be"),
        ({"grad_into": torch.zeros(5, 8, dtype=torch.float16)}, "grad_into must be"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; known: auto, torch"),
    ],
)
def test_wrong_arguments_are_explained(change, message):
    arguments = {"hidden": torch.zeros(4, 8), "weight": torch.zeros(5, 8), "targets": ids(4)}
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**(arguments | change))


@pytest.mark.parametrize("target", [-1, 5])
def test_target_outside_the_vocabulary(target):
    with pytest.raises(RuntimeError, match=r"a target is outside \[0, 5\)"):
        linear_logprobs(torch.zeros(1, 8), torch.zeros(5, 8), torch.tensor([target]))


def test_ignore_label_is_for_whole_rows_only():
    """With rows, -100 is a mistake: say which rows to score instead."""
    with pytest.raises(RuntimeError, match="a target is outside"):
        linear_logprobs(torch.zeros(1, 8), torch.zeros(5, 8), torch.tensor([-100]), ids(1))
