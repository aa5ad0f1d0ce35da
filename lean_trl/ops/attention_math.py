"""Attention in plain tensor operations: the reference that every other backend is held against.

Any device, any floating dtype (statistics and products in fp32, fp64 for fp64), every feature. It
materialises the scores of a group of trees, [B, N, L, L].

Letters: B trees of one length, L tokens of each, N query heads, K kv heads, G = N / K, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lean_trl.ops.attention_base import Call, statistics_dtype
from lean_trl.ops.attention_groups import GroupedBackend, Tree


def _supports(q: Tensor, call: Call) -> str | None:
    return None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree | None, call: Call
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, tree, call)  # [B, K, G, L, L]
    lse = scores.logsumexp(-1)
    probs = (scores - lse[..., None]).exp()
    out = probs @ _key_heads(v)
    return out.flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tree: Tree | None,
    call: Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """With P = exp(scores - lse), D = rowsum(grad_out * out): dV = P' dO, dS = P * (dO V' - D)."""
    scores, slope = _scores(q, k, tree, call)
    probs = (scores - _query_heads(lse, k)[..., None]).exp()
    upstream = _query_heads(grad_out, k)
    delta = (upstream * _query_heads(out, k)).sum(-1, keepdim=True)
    grad_scores = probs * (upstream @ _key_heads(v).mT - delta) * call.scale
    if slope is not None:
        grad_scores = grad_scores * slope
    grad_q = (grad_scores @ _key_heads(k)).flatten(1, 2)
    grad_k = (grad_scores.mT @ _query_heads(q, k)).sum(2)
    grad_v = (probs.mT @ upstream).sum(2)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q: Tensor, k: Tensor, tree: Tree | None, call: Call) -> tuple[Tensor, Tensor | None]:
    """Masked logits [B, K, G, L, L] and, with a softcap, d(logit)/d(scaled product)."""
    scores = _query_heads(q, k) @ _key_heads(k).mT * call.scale
    slope = None
    if call.softcap is not None:
        bounded = (scores / call.softcap).tanh()
        scores, slope = bounded * call.softcap, 1 - bounded * bounded
    visible = _visible(q.shape[2], tree, call, q.device)
    return scores.masked_fill(~visible[:, None, None], -torch.inf), slope


def _visible(length: int, tree: Tree | None, call: Call, device: torch.device) -> Tensor:
    """bool [B or 1, L, L]: query i sees key j."""
    at = torch.arange(length, device=device)
    i, j = at[:, None], at[None, :]
    visible = (j <= i if call.causal else torch.ones_like(j <= i))[None]
    depth = at[None]
    if tree is not None:
        if ((tree.end <= at) | (tree.end > length)).any():
            raise ValueError(
                "end[i] must lie after token i and within its tree: it is the last descendant + 1"
            )
        visible = visible & (i < tree.end[:, None, :])
        depth = visible.sum(-1) if tree.depth is None else tree.depth
    if call.window is not None:
        visible = visible & ((depth[:, :, None] - depth[:, None, :]).abs() < call.window)
    return visible


def _query_heads(x: Tensor, k: Tensor) -> Tensor:
    """[B, N, ...] -> [B, K, G, ...] in the dtype of the statistics."""
    return x.to(statistics_dtype(x.dtype)).unflatten(1, (k.shape[1], -1))


def _key_heads(x: Tensor) -> Tensor:
    """[B, K, L, H] -> [B, K, 1, L, H] in the dtype of the statistics."""
    return x.to(statistics_dtype(x.dtype))[:, :, None]


MATH = GroupedBackend(_forward, _backward, _supports, max_scores=1 << 24)
