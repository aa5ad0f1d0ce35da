"""Packed trees as batches of one length: attention over [B, heads, L, H] becomes a backend.

Trees of one length that stand side by side are a view of the packed tensors. When that leaves many
small calls, the trees of each length are gathered instead.

Letters: T packed tokens, N query heads, K kv heads, H head dim, B trees of L tokens in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lean_trl.ops.attention_base import Call

# A kernel call costs about what sorting so many tokens of q, k, v and out (30 to 40 us).
CALL_IN_TOKENS = 32


@dataclass(frozen=True)
class Tree:
    """Where the branches of a group's trees are; ints [B, L]."""

    end: Tensor  # last descendant + 1, counted from the start of the tree
    depth: Tensor | None


@dataclass(frozen=True)
class GroupedBackend:
    """group_forward(q, k, v, tree or None, call) -> (out [B, N, L, H], lse [B, N, L]) and
    group_backward(grad_out, q, k, v, out, lse, tree, call) -> gradients of q, k, v, all of them
    [B, heads, L, H]. Sinks are added here: lse' = logaddexp(lse, sink), out' = out exp(lse - lse').
    """

    group_forward: Callable[..., tuple[Tensor, Tensor]]
    group_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    supports: Callable[[Tensor, Call], str | None]
    max_scores: int | None = None  # scores N * L * L of the trees that one group holds

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        out: Tensor | None = None
        lse: Tensor | None = None  # [T, N], as the kernels write it
        for group, tree in _groups(call, q, self.max_scores):
            part, total = self.group_forward(*(group.take(x) for x in (q, k, v)), tree, call)
            out = group.put(out, part, len(q))
            lse = group.put(lse, total, len(q))
        assert out is not None and lse is not None, "no tokens"
        if call.sinks is not None:
            total = torch.logaddexp(lse, call.sinks.to(lse.dtype))
            out.mul_((lse - total).exp_()[..., None])
            lse = total
        return out, lse.t().contiguous()

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        # P = exp(scores - lse) and D = rowsum(grad_out * out) with the sink in lse and out are all
        # that the gradients of q, k and v need. A sink's own probability carries no value, so its
        # gradient is -sum_i P_sink(i) D(i).
        tensors = (grad_out, q, k, v, out, lse.t())
        grads: list[Tensor | None] = [None, None, None]
        for group, tree in _groups(call, q, self.max_scores):
            parts = self.group_backward(*(group.take(x) for x in tensors), tree, call)
            pairs = zip(grads, parts, strict=True)
            grads = [group.put(whole, part, len(q)) for whole, part in pairs]
        grad_sinks = None
        if call.sinks is not None:
            delta = (grad_out.to(lse.dtype) * out).sum(-1)  # [T, N]
            grad_sinks = -((call.sinks.to(lse.dtype) - lse.t()).exp() * delta).sum(0)
            grad_sinks = grad_sinks.to(call.sinks.dtype)
        grad_q, grad_k, grad_v = (x for x in grads if x is not None)
        return grad_q, grad_k, grad_v, grad_sinks


@dataclass(frozen=True)
class _Group:
    """`count` trees of `length` tokens: those from token `start` on, or the tokens of `index`."""

    count: int
    length: int
    start: int
    index: Tensor | None  # int64 [count * length]

    def rows(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, L, ...], a view without an index."""
        if self.index is None:
            x = x[self.start : self.start + self.count * self.length]
        else:
            x = x.index_select(0, self.index)
        return x.unflatten(0, (self.count, self.length))

    def take(self, x: Tensor) -> Tensor:
        """[T, heads, ...] -> [B, heads, L, ...]."""
        return self.rows(x).transpose(1, 2)

    def put(self, whole: Tensor | None, part: Tensor, num_tokens: int) -> Tensor:
        """Write part [B, heads, L, ...] to its rows of whole [T, heads, ...], made on first use.

        A part that is all there is becomes the whole, without a copy when it is token-major.
        """
        part = part.transpose(1, 2)
        if self.count * self.length == num_tokens:
            return part.flatten(0, 1).contiguous()
        if whole is None:
            whole = part.new_empty((num_tokens, *part.shape[2:]))
        if self.index is None:
            self.rows(whole).copy_(part)
        else:
            whole.index_copy_(0, self.index, part.flatten(0, 1))
        return whole


def _groups(call: Call, q: Tensor, max_scores: int | None) -> Iterator[tuple[_Group, Tree | None]]:
    """Reads cu_seqlens: on an accelerator this waits for the device."""
    bounds = call.cu_seqlens.cpu().numpy().astype(np.int64)
    lengths = _lengths(bounds, len(q), call.max_seqlen)
    order, num_calls = None, 1 + np.count_nonzero(np.diff(lengths))
    if (num_calls - len(np.unique(lengths))) * CALL_IN_TOKENS > len(q):
        trees = np.argsort(lengths, kind="stable")
        first = (np.cumsum(lengths) - lengths)[trees]  # packed token where each tree starts
        lengths = lengths[trees]
        shift = first - (np.cumsum(lengths) - lengths)
        order = torch.from_numpy(np.arange(len(q)) + np.repeat(shift, lengths)).to(q.device)
    end = None
    if call.end is not None:
        starts = call.cu_seqlens[:-1].repeat_interleave(call.cu_seqlens.diff(), output_size=len(q))
        end = call.end - starts
    for start, count, length in _runs(lengths, q.shape[1], max_scores):
        index = None if order is None else order[start : start + count * length]
        group, tree = _Group(count, length, start, index), None
        if end is not None:
            depth = None if call.positions is None else group.rows(call.positions)
            tree = Tree(group.rows(end), depth)
        yield group, tree


def _lengths(bounds: np.ndarray, num_tokens: int, max_seqlen: int) -> np.ndarray:
    """Lengths of the trees that have tokens; the place where cu_seqlens is checked."""
    lengths = np.diff(bounds)
    if bounds[0] != 0 or bounds[-1] != num_tokens or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {num_tokens} tokens of q, got "
            f"{bounds[:4].tolist()}..{bounds[-1]}"
        )
    if lengths.max(initial=0) > max_seqlen:
        raise ValueError(
            f"max_seqlen is {max_seqlen}, but a sequence of cu_seqlens has {lengths.max()} tokens"
        )
    return lengths[lengths > 0]


def _runs(
    lengths: np.ndarray, num_heads: int, max_scores: int | None
) -> Iterator[tuple[int, int, int]]:
    """(start, count, length) of neighbours of one length, as many as max_scores allows."""
    changes = np.flatnonzero(np.diff(lengths, prepend=0, append=0))  # and one past the last tree
    start = 0
    for first, last in zip(changes[:-1].tolist(), changes[1:].tolist(), strict=True):
        length, left = int(lengths[first]), last - first
        most = left if max_scores is None else max(1, max_scores // (num_heads * length**2))
        while left:
            count = min(left, most)
            yield start, count, length
            start, left = start + count * length, left - count
