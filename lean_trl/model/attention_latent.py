"""Multi-head latent attention: queries, keys and values through low-rank projections.

DeepSeek-V2 (section 2.1). A head has `nope` dimensions without and `rope` with rotary embedding;
the latter are shared by all heads of the keys. This is the plain form: keys and values of every
head exist while a layer runs, so the attention op is the one of every other family.

Dimension letters: T tokens, D model, N heads, H = nope + rope.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_trl.model.attention import Context
from lean_trl.model.config import ModelConfig
from lean_trl.model.modules import RMSNorm, linear
from lean_trl.ops.layers import rotary

LATENT_EPS = 1e-6  # of the norms on the latents, whatever rms_norm_eps says


class LatentAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, **factory: Any) -> None:
        super().__init__()
        assert config.latent is not None
        self.sizes = sizes = config.latent
        self.layer = layer
        self.kind = config.layers[layer]
        self.scale = config.attention_scale
        self.interleaved = config.interleaved

        width, heads, bias = config.hidden_size, config.num_heads, config.attention_bias
        q_size = heads * (sizes.nope + sizes.rope)
        if sizes.q_rank is None:
            self.q_proj = linear(width, q_size, False, **factory)
        else:
            self.q_a_proj = linear(width, sizes.q_rank, bias, **factory)
            self.q_a_layernorm = RMSNorm(sizes.q_rank, LATENT_EPS, **factory)
            self.q_b_proj = linear(sizes.q_rank, q_size, False, **factory)
        self.kv_a_proj_with_mqa = linear(width, sizes.kv_rank + sizes.rope, bias, **factory)
        self.kv_a_layernorm = RMSNorm(sizes.kv_rank, LATENT_EPS, **factory)
        kv_size = heads * (sizes.nope + sizes.value)
        self.kv_b_proj = linear(sizes.kv_rank, kv_size, False, **factory)
        self.o_proj = linear(heads * sizes.value, width, bias, **factory)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """x [T, D] -> [T, D]."""
        sizes = self.sizes
        if sizes.q_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (-1, sizes.nope + sizes.rope))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([sizes.kv_rank, sizes.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.unflatten(-1, (-1, sizes.nope + sizes.value))
        k, v = kv.split([sizes.nope, sizes.value], dim=-1)
        q_nope, q_rope = q.split([sizes.nope, sizes.rope], dim=-1)
        k_rope = k_rope.unsqueeze(1)
        if self.kind.rope is not None:
            cos, sin = ctx.rope[self.kind.rope]
            q_rope, k_rope = (
                rotary(t, cos, sin, interleaved=self.interleaved) for t in (q_rope, k_rope)
            )
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k, k_rope.expand(-1, k.shape[1], -1)], dim=-1)
        # One head size for the op: values are filled up with zeros, which come back as zeros.
        v = F.pad(v, (0, k.shape[-1] - sizes.value))
        out = ctx.attend(
            self.layer,
            q,
            k,
            v,
            window=self.kind.window,
            softcap=None,
            sinks=None,
            scale=self.scale,
        )
        return self.o_proj(out[..., : sizes.value].flatten(-2))
