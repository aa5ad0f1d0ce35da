"""Attention over packed sequences and trees: ONE registered torch op, backends behind it.

    out_i = sum_j p_ij v_j,    p_ij = exp(s_ij - lse_i),    lse_i = log(sum_j exp(s_ij) + exp(sink))

with s_ij = softcap * tanh(scale * q_i.k_j / softcap) (no tanh without a softcap) over the keys j
that i sees: "Attention Is All You Need" (3.2.1), lse kept as in FlashAttention-2 (algorithm 1),
sinks as in gpt-oss. `lean::varlen_attention` returns (out, lse) and its backward takes both, so a
selective-checkpointing policy that saves them never runs the forward twice.

Letters: T packed tokens, R trees, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lean_trl.ops.attention_base import Backend, Call, statistics_dtype
from lean_trl.ops.attention_math import MATH
from lean_trl.ops.attention_sdpa import SDPA
from lean_trl.ops.attention_torch_varlen import TORCH_VARLEN

# In order of preference: "auto" takes the first that supports the call.
BACKENDS: dict[str, Backend] = {"torch_varlen": TORCH_VARLEN, "sdpa": SDPA, "math": MATH}


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    end: Tensor | None = None,
    positions: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention within each of R sequences (or trees) laid one after another -> out [T, N, H].

    q [T, N, H]; k, v [T, K, H], N a multiple of K (query head n reads kv head n // (N / K)); one
        floating dtype, which is that of out too. Softmax statistics are at least fp32.
    cu_seqlens int32 or int64 [R + 1]: sequence r is the tokens [cu_seqlens[r], cu_seqlens[r + 1]);
        0 first, T last.
    max_seqlen: length of the longest sequence, in tokens.
    end int32 or int64 [T]: last descendant + 1 of each token, when prefixes are shared: i sees j
        iff j <= i < end[j].
    positions int64 [T]: depth of each token in its tree. Only a window over a tree reads it (None:
        counted there); without `end` the depth is the distance from the start of the sequence.
    causal: a token sees itself and what stands before it; False: the whole sequence (no `end`).
    window: in tokens of depth; i sees j only if |depth_i - depth_j| < window.
    softcap: bound on the scores' magnitude; applied before the mask.
    sinks [N]: a logit per head that takes its share of the softmax and carries no value.
    scale: factor on q.k, default H ** -0.5.
    backend: "auto" (the first of BACKENDS that supports the call) or one by name. "torch_varlen" is
        for CUDA; "sdpa" and "math" read cu_seqlens on the host: free on the CPU, a wait for the
        device on an accelerator.

    Gradients flow to q, k, v and sinks, once (no double backward). Raises ValueError on shapes that
    do not fit, on an unknown backend, and on a named backend that cannot run the call.

    Two sequences of 2 and 1 tokens, zero queries, so that each token averages what it sees:

    >>> q, v = torch.zeros(3, 1, 1), torch.tensor([2.0, 4.0, 7.0]).view(3, 1, 1)
    >>> varlen_attention(q, q, v, torch.tensor([0, 2, 3]), 2).flatten()
    tensor([2., 3., 7.])
    """
    _check(q, k, v, cu_seqlens, end, positions, sinks)
    if end is not None and not causal:
        raise ValueError(
            "a tree (end) is causal by its order: pass causal=True, or sequences without end"
        )
    if window is not None and window < 1:
        raise ValueError(
            f"window must be at least 1 (the token itself), got {window}; None for no window"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}; None for no softcap")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    call = Call(cu_seqlens, end, positions, sinks, max_seqlen, causal, window, softcap, scale)
    name = choose_backend(backend, q, call)
    tail = (cu_seqlens, end, positions, sinks, max_seqlen, causal, window, softcap, scale, name)
    return torch.ops.lean.varlen_attention(q, k, v, *tail)[0]


def choose_backend(name: str, q: Tensor, call: Call) -> str:
    """The backend that runs the call; ValueError says why a named one cannot and which would."""
    if name == "auto":
        return next(each for each, backend in BACKENDS.items() if backend.supports(q, call) is None)
    if name not in BACKENDS:
        raise ValueError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    reason = BACKENDS[name].supports(q, call)
    if reason is not None:
        able = [each for each, backend in BACKENDS.items() if backend.supports(q, call) is None]
        raise ValueError(
            f"attention backend {name!r} cannot run this call: {reason}; {' or '.join(able)} can"
        )
    return name


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    end: Tensor | None,
    positions: Tensor | None,
    sinks: Tensor | None,
) -> None:
    if (
        q.dim() != 3
        or k.dim() != 3
        or k.shape != v.shape
        or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2])
    ):
        raise ValueError(
            "q must be [T, N, H] and k, v [T, K, H], packed without a batch dimension; got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the {q.shape[1]} query heads must be a multiple of the {k.shape[1]} kv heads"
        )
    if not (q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point):
        raise ValueError(
            f"q, k and v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype.is_floating_point:
        raise ValueError(
            f"cu_seqlens must be integers [R + 1], got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    for name, each, size in (
        ("end", end, q.shape[0]),
        ("positions", positions, q.shape[0]),
        ("sinks", sinks, q.shape[1]),
    ):
        if each is not None and each.shape != (size,):
            raise ValueError(f"{name} must be [{size}], got {list(each.shape)}")


# -- the op --------------------------------------------------------------------------------

_TAIL = (
    "Tensor cu_seqlens, Tensor? end, Tensor? positions, Tensor? sinks, SymInt max_seqlen, "
    "bool causal, SymInt? window, float? softcap, float scale, str backend"
)


@torch.library.custom_op(
    "lean::varlen_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_TAIL}) -> (Tensor out, Tensor lse)",
)
def _forward_op(q, k, v, *tail):
    *fields, name = tail
    if len(q) == 0:
        return _forward_shapes(q, k, v)
    return BACKENDS[name].forward(q, k, v, Call(*fields))


@_forward_op.register_fake
def _forward_shapes(q, k, v, *_):
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=statistics_dtype(q.dtype))
    return q.new_empty(q.shape), lse


@torch.library.custom_op(
    "lean::varlen_attention_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TAIL}) "
        "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks)"
    ),
)
def _backward_op(grad_out, q, k, v, out, lse, *tail):
    *fields, name = tail
    call = Call(*fields)
    if len(q) == 0:
        *grads, grad_sinks = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), None
        if call.sinks is not None:
            grad_sinks = torch.zeros_like(call.sinks)
    else:
        *grads, grad_sinks = BACKENDS[name].backward(grad_out, q, k, v, out, lse, call)
    # An op returns tensors only: an empty one stands for "no sinks".
    return *grads, q.new_empty(0) if grad_sinks is None else grad_sinks


@_backward_op.register_fake
def _backward_shapes(grad_out, q, k, v, out, lse, cu_seqlens, end, positions, sinks, *_):
    grad_sinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_sinks


def _save(ctx, inputs, output):
    q, k, v, cu_seqlens, end, positions, sinks, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, end, positions, sinks)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_out, _grad_lse):
    q, k, v, out, lse, cu_seqlens, end, positions, sinks = ctx.saved_tensors
    grads = torch.ops.lean.varlen_attention_backward(
        grad_out, q, k, v, out, lse, cu_seqlens, end, positions, sinks, *ctx.options
    )
    return (
        *grads[:3],
        None,
        None,
        None,
        None if sinks is None else grads[3],
        *(None for _ in ctx.options),
    )


_forward_op.register_autograd(_backward, setup_context=_save)
