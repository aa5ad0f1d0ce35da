"""The one decoder that every family is built from.

Parameter names are HF's (model.layers.0.self_attn.q_proj.weight), so that files, adapters and peers
need no map. The model sees packed tokens only: no batch dimension, no mask, no shift. It knows no
training technique.

Dimension letters: T tokens, U scored tokens, D model, V vocab, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_trl.model.attention import Attention, Context, PackedContext
from lean_trl.model.config import ModelConfig
from lean_trl.model.modules import Embedding, RMSNorm, grad_buffer, linear
from lean_trl.model.rope import RotaryEmbedding
from lean_trl.ops.layers import swiglu
from lean_trl.ops.linear_logprobs import linear_logprobs
from lean_trl.types import Batch, Scores


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, size: int | None = None, **factory: Any) -> None:
        super().__init__()
        size = size or config.intermediate_size
        width, bias = config.hidden_size, config.mlp_bias
        self.fused = config.family.fused_gate_up
        self.activation = config.activation
        if self.fused:
            self.gate_up_proj = linear(width, 2 * size, bias, **factory)
        else:
            self.gate_proj = linear(width, size, bias, **factory)
            self.up_proj = linear(width, size, bias, **factory)
        self.down_proj = linear(size, width, bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, up, activation=self.activation))


class Block(nn.Module):
    """One layer: attention, then MLP, each with a norm before it, after it or both, and a residual
    around it.
    """

    def __init__(self, config: ModelConfig, layer: int, **factory: Any) -> None:
        super().__init__()
        self.norms = config.family.norms
        self.residual_scale = config.residual_scale
        self.self_attn = Attention(config, layer, **factory)
        self.mlp = MLP(config, **factory)
        for name in self.norms:
            if name is not None:
                self.add_module(
                    name,
                    RMSNorm(
                        config.hidden_size, config.norm_eps, config.family.norm_offset, **factory
                    ),
                )

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        x = self._add(x, self._norm(1, self.self_attn(self._norm(0, x), ctx)))
        return self._add(x, self._norm(3, self.mlp(self._norm(2, x))))

    def _norm(self, place: int, x: Tensor) -> Tensor:
        name = self.norms[place]
        return x if name is None else self.get_submodule(name)(x)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.residual_scale == 1.0 else torch.add(x, y, alpha=self.residual_scale)


class Body(nn.Module):
    """Everything but the head."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.embedding_scale = config.embedding_scale
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **factory)
        self.layers = nn.ModuleList(
            Block(config, layer, **factory) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(
            config.hidden_size, config.norm_eps, config.family.norm_offset, **factory
        )
        self.rotary_emb = RotaryEmbedding(config.ropes)

    def forward(self, ids: Tensor, ctx: Context) -> Tensor:
        x = self.embed_tokens(ids)
        if self.embedding_scale != 1.0:
            # Rounded to the model's dtype, as it was when the family was trained; new_full waits
            # for nothing.
            x = x * x.new_full((), self.embedding_scale)
        for block in self.layers:
            x = block(x, ctx)
        return self.norm(x)


class HeadSettings(NamedTuple):
    """What stands between hidden states and the distribution beside the weight."""

    scale: float
    softcap: float | None


class Head(nn.Module):
    """An untied head: a module of its own, so that it can be sharded and gathered by itself."""

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.settings = HeadSettings(config.logits_scale, config.logits_softcap)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **factory))

    def forward(
        self, hidden: Tensor, batch: Batch, want: Sequence[str], temperature: float | Tensor
    ) -> Scores:
        return score(hidden, self.weight, batch, want, temperature, self.settings)


class CausalLM(nn.Module):
    """A language model over packed batches.

    model(batch, want) -> Scores of the batch's scored tokens, fp32; model.hidden(batch) -> [T, D]
    after the last norm; model.logits(hidden) -> fp32 [..., V], for sampling. `blocks` are the
    layers, each called as block(x, ctx).
    """

    def __init__(self, config: ModelConfig, *, attention: str = "auto", **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.model = Body(config, **factory)
        self.lm_head = None if config.tied else Head(config, **factory)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def forward(
        self, batch: Batch, want: Sequence[str] = (), *, temperature: float | Tensor = 1.0
    ) -> Scores:
        hidden = self.hidden(batch)
        if self.lm_head is not None:
            return self.lm_head(hidden, batch, want, temperature)
        # The tied head runs here, inside the root's forward: outside of it the weight may be
        # sharded.
        settings = HeadSettings(self.config.logits_scale, self.config.logits_softcap)
        return score(hidden, self.model.embed_tokens.weight, batch, want, temperature, settings)

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm, [T, D] in the model's dtype."""
        ctx = PackedContext(
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            end=batch.end,
            positions=batch.positions,
            rope=self.model.rotary_emb(batch.positions, batch.cu_seqlens),
            real=None,
            backend=self.attention,
        )
        return self.model(batch.input_ids, ctx)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> fp32 [..., V]. For sampling: it makes the logits, which model(batch) never
        does.
        """
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = F.linear(hidden, head.weight).float() * self.config.logits_scale
        cap = self.config.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def score(
    hidden: Tensor,
    weight: Tensor,
    batch: Batch,
    want: Sequence[str],
    temperature: float | Tensor,
    settings: HeadSettings,
) -> Scores:
    """Scores of the batch's scored tokens from hidden [T, D] and the head's weight [V, D]."""
    return linear_logprobs(
        hidden,
        weight,
        batch.targets,
        batch.rows,
        temperature=temperature,
        softcap=settings.softcap,
        scale=settings.scale,
        want=want,
        grad_into=grad_buffer(weight),
        row_map=batch.row_map,
    )
