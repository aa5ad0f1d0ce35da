"""What a backend of the attention op is given and what it must offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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


class Backend(Protocol):
    """T >= 1; all tensors returned are new and contiguous."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """out [T, N, H] in the dtype of q, lse [N, T] in statistics_dtype, sinks included."""

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
        """Gradients of q, k, v and sinks (None without sinks), without a second forward."""

    def supports(self, q: Tensor, call: Call) -> str | None:
        """Why this call is not for the backend, or None. Reads no tensor."""


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax statistics are at least fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
