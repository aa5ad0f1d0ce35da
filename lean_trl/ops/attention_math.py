"""Attention in plain tensor operations: the reference that every other backend is held against.

Any device, any floating dtype (statistics and products in fp32, fp64 for fp64), every feature. It
materialises the scores of a group of trees, [B, N, L, L], in parts of at most SCORES elements where
one tree allows that.

Letters: B trees of one length, L tokens of each, N query heads, K kv heads, G = N / K, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lean_trl.ops.attention_base import Call, Group, empty_contiguous, groups, statistics_dtype

SCORES = 1 << 24


def supports(q: Tensor, call: Call) -> str | None:
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out = empty_contiguous(q)
    lse = q.new_empty((q.shape[0], q.shape[1]), dtype=statistics_dtype(q.dtype))
    for group in _parts(q, call):
        scores, _ = _scores(group, q, k, call)
        total = scores.logsumexp(-1)  # [B, N, L]
        if call.sinks is not None:
            total = torch.logaddexp(total, call.sinks.to(total.dtype)[:, None])
        probs = (scores - total[..., None]).exp()
        group.put(out, _join(_split(probs, k) @ _heads(group.take(v), probs.dtype)[:, :, None]))
        group.put(lse, total.transpose(1, 2))
    return out, lse.t().contiguous()


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """With P = exp(scores - lse), D = rowsum(grad_out * out): dV = P'dO, dS = P * (dO V' - D), and
    a sink, whose probability multiplies no value, gets -sum_i P_sink(i) D(i)."""
    grad_q, grad_k, grad_v = (empty_contiguous(x) for x in (q, k, v))
    for group in _parts(q, call):
        scores, slope = _scores(group, q, k, call)
        dtype = scores.dtype
        total = group.take(lse.t()).transpose(1, 2)
        probs = _split((scores - total[..., None]).exp(), k)  # [B, K, G, L, L]
        upstream = _split(_heads(group.take(grad_out), dtype), k)
        value = _heads(group.take(v), dtype)[:, :, None]
        delta = (upstream * _split(_heads(group.take(out), dtype), k)).sum(-1, keepdim=True)
        grad_scores = probs * (upstream @ value.mT - delta) * call.scale
        if slope is not None:
            grad_scores = grad_scores * _split(slope, k)
        query, key = (
            _split(_heads(group.take(q), dtype), k),
            _heads(group.take(k), dtype)[:, :, None],
        )
        group.put(grad_q, _join(grad_scores @ key))
        group.put(grad_k, (grad_scores.mT @ query).sum(2).transpose(1, 2))
        group.put(grad_v, (probs.mT @ upstream).sum(2).transpose(1, 2))
    return grad_q, grad_k, grad_v, sink_gradient(grad_out, out, lse, call.sinks)


def sink_gradient(
    grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
) -> Tensor | None:
    """-sum_i exp(sink - lse_i) rowsum(grad_out * out)_i, [N]."""
    if sinks is None:
        return None
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [T, N]
    return -((sinks.to(lse.dtype) - lse.t()).exp() * delta).sum(0).to(sinks.dtype)


def _parts(q: Tensor, call: Call) -> Iterator[Group]:
    for group in groups(call, q.shape[0]):
        size = max(1, SCORES // (q.shape[1] * group.length**2))
        for at in range(0, group.count, size):
            count, skip = min(size, group.count - at), at * group.length
            if group.index is None:
                yield replace(group, count=count, start=group.start + skip)
            else:
                yield replace(
                    group, count=count, index=group.index[skip : skip + count * group.length]
                )


def _scores(group: Group, q: Tensor, k: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """Masked logits [B, N, L, L] and, with a softcap, d(logit)/d(scaled product)."""
    dtype = statistics_dtype(q.dtype)
    query, key = _split(_heads(group.take(q), dtype), k), _heads(group.take(k), dtype)[:, :, None]
    scores = (query @ key.mT).flatten(1, 2) * call.scale
    slope = None
    if call.softcap is not None:
        bounded = (scores / call.softcap).tanh()
        scores, slope = bounded * call.softcap, 1 - bounded * bounded
    return scores.masked_fill(~_visible(group, call, q.device)[:, None], -torch.inf), slope


def _visible(group: Group, call: Call, device: torch.device) -> Tensor:
    """bool [B or 1, L, L]: query i sees key j."""
    at = torch.arange(group.length, device=device)
    i, j = at[:, None], at[None, :]
    visible = (j <= i if call.causal else torch.ones_like(j <= i))[None]
    if call.end is not None:
        # End as an offset in its own tree; `end` is global, and so is the first token of each tree.
        end = group.take(call.end) - group.take(torch.arange(len(call.end), device=device))[:, :1]
        if ((end <= at) | (end > group.length)).any():
            raise ValueError(
                "end[i] must lie after token i and within its tree: it is the last descendant + 1"
            )
        visible = visible & (i < end[:, None, :])
    if call.window is not None:
        depth = at[None]
        if call.end is not None:
            depth = visible.sum(-1) - 1 if call.positions is None else group.take(call.positions)
        visible = visible & ((depth[:, :, None] - depth[:, None, :]).abs() < call.window)
    return visible


def _heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, L, heads, H] -> [B, heads, L, H] in the dtype of the statistics."""
    return x.transpose(1, 2).to(dtype)


def _split(x: Tensor, k: Tensor) -> Tensor:
    """[B, N, ...] -> [B, K, G, ...]: the query heads that share a kv head side by side."""
    return x.unflatten(1, (k.shape[1], -1))


def _join(x: Tensor) -> Tensor:
    """[B, K, G, L, H] -> [B, L, N, H]."""
    return x.flatten(1, 2).transpose(1, 2)
