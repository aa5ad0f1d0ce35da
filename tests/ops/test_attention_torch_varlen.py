"""The CUDA backend by imitation: kernels with torch's schema that compute what their arguments say.

Not covered: the kernels themselves (tests marked gpu run them where there is a GPU).
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lean_trl.ops import attention, attention_torch_varlen, varlen_attention
from lean_trl.ops.attention import BACKENDS, choose_backend
from lean_trl.ops.attention_base import Call
from lean_trl.ops.attention_torch_varlen import TORCH_VARLEN
from tests.ops.test_attention import dense, packed

FORWARD = torch.ops.aten._flash_attention_forward.default._schema
BACKWARD = torch.ops.aten._flash_attention_backward.default._schema


def bound(schema, args, kwargs) -> SimpleNamespace:
    """Arguments by the schema's names, every required one given and no unknown one."""
    positional = [a for a in schema.arguments if not a.kwarg_only]
    assert len(args) <= len(positional)
    given = dict(zip((a.name for a in positional), args, strict=False)) | kwargs
    assert set(given) <= {a.name for a in schema.arguments}
    missing = [a.name for a in schema.arguments if not a.has_default_value()]
    assert set(missing) <= set(given)
    return SimpleNamespace(**given)


def attend(a):
    """(out, lse, shares [N, T, T], k and v for every head) of FlashAttention's arguments: i sees j
    if i - left <= j <= i + right."""
    assert a.cum_seq_q.dtype == torch.int32 and torch.equal(a.cum_seq_q, a.cum_seq_k)
    assert a.max_q == a.max_k and a.dropout_p == 0.0
    for x in (a.query, a.key, a.value):
        assert x.stride(-1) == 1
    bounds, at = a.cum_seq_q.long(), torch.arange(len(a.query))
    tree = torch.bucketize(at, bounds[1:], right=True)
    ahead = at[None, :] - at[:, None]
    sees = tree[:, None] == tree[None, :]
    right = 0 if a.is_causal else a.window_size_right
    if right >= 0:
        sees = sees & (ahead <= right)
    if a.window_size_left >= 0:
        sees = sees & (ahead >= -a.window_size_left)
    k, v = (x.repeat_interleave(a.query.shape[1] // a.key.shape[1], 1) for x in (a.key, a.value))
    scores = torch.einsum("inh,jnh->nij", a.query, k) * a.scale
    scores = scores.masked_fill(~sees, -torch.inf)
    shares = scores.softmax(-1)
    return torch.einsum("nij,jnh->inh", shares, v), scores.logsumexp(-1), shares, k, v


def imitated_forward(*args, **kwargs):
    a = bound(FORWARD, args, kwargs)
    assert a.return_debug_mask is False
    out, lse, *_ = attend(a)
    nothing = torch.empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing


def imitated_backward(*args, **kwargs):
    a = bound(BACKWARD, args, kwargs)
    assert a.grad_out.stride(-1) == 1 and a.rng_state.dtype == torch.uint64
    out, lse, shares, k, v = attend(a)
    torch.testing.assert_close(out, a.out)
    torch.testing.assert_close(lse, a.logsumexp)
    inner = torch.einsum("inh,jnh->nij", a.grad_out, v)
    delta = (a.grad_out * out).sum(-1).t()[..., None]
    grad_scores = shares * (inner - delta) * a.scale
    grad_q = torch.einsum("nij,jnh->inh", grad_scores, k)
    grad_k = torch.einsum("nij,inh->jnh", grad_scores, a.query)
    grad_v = torch.einsum("nij,inh->jnh", shares, a.grad_out)
    heads = a.key.shape[1]
    return grad_q, *(x.unflatten(1, (heads, -1)).sum(2) for x in (grad_k, grad_v))


@pytest.fixture
def imitation(monkeypatch):
    monkeypatch.setattr(attention_torch_varlen, "_flash", imitated_forward)
    monkeypatch.setattr(attention_torch_varlen, "_flash_backward", imitated_backward)
    # Whatever device and dtype: only the mapping of arguments is tried here.
    anywhere = SimpleNamespace(
        forward=TORCH_VARLEN.forward, backward=TORCH_VARLEN.backward, supports=lambda *_: None
    )
    monkeypatch.setitem(attention.BACKENDS, "torch_varlen", anywhere)


@pytest.mark.parametrize("lengths", [[3, 1, 7, 2], [12], []])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("causal", [True, False])
def test_arguments_say_what_the_call_says(imitation, lengths, window, causal):
    q, k, v, bounds, _ = packed(lengths)
    options = {"causal": causal, "window": window, "scale": 0.3}
    out = varlen_attention(
        q, k, v, bounds.long(), max(lengths, default=0), backend="torch_varlen", **options
    )
    expected = dense(q, k, v, bounds, **options).to(out.dtype)
    torch.testing.assert_close(out, expected)
    # The gradient of a sum is an expanded scalar: the kernels must not see its strides of 0.
    got = torch.autograd.grad(out.sum(), (q, k, v))
    want = torch.autograd.grad(expected.sum(), (q, k, v))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), atol=1e-5, rtol=1e-4)


def on_cuda(dtype=torch.bfloat16, dim=64):
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(5, 4, dim))


CALL = Call(torch.tensor([0, 5]), None, None, None, 5, True, None, None, 0.125)


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


@pytest.mark.parametrize(
    "q, change, reason",
    [
        (on_cuda(torch.float32), {}, "not float32"),
        (on_cuda(dim=264), {}, "up to 256, not 264"),
        (on_cuda(dim=20), {}, "multiples of 8"),
        (on_cuda(), {"softcap": 30.0}, "no softcap"),
        (on_cuda(), {"sinks": torch.zeros(4)}, "no sinks"),
        (on_cuda(), {"end": torch.full((5,), 5)}, "no tree mask"),
        (torch.zeros(5, 4, 64), {}, "CUDA only, not on cpu"),
    ],
)
def test_refusals_name_the_reason(ampere, q, change, reason):
    assert reason in TORCH_VARLEN.supports(q, replace(CALL, **change))


def test_old_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0" in TORCH_VARLEN.supports(on_cuda(), CALL)


def test_it_leads_on_cuda_and_gives_way_when_it_cannot(ampere):
    assert choose_backend("auto", on_cuda(), CALL) == "torch_varlen"
    assert choose_backend("auto", on_cuda(), replace(CALL, window=3)) == "torch_varlen"
    assert choose_backend("auto", on_cuda(), replace(CALL, softcap=30.0)) == "math"
    assert choose_backend("auto", torch.zeros(5, 4, 64), CALL) == "sdpa"
    with pytest.raises(ValueError, match="CUDA only"):
        choose_backend("torch_varlen", torch.zeros(5, 4, 64), CALL)
    assert next(iter(BACKENDS)) == "torch_varlen"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 37])
def test_kernels_agree_with_the_equation(window):
    q, k, v, bounds, _ = packed([300, 1, 129, 64], heads=(8, 2), dim=64, dtype=torch.bfloat16)
    q, k, v = (x.detach().cuda().requires_grad_() for x in (q, k, v))
    out = varlen_attention(q, k, v, bounds.cuda(), 300, window=window, backend="torch_varlen")
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    cpu = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    expected = dense(*cpu, bounds, window=window)
    wanted = torch.autograd.grad(expected, cpu, upstream.cpu().double())
    for got, want in zip((out, *grads), (expected, *wanted), strict=True):
        error = (got.detach().cpu().double() - want.double()).norm() / want.double().norm()
        assert error < 8e-3  # bf16 rounds to 2^-9
