"""The attention op against a dense fp64 evaluation of its equation, and its promises to torch.

Not covered: speed (benchmarks/attention_segments.py).
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint

from lean_trl.ops import varlen_attention
from lean_trl.ops.attention import BACKENDS

CPU_BACKENDS = ("sdpa", "math")
# "apart" takes fewer calls once the trees of each length are gathered; "long" is views.
LENGTHS = {
    "apart": [2, 5, 2, 1, 5, 2, 5],
    "odd": [3, 1, 1, 2, 7, 3],
    "equal": [4, 4, 4],
    "long": [300, 1, 40, 40],
    "zero": [0, 3, 0],
    "empty": [],
}


def packed(lengths, heads=(4, 2), dim=8, dtype=torch.float32, seed=0, sinks=False):
    """q, k, v, bounds, sinks."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, n, dim, generator=generator).to(dtype).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    )
    sink = torch.randn(heads[0], generator=generator).to(dtype).requires_grad_() if sinks else None
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return q, k, v, bounds, sink


def dense(
    q, k, v, bounds, *, causal=True, window=None, softcap=None, sinks=None, scale=None, end=None
):
    """The equation over all T x T pairs at once, in fp64, a sink as one more column."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    at = torch.arange(len(q))
    tree = torch.bucketize(at, bounds.long()[1:], right=True)
    i, j = at[:, None], at[None, :]
    sees = tree[:, None] == tree[None, :]
    if causal:
        sees &= j <= i
    depth = at
    if end is not None:
        sees &= i < end.long()[None, :]
        depth = sees.sum(1)
    if window is not None:
        sees &= (depth[:, None] - depth[None, :]).abs() < window
    scores = torch.einsum("inh,jnh->nij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~sees, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], -1)
    return torch.einsum("nij,jnh->inh", scores.softmax(-1)[..., : len(q)], v)


def grads(out, inputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(out.shape, generator=generator).to(out.dtype)
    return torch.autograd.grad(out, inputs, upstream)


def compare(lengths, backend, heads=(4, 2), sinks=False, dtype=torch.float32, rtol=2e-6, **options):
    q, k, v, bounds, sink = packed(lengths, heads, dtype=dtype, sinks=sinks)
    inputs = [x for x in (q, k, v, sink) if x is not None]
    out = varlen_attention(
        q, k, v, bounds, max(lengths, default=0), sinks=sink, backend=backend, **options
    )
    expected = dense(q, k, v, bounds, sinks=sink, **options)
    assert out.shape == q.shape and out.dtype == dtype and out.is_contiguous()
    pairs = zip((out, *grads(out, inputs)), (expected, *grads(expected, inputs)), strict=True)
    for got, right in pairs:
        assert got.dtype == dtype
        scale = right.abs().max().clamp(min=1) if right.numel() else 1
        torch.testing.assert_close(got.double() / scale, right.double() / scale, rtol=0, atol=rtol)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 3},
        {"window": 1},
        {"window": 2, "causal": False},
        {"window": 200},
        {"sinks": True},
        {"sinks": True, "window": 2, "scale": 0.7},
    ],
    ids=str,
)
def test_backends_agree_with_the_equation(backend, name, options):
    compare(LENGTHS[name], backend, **options)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_head_counts(backend, heads):
    compare(LENGTHS["odd"], backend, heads=heads)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"sinks": True, "causal": False}], ids=str)
def test_softcap(options):
    compare(LENGTHS["odd"], "math", softcap=0.8, **options)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_float64_and_bfloat16(backend):
    compare(LENGTHS["odd"], backend, dtype=torch.float64, rtol=1e-13, sinks=True)
    compare(LENGTHS["odd"], backend, dtype=torch.bfloat16, rtol=2e-2, sinks=True)


def test_window_wider_than_the_kernels_own_blocks():
    """Rows whose first 512 keys are all hidden: no row may turn into 0 / 0."""
    compare([1300], "sdpa", heads=(2, 1), window=600, rtol=5e-6)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}], ids=str)
def test_more_threads_than_kv_heads(options):
    """One tree at a time, 1 and 3 kv heads on 2 threads: the path that splits kv heads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compare(LENGTHS["long"], "sdpa", heads=(4, 1), sinks=True, **options)
        compare(LENGTHS["long"], "sdpa", heads=(6, 3), **options)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_bfloat16_is_as_exact_as_plain_operations(backend):
    """rms error against fp64 of the output and of each gradient: at most 1.05 times theirs."""
    q, k, v, bounds, _ = packed([150], heads=(6, 2), dim=64, dtype=torch.bfloat16)
    upstream = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    hidden = torch.ones(150, 150, dtype=torch.bool).triu(1)

    def plain(q, k, v):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(3, 0) for x in (k, v))
        scores = (q @ k.mT * 64**-0.5).masked_fill(hidden, -torch.inf)
        return (scores.float().softmax(-1).bfloat16() @ v).transpose(0, 1)

    def ours(q, k, v):
        return varlen_attention(q, k, v, bounds, 150, backend=backend)

    def results(function, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        return out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))

    right = results(lambda *x: dense(*x, bounds), torch.float64)
    rows = zip(right, results(ours, q.dtype), results(plain, q.dtype), strict=True)
    for exact, got, reference in rows:
        error, allowed = ((x.double() - exact).square().mean().sqrt() for x in (got, reference))
        assert error <= 1.05 * allowed


def test_hand_worked():
    """Zero queries average what they see; a sink of ln 2 weighs as much as two keys."""
    q, v = torch.zeros(3, 1, 1), torch.tensor([2.0, 4.0, 7.0]).view(3, 1, 1)
    bounds = torch.tensor([0, 2, 3])
    for backend in CPU_BACKENDS:
        out = varlen_attention(q, q, v, bounds, 2, backend=backend)
        assert out.flatten().tolist() == pytest.approx([2, 3, 7])
        out = varlen_attention(q, q, v, bounds, 2, sinks=torch.tensor([2.0]).log(), backend=backend)
        assert out.flatten().tolist() == pytest.approx([2 / 3, 6 / 4, 7 / 3])


# A prompt of 3, a branch of 2 that forks again into 1 and 2, a branch of 1; then a tree of its own.
#   tokens  0 1 2 | 3 4 | 5 | 6 7 | 8   and   9 10
END = torch.tensor([9, 9, 9, 8, 8, 6, 8, 8, 9, 11, 11], dtype=torch.int32)
BOUNDS = torch.tensor([0, 9, 11], dtype=torch.int32)
DEPTH = torch.tensor([0, 1, 2, 3, 4, 5, 5, 6, 3, 0, 1])
PATHS = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6, 7], [0, 1, 2, 8], [9, 10]]


@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("positions", [DEPTH, None], ids=["given", "counted"])
def test_tree_equals_its_paths(window, positions):
    """Each root-to-leaf path alone gives the same outputs; gradients are sums over the paths."""
    q, k, v, _, sinks = packed([11], dtype=torch.float64, sinks=True)
    inputs = (q, k, v, sinks)
    options = {"window": window, "sinks": sinks, "softcap": 3.0}
    out = varlen_attention(q, k, v, BOUNDS, 9, end=END, positions=positions, **options)
    # A shared token answers once: its first path carries its upstream gradient.
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    got = torch.autograd.grad(out, inputs, upstream)
    total = [torch.zeros_like(x) for x in inputs]
    seen: set[int] = set()
    for path in PATHS:
        index = torch.tensor(path)
        alone = varlen_attention(
            q[index], k[index], v[index], torch.tensor([0, len(path)]), len(path), **options
        )
        torch.testing.assert_close(alone, out[index], rtol=1e-12, atol=1e-12)
        new = torch.tensor([token not in seen for token in path])
        seen.update(path)
        part = torch.autograd.grad(alone, inputs, upstream[index] * new[:, None, None])
        for whole, each in zip(total, part, strict=True):
            whole += each
    for a, b in zip(got, total, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_a_tree_without_branches_is_a_sequence():
    q, k, v, bounds, _ = packed(LENGTHS["odd"])
    end = torch.repeat_interleave(bounds[1:], bounds.diff())
    tree = varlen_attention(q, k, v, bounds, 7, end=end, window=2)
    plain = varlen_attention(q, k, v, bounds, 7, window=2, backend="math")
    assert torch.equal(tree, plain)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("window", [None, 2])
def test_sequences_do_not_see_each_other(backend, window):
    """Bit for bit: what a neighbour holds changes nothing, even where it is not a number."""
    q, k, v, bounds, _ = packed([5, 4, 6])
    options = {"window": window, "backend": backend}
    before = varlen_attention(q, k, v, bounds, 6, **options)
    with torch.no_grad():
        for x in (q, k, v):
            x[5:9] = torch.nan
    after = varlen_attention(q, k, v, bounds, 6, **options)
    kept = [*range(5), *range(9, 15)]
    assert torch.equal(before[kept], after[kept])
    for grad in torch.autograd.grad(after[kept].sum(), (q, k, v)):
        assert grad[kept].isfinite().all()


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_strided_inputs_and_expanded_gradient(backend):
    """q, k, v as slices of one tensor, tokens innermost, and the gradient of a sum (strides 0)."""
    fused = torch.randn(8, 8, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    q, k, v = (
        fused.permute(2, 0, 1)[:, :4],
        fused.permute(2, 0, 1)[:, 4:6],
        fused.permute(2, 0, 1)[:, 6:],
    )
    bounds = torch.tensor([0, 4, 9])
    (got,) = torch.autograd.grad(varlen_attention(q, k, v, bounds, 5, backend=backend).sum(), fused)
    (right,) = torch.autograd.grad(dense(q, k, v, bounds).sum(), fused)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)


def arguments(backend, *, sinks=True, tree=False, dtype=torch.float64, window=3, softcap=None):
    q, k, v, bounds, sink = packed([9, 2], dim=4, dtype=dtype, sinks=sinks)
    end, depth = (END, DEPTH) if tree else (None, None)
    return (q, k, v, bounds, end, depth, sink, 9, True, window, softcap, 0.5, backend)


CASES = {
    "sdpa": arguments("sdpa"),
    "sdpa-plain": arguments("sdpa", sinks=False, window=None),
    "math": arguments("math", softcap=2.0),
    "tree": arguments("math", tree=True, softcap=2.0),
}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name):
    args = CASES[name]
    torch.library.opcheck(torch.ops.lean.varlen_attention.default, args)
    with torch.no_grad():
        out, lse = torch.ops.lean.varlen_attention(*args)
        args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
        backward = torch.ops.lean.varlen_attention_backward.default
        torch.library.opcheck(backward, (out.clone(), *args[:3], out, lse, *args[3:]))


@pytest.mark.parametrize("name", CASES)
def test_gradcheck(name):
    q, k, v, bounds, end, depth, sinks, *rest = CASES[name]
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)

    def run(q, k, v, sinks=None):
        return torch.ops.lean.varlen_attention(q, k, v, bounds, end, depth, sinks, *rest)[0]

    assert torch.autograd.gradcheck(run, inputs)


def test_lse_is_the_log_of_the_whole_denominator():
    q, k, v, bounds, sinks = packed([1, 2], heads=(1, 1), sinks=True)
    for backend in CPU_BACKENDS:
        _, lse = torch.ops.lean.varlen_attention(
            q, k, v, bounds, None, None, sinks, 2, True, None, None, 1.0, backend
        )
        s = (q[:, 0] @ k[:, 0].T).detach()
        sink = sinks.detach()[0]
        right = [
            torch.stack([s[0, 0], sink]).logsumexp(0),
            torch.stack([s[1, 1], sink]).logsumexp(0),
            torch.stack([s[2, 1], s[2, 2], sink]).logsumexp(0),
        ]
        assert lse.shape == (1, 3) and lse.dtype == torch.float32 and not lse.requires_grad
        torch.testing.assert_close(lse[0], torch.stack(right))


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"softcap": 2.0}, {"tree": True}], ids=str)
def test_runs_under_fake_tensors(options):
    tree = options.pop("tree", False)
    with FakeTensorMode():
        q = torch.empty(11, 4, 8, requires_grad=True)
        k, v = (torch.empty(11, 2, 8, requires_grad=True) for _ in "kv")
        bounds, end = torch.empty(3, dtype=torch.int32), torch.empty(11, dtype=torch.int32)
        out = varlen_attention(q, k, v, bounds, 9, end=end if tree else None, **options)
        out.sum().backward()
        assert out.shape == q.shape and q.grad.shape == q.shape and k.grad.shape == k.shape


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_selective_checkpointing_runs_the_forward_once(backend, monkeypatch):
    """A policy that saves the op's outputs: one forward, the same gradient. Without it: two."""
    calls = []
    real = BACKENDS[backend]

    def counted(*args):
        calls.append(1)
        return real.forward(*args)

    changed = SimpleNamespace(forward=counted, backward=real.backward, supports=real.supports)
    monkeypatch.setitem(BACKENDS, backend, changed)
    q, k, v, bounds, _ = packed(LENGTHS["odd"])

    def block(x):
        return varlen_attention(x * 2, k, v, bounds, 7, backend=backend).sin()

    def policy(context, op, *args, **kwargs):
        save = op is torch.ops.lean.varlen_attention.default
        choice = checkpoint.CheckpointPolicy
        return choice.MUST_SAVE if save else choice.PREFER_RECOMPUTE

    def selective():
        return checkpoint.create_selective_checkpoint_contexts(policy)

    (right,) = torch.autograd.grad(block(q).sum(), q)
    for context_fn, expected in ((selective, 1), (checkpoint.noop_context_fn, 2)):
        calls.clear()
        out = checkpoint.checkpoint(block, q, use_reentrant=False, context_fn=context_fn)
        (got,) = torch.autograd.grad(out.sum(), q)
        assert len(calls) == expected
        assert torch.equal(got, right)


def test_auto_falls_back_per_feature_and_a_named_backend_says_why():
    q, k, v, bounds, _ = packed([4, 2])
    end = torch.tensor([4, 4, 4, 4, 6, 6])
    for options, reason in (({"softcap": 1.0}, "softcap"), ({"end": end}, "tree")):
        auto = varlen_attention(q, k, v, bounds, 4, **options)
        plain = varlen_attention(q, k, v, bounds, 4, backend="math", **options)
        assert torch.equal(auto, plain)
        with pytest.raises(ValueError, match=f"sdpa.*{reason}.*math can"):
            varlen_attention(q, k, v, bounds, 4, backend="sdpa", **options)
    with pytest.raises(
        ValueError, match="unknown attention backend 'nope'; known: auto, torch_varlen, sdpa, math"
    ):
        varlen_attention(q, k, v, bounds, 4, backend="nope")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 6, 4, 8)}, "packed without a batch dimension"),
        ({"q": torch.zeros(6, 3, 8)}, "3 query heads must be a multiple of the 2"),
        ({"q": torch.zeros(6, 4, 8).double()}, "share one floating dtype"),
        ({"cu_seqlens": torch.zeros(3)}, "must be integers"),
        ({"cu_seqlens": torch.tensor([0, 4, 5])}, "rise from 0 to the 6 tokens"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 6])}, "rise from 0 to the 6 tokens"),
        ({"max_seqlen": 3}, "max_seqlen is 3"),
        ({"window": 0}, "window must be at least 1"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"sinks": torch.zeros(3)}, r"sinks must be \[4\]"),
        ({"end": torch.full((6,), 6), "causal": False}, "causal=True"),
        ({"end": torch.full((6,), 6)}, "within its tree"),
        ({"end": torch.tensor([4, 4, 2, 4, 6, 6])}, "after token i"),
    ],
)
def test_wrong_input_is_named(change, message):
    q, k, v, bounds, _ = packed([4, 2])
    inputs = {"q": q, "k": k, "v": v, "cu_seqlens": bounds, "max_seqlen": 4}
    with pytest.raises(ValueError, match=message):
        varlen_attention(**{**inputs, **change})
