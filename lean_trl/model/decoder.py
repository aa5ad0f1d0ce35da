"""The one decoder that every family is built from.

Parameter names are HF's (model.layers.0.self_attn.q_proj.weight), so that files, adapters and peers
need no map. The model sees packed tokens only: no batch dimension, no mask, no shift. It knows no
training technique.

Dimension letters: T tokens, U scored tokens, D model, V vocab, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_trl.model.attention import Attention, Context, PackedContext
from lean_trl.model.attention_latent import LatentAttention
from lean_trl.model.config import ModelConfig
from lean_trl.model.modules import MLP, Embedding, RMSNorm, grad_buffer
from lean_trl.model.moe import Routing, SparseMLP
from lean_trl.model.rope import RotaryEmbedding
from lean_trl.ops.linear_logprobs import Adapter, linear_logprobs
from lean_trl.types import Batch, Scores

ATTENTION = {"grouped": Attention, "latent": LatentAttention}


class Block(nn.Module):
    """One layer: attention, then MLP, each with a norm before it, after it or both, and a residual
    around it.
    """

    def __init__(self, config: ModelConfig, layer: int, **factory: Any) -> None:
        super().__init__()
        self.norms = config.family.norms
        self.residual_scale = config.residual_scale
        self.self_attn = ATTENTION[config.family.attention](config, layer, **factory)
        self.sparse = config.layers[layer].sparse
        self.mlp: nn.Module
        if self.sparse:
            assert config.moe is not None
            self.mlp = SparseMLP(config, config.moe, **factory)
        else:
            self.mlp = MLP(config, config.intermediate_size, **factory)
        for name in self.norms:
            if name is not None:
                self.add_module(
                    name,
                    RMSNorm(
                        config.hidden_size, config.norm_eps, config.family.norm_offset, **factory
                    ),
                )

    def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Routing | None]:
        """x [T, D] -> ([T, D], what the layer's router did)."""
        routing = None
        x = self._add(x, self._norm(1, self.self_attn(self._norm(0, x), ctx)))
        h = self._norm(2, x)
        if self.sparse:
            h, routing = self.mlp(h, ctx.real)
        else:
            h = self.mlp(h)
        return self._add(x, self._norm(3, h)), routing

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

    def forward(self, ids: Tensor, ctx: Context) -> tuple[Tensor, Routing | None]:
        """ids [T] -> (hidden states after the last norm [T, D], the routers' sum)."""
        x = self.embed_tokens(ids)
        if self.embedding_scale != 1.0:
            # Rounded to the model's dtype, as it was when the family was trained; new_full waits
            # for nothing.
            x = x * x.new_full((), self.embedding_scale)
        total: Routing | None = None
        for block in self.layers:
            x, routing = block(x, ctx)
            if routing is not None:
                total = routing if total is None else Routing(*map(torch.add, total, routing))
        return self.norm(x), total


class HeadSettings(NamedTuple):
    """What stands between hidden states and the distribution beside the weight."""

    scale: float
    softcap: float | None


class Head(nn.Module):
    """An untied head: a module of its own, so that it can be sharded and gathered by itself.

    adapter: (low [T, r], up [V, r]) of a low-rank adapter on the weight.
    """

    def __init__(self, config: ModelConfig, **factory: Any) -> None:
        super().__init__()
        self.settings = HeadSettings(config.logits_scale, config.logits_softcap)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **factory))

    def forward(
        self,
        hidden: Tensor,
        batch: Batch,
        want: Sequence[str],
        temperature: float | Tensor,
        adapter: Adapter | None = None,
    ) -> Scores:
        return score(hidden, self.weight, batch, want, temperature, self.settings, adapter)

    def logits(self, hidden: Tensor, adapter: Adapter | None = None) -> Tensor:
        """See CausalLM.logits."""
        return make_logits(hidden, self.weight, self.settings, adapter)


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
        self, batch: Batch, want: Sequence[str] = (), *, temperature: float | Tensor | None = None
    ) -> Scores:
        """temperature: what logits are divided by; None: the batch's own."""
        if temperature is None:
            temperature = batch.temperature
        hidden, routing = self._run(batch)
        scores = self._score(hidden, batch, want, temperature)
        if routing is None:
            return scores
        num_sparse = sum(layer.sparse for layer in self.config.layers)
        return replace(
            scores, router_probs=routing.probs / num_sparse, expert_counts=routing.counts
        )

    def _score(
        self, hidden: Tensor, batch: Batch, want: Sequence[str], temperature: float | Tensor
    ) -> Scores:
        if self.lm_head is not None:
            return self.lm_head(hidden, batch, want, temperature)
        # The tied head runs here, inside the root's forward: outside of it the weight may be
        # sharded.
        settings = HeadSettings(self.config.logits_scale, self.config.logits_softcap)
        return score(hidden, self.model.embed_tokens.weight, batch, want, temperature, settings)

    def adapt_files(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """{name: stored tensor} of a folder, as this kind of model is to be filled from it."""
        return stored

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm, [T, D] in the model's dtype."""
        return self._run(batch)[0]

    def _run(self, batch: Batch) -> tuple[Tensor, Routing | None]:
        if batch.max_id >= self.config.vocab_size:
            raise ValueError(
                f"token id {batch.max_id} is not one of the {self.config.vocab_size} that the "
                "model knows: the tokenizer, or the ids in the rows, are of another model"
            )
        ctx = PackedContext(
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            end=batch.end,
            positions=batch.positions,
            rope=self.model.rotary_emb(batch.positions, batch.cu_seqlens),
            real=real_tokens(batch) if self.config.moe is not None else None,
            backend=self.attention,
        )
        return self.model(batch.input_ids, ctx)

    def run(self, ids: Tensor, ctx: Context) -> Tensor:
        """Hidden states of ids [T] in a context of the caller's, [T, D]: for generation."""
        return self.model(ids, ctx)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> fp32 [..., V]. For sampling: it makes the logits, which model(batch) never
        does.
        """
        if self.lm_head is not None:
            return self.lm_head.logits(hidden)
        settings = HeadSettings(self.config.logits_scale, self.config.logits_softcap)
        return make_logits(hidden, self.model.embed_tokens.weight, settings)


def make_logits(
    hidden: Tensor, weight: Tensor, settings: HeadSettings, adapter: Adapter | None = None
) -> Tensor:
    """fp32 [..., V] of hidden [..., D] and the head's weight [V, D] (fp64 for fp64)."""
    logits = F.linear(hidden, weight)
    if adapter is not None:
        logits = logits + F.linear(*adapter)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * settings.scale
    cap = settings.softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def real_tokens(batch: Batch) -> Tensor | None:
    """bool [T]: True for what is not padding; None when nothing is.

    Padding stands at the end of a tree, behind the last token of its last sequence, or is a tree
    without a sequence.
    """
    if batch.num_real_tokens == batch.num_tokens:
        return None
    last = batch.last.to(batch.cu_seqlens.dtype)
    num_trees = batch.cu_seqlens.shape[0] - 1
    tree_of_last = torch.searchsorted(batch.cu_seqlens, last, right=True) - 1
    reach = last.new_full((num_trees,), -1).scatter_reduce(0, tree_of_last, last, "amax")
    row = torch.arange(batch.num_tokens, device=last.device)
    tree = torch.repeat_interleave(
        torch.arange(num_trees, device=last.device),
        batch.cu_seqlens.diff().long(),
        output_size=batch.num_tokens,
    )
    return row <= reach[tree]


def score(
    hidden: Tensor,
    weight: Tensor,
    batch: Batch,
    want: Sequence[str],
    temperature: float | Tensor,
    settings: HeadSettings,
    adapter: Adapter | None = None,
) -> Scores:
    """Scores of the batch's scored tokens from hidden [T, D] and the head's weight [V, D]."""
    return linear_logprobs(
        hidden,
        weight,
        batch.targets,
        batch.rows,
        adapter=adapter,
        temperature=temperature,
        softcap=settings.softcap,
        scale=settings.scale,
        want=want,
        grad_into=grad_buffer(weight),
        row_map=batch.row_map,
    )
