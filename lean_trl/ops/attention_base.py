"""What attention backends share: the description of a call, and trees of one length as a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Neighbours are a view of the packed tensors; trees of one length that do not touch must be copied
# together to share a call. A call costs what copying about 32 tokens of q, k, v and out costs.
GATHER_BELOW = 32


@dataclass(frozen=True)
class Call:
    """One attention call beside q, k and v; see varlen_attention for the meaning of each field."""

    cu_seqlens: Tensor
    end: Tensor | None
    positions: Tensor | None
    sinks: Tensor | None
    max_seqlen: int
    causal: bool
    window: int | None
    softcap: float | None
    scale: float


@dataclass(frozen=True)
class Backend:
    """forward(q, k, v, call) -> (out [T, N, H] contiguous, lse [N, T] contiguous);
    backward(grad_out, q, k, v, out, lse, call) -> (grad_q, grad_k, grad_v, grad_sinks or None), all
    contiguous, without a second forward;
    supports(q, call) -> why this call is not for the backend, or None."""

    forward: Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
    supports: Callable[[Tensor, Call], str | None]


def empty_contiguous(x: Tensor) -> Tensor:
    """An output like x, in the layout that the fake kernels promise."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax statistics are at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Group:
    """Trees of one length: the `count` trees from token `start` on, or those that `index` names."""

    length: int
    count: int
    start: int = 0
    index: Tensor | None = None  # int64 [count * length]

    def take(self, x: Tensor) -> Tensor:
        """[T, ...] -> [count, length, ...]: a view where the trees are neighbours."""
        rows = (
            x[self.start : self.start + self.count * self.length]
            if self.index is None
            else x[self.index]
        )
        return rows.unflatten(0, (self.count, self.length))

    def put(self, x: Tensor, value: Tensor) -> None:
        """Write value [count, length, ...] to these trees' rows of x [T, ...]."""
        if self.index is None:
            self.take(x).copy_(value)
        else:
            x[self.index] = value.flatten(0, 1).to(x.dtype)


def groups(call: Call, num_tokens: int) -> Iterator[Group]:
    """The trees of a batch, those of one length together where that costs no more than it saves.

    Reads cu_seqlens: on an accelerator this waits for the device.
    """
    bounds = call.cu_seqlens.cpu().numpy().astype(np.int64)
    lengths = np.diff(bounds)
    if bounds[0] != 0 or bounds[-1] != num_tokens or (lengths < 0).any():
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {num_tokens} tokens of q, got "
            f"{bounds[:4].tolist()}..{bounds[-1]}"
        )
    if lengths.max(initial=0) > call.max_seqlen:
        raise ValueError(
            f"max_seqlen is {call.max_seqlen}, but cu_seqlens holds {lengths.max()} tokens in a row"
        )
    starts, lengths = bounds[:-1][lengths > 0], lengths[lengths > 0]
    # A run is a maximal stretch of neighbours of one length: the trees first[r] .. first[r + 1].
    first = np.flatnonzero(np.diff(lengths, prepend=-1, append=-1))
    runs = list(zip(first[:-1].tolist(), np.diff(first).tolist(), strict=True))
    apart: dict[int, list[tuple[int, int]]] = {}
    for tree, count in runs:
        apart.setdefault(int(lengths[tree]), []).append((tree, count))
    for length, parts in apart.items():
        if len(parts) > 1 and length < GATHER_BELOW:
            first_tokens = np.concatenate([starts[tree : tree + count] for tree, count in parts])
            index = (first_tokens[:, None] + np.arange(length)).ravel()
            yield Group(
                length, len(first_tokens), index=torch.from_numpy(index).to(call.cu_seqlens.device)
            )
        else:
            yield from (Group(length, count, start=int(starts[tree])) for tree, count in parts)
