"""Attention through torch's CPU flash kernel: O(T) memory, exact lse, GQA, no second forward.

Each group of trees of one length is one call on views of the packed tensors, so a packed batch
costs what its real tokens cost. A window shorter than the trees is evaluated in blocks of queries
against the keys they can reach: work and mask grow with T * window, not with the squared length.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lean_trl.ops.attention_base import Call, Group, empty_contiguous, groups, statistics_dtype
from lean_trl.ops.attention_math import sink_gradient

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Queries in a block of a windowed call: at least so many that the kernel's own blocks stay full.
WINDOW_BLOCK = 128


def supports(q: Tensor, call: Call) -> str | None:
    if q.device.type != "cpu":
        return f"it runs on the CPU only, not on {q.device.type}"
    if call.softcap is not None:
        return "its kernel has no softcap"
    if call.end is not None:
        return "its kernel has no tree mask (end)"
    return None


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out = empty_contiguous(q)
    lse = q.new_empty(
        (q.shape[0], q.shape[1]), dtype=statistics_dtype(q.dtype)
    )  # as the kernel writes it
    for group in groups(call, q.shape[0]):
        query, key, value = (_heads(group, x) for x in (q, k, v))
        blocks = [
            _flash(
                query[:, :, rows],
                key[:, :, cols],
                value[:, :, cols],
                0.0,
                causal,
                attn_mask=mask,
                scale=call.scale,
            )
            for rows, cols, mask, causal in _blocks(group.length, q.dtype, call)
        ]
        part, total = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*blocks, strict=True))
        group.put(out, part.transpose(1, 2))
        group.put(lse, total.transpose(1, 2))
    if call.sinks is not None:
        total = torch.logaddexp(lse, call.sinks.to(lse.dtype))
        out.mul_((lse - total).exp_()[..., None])
        lse = total
    return out, lse.t().contiguous()


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    # The kernel rebuilds P = exp(scores - lse) and rowsum(grad_out * out) from what it is given, so
    # a lse that holds the sink gives the right gradients of q, k and v as it is.
    grad_q, grad_k, grad_v = (empty_contiguous(x) for x in (q, k, v))
    for group in groups(call, q.shape[0]):
        tensors = [_heads(group, x) for x in (grad_out, q, k, v, out)]
        parts = _group_backward([*tensors, group.take(lse.t()).transpose(1, 2)], call)
        for grad, part in zip((grad_q, grad_k, grad_v), parts, strict=True):
            group.put(grad, part.transpose(1, 2))
    return grad_q, grad_k, grad_v, sink_gradient(grad_out, out, lse, call.sinks)


def _heads(group: Group, x: Tensor) -> Tensor:
    """[T, heads, H] -> [B, heads, L, H], last stride 1 as the kernel needs: the gradient of a sum
    is an expanded scalar, with strides 0."""
    x = group.take(x).transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _group_backward(tensors: list[Tensor], call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v [B, heads, L, H] from (grad_out, q, k, v, out, lse) in that layout."""
    q, k, v = tensors[1:4]
    length = q.shape[2]
    if call.window is None or call.window >= length:
        return _flash_backward(*tensors, 0.0, call.causal, scale=call.scale)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, cols, mask, causal in _blocks(length, q.dtype, call):
        spans = (rows, rows, cols, cols, rows, rows)
        parts = [x[:, :, span] for x, span in zip(tensors, spans, strict=True)]
        part_q, part_k, part_v = _flash_backward(
            *parts, 0.0, causal, attn_mask=mask, scale=call.scale
        )
        grad_q[:, :, rows] = part_q
        grad_k[:, :, cols] += part_k
        grad_v[:, :, cols] += part_v
    return grad_q, grad_k, grad_v


def _blocks(
    length: int, dtype: torch.dtype, call: Call
) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
    """(queries, keys, mask, causal) of each kernel call that a tree of this length takes."""
    if call.window is None or call.window >= length:
        yield slice(0, length), slice(0, length), None, call.causal
        return
    window = call.window
    size = max(window, WINDOW_BLOCK)
    for first in range(0, length, size):
        rows = slice(first, min(first + size, length))
        cols = slice(
            max(0, first - window + 1),
            rows.stop if call.causal else min(length, rows.stop + window - 1),
        )
        ahead = (
            torch.arange(cols.start, cols.stop) - torch.arange(rows.start, rows.stop)[:, None]
        )  # key - query
        hidden = (ahead <= -window) | (ahead >= (1 if call.causal else window))
        yield (
            rows,
            cols,
            torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf),
            False,
        )
