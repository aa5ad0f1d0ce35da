"""Attention through torch's CPU flash kernel: O(T) memory, exact lse, GQA, no second forward.

The kernel runs on views of the packed tensors, so a packed batch costs what its real tokens cost.
A window shorter than the trees is evaluated in blocks of queries against the keys they can reach:
work and mask grow with T * window, not with the squared length.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lean_trl.ops.attention_base import Call
from lean_trl.ops.attention_groups import GroupedBackend, Tree

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Queries in a block of a windowed call: at least so many that the kernel's own blocks stay full.
WINDOW_BLOCK = 128


def _supports(q: Tensor, call: Call) -> str | None:
    if q.device.type != "cpu":
        return f"it runs on the CPU only, not on {q.device.type}"
    if call.softcap is not None:
        return "its kernel has no softcap"
    if call.end is not None:
        return "its kernel has no tree mask (end)"
    return None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, tree: Tree | None, call: Call
) -> tuple[Tensor, Tensor]:
    q, k, v = (_rows(x) for x in (q, k, v))
    if _sees_all(q, call):
        return _flash(q, k, v, 0.0, call.causal, scale=call.scale)
    parts = [
        _flash(q[:, :, i], k[:, :, j], v[:, :, j], attn_mask=mask, scale=call.scale)
        for i, j, mask in _blocks(q, call)
    ]
    out, lse = (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return out, lse


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
    # In fp32: the kernel sums a bf16 gradient over query heads and blocks in bf16 (rms error 1.3
    # times that of plain bf16 operations) and is no faster at it up to 500 tokens.
    dtype = q.dtype
    grad_out, q, k, v, out = (_rows(x.to(lse.dtype)) for x in (grad_out, q, k, v, out))
    grads = _gradients((grad_out, q, k, v, out, lse), call)
    return grads[0].to(dtype), grads[1].to(dtype), grads[2].to(dtype)


def _gradients(tensors: tuple[Tensor, ...], call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """From (grad_out, q, k, v, out, lse), one call or one per block of a window."""
    _, q, k, v, _, _ = tensors
    if _sees_all(q, call):
        return _kernel_gradients(tensors, call.causal, None, call.scale)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for i, j, mask in _blocks(q, call):
        spans = zip(tensors, (i, i, j, j, i, i), strict=True)
        block = tuple(x[:, :, span] for x, span in spans)
        part_q, part_k, part_v = _kernel_gradients(block, False, mask, call.scale)
        grad_q[:, :, i] = part_q
        grad_k[:, :, j] += part_k
        grad_v[:, :, j] += part_v
    return grad_q, grad_k, grad_v


def _kernel_gradients(
    tensors: tuple[Tensor, ...], causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """From (grad_out, q, k, v, out, lse). The kernel's backward has one task per tree and kv head;
    where one tree's kv heads leave threads idle (3 heads on 2 threads: 25 %), each query head gets
    its own view of its kv head."""
    grad_out, q, k, v, out, lse = tensors
    heads, threads = k.shape[1], torch.get_num_threads()
    idle = 1 - heads / (threads * -(-heads // threads))
    if len(q) > 1 or q.shape[1] == heads or idle < 0.2:
        return _flash_backward(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
    # A batch of kv heads, each with its own query heads.
    grad_out, q, out, lse = (x[0].unflatten(0, (heads, -1)) for x in (grad_out, q, out, lse))
    k, v = (x[0][:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    tensors = grad_out, q, k, v, out, lse
    grad_q, grad_k, grad_v = _flash_backward(*tensors, 0.0, causal, attn_mask=mask, scale=scale)
    return grad_q.flatten(0, 1)[None], grad_k.sum(1)[None], grad_v.sum(1)[None]


def _sees_all(q: Tensor, call: Call) -> bool:
    return call.window is None or call.window >= q.shape[2]


def _blocks(q: Tensor, call: Call) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries, keys, additive mask) of each kernel call that a windowed group takes."""
    assert call.window is not None
    length, reach = q.shape[2], call.window - 1
    size = max(call.window, WINDOW_BLOCK)
    for first in range(0, length, size):
        i = slice(first, min(first + size, length))
        j = slice(max(0, first - reach), i.stop if call.causal else min(length, i.stop + reach))
        ahead = torch.arange(j.start, j.stop) - torch.arange(i.start, i.stop)[:, None]
        hidden = (ahead < -reach) | (ahead > (0 if call.causal else reach))
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
        yield i, j, mask


def _rows(x: Tensor) -> Tensor:
    """The kernel needs a last stride of 1; the gradient of a sum, an expanded scalar, has 0."""
    return x if x.stride(-1) == 1 else x.contiguous()


SDPA = GroupedBackend(_forward, _backward, _supports)
