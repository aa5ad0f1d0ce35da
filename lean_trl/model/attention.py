"""The attention of a block: projections, norms on queries and keys, rotary embedding, then
`ctx.attend`.

Dimension letters: T tokens, D model, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lean_trl.model.config import ModelConfig
from lean_trl.model.modules import RMSNorm, linear
from lean_trl.ops.attention import varlen_attention
from lean_trl.ops.layers import rotary


class Context(Protocol):
    """What every block of one forward shares: where the tokens stand, and how they look at each
    other.
    """

    @property
    def rope(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Kind of rope -> (cos, sin), fp32 [T, rotary dimensions / 2]."""

    @property
    def real(self) -> Tensor | None:
        """bool [T]: what is not padding; None: everything is real."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float,
    ) -> Tensor:
        """q [T, N, H], k and v [T, K, H] of the layer -> [T, N, H]."""


@dataclass(frozen=True, slots=True)
class PackedContext:
    """The context of training and scoring: a token sees its own sequence or tree, no cache."""

    cu_seqlens: Tensor
    max_seqlen: int
    end: Tensor | None
    positions: Tensor
    rope: dict[str, tuple[Tensor, Tensor]]
    real: Tensor | None
    backend: str

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float,
    ) -> Tensor:
        return varlen_attention(
            q,
            k,
            v,
            self.cu_seqlens,
            self.max_seqlen,
            end=self.end,
            positions=self.positions,
            window=window,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            backend=self.backend,
        )


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, layer: int, **factory: Any) -> None:
        super().__init__()
        family, heads, kv_heads = config.family, config.num_heads, config.num_kv_heads
        self.layer = layer
        self.head_dim = config.head_dim
        self.sizes = [n * config.head_dim for n in (heads, kv_heads, kv_heads)]
        self.kind = config.layers[layer]
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.interleaved = config.interleaved

        bias, width = config.attention_bias, config.hidden_size
        if family.fused_qkv:
            self.qkv_proj = linear(width, sum(self.sizes), bias, **factory)
        else:
            self.q_proj = linear(width, self.sizes[0], bias, **factory)
            self.k_proj = linear(width, self.sizes[1], bias, **factory)
            self.v_proj = linear(width, self.sizes[2], bias, **factory)
        self.o_proj = linear(self.sizes[0], width, bias and family.output_bias, **factory)
        self.qk_norm = family.qk_norm
        if self.qk_norm is not None:
            q_size, k_size = self.sizes[:2] if self.qk_norm == "all" else [config.head_dim] * 2
            self.q_norm = RMSNorm(q_size, config.norm_eps, family.norm_offset, **factory)
            self.k_norm = RMSNorm(k_size, config.norm_eps, family.norm_offset, **factory)
        self.fused = family.fused_qkv
        self.sinks = nn.Parameter(torch.empty(heads, **factory)) if family.sinks else None

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        if self.fused:
            q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.kind.rope is not None:
            cos, sin = ctx.rope[self.kind.rope]
            q, k = (rotary(t, cos, sin, interleaved=self.interleaved) for t in (q, k))
        out = ctx.attend(
            self.layer,
            q,
            k,
            v,
            window=self.kind.window,
            softcap=self.softcap,
            sinks=self.sinks,
            scale=self.scale,
        )
        return self.o_proj(out.flatten(-2))
