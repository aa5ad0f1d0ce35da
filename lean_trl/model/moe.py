"""Mixture of experts: a router picks k experts for each token, and their outputs are summed.

Tokens are sorted by expert and each expert's rows are one part of a grouped product on fixed shapes
[T * k, ...]: no loop over experts, no token is dropped, nothing is read back (Gale et al. 2022,
MegaBlocks). All experts live on every rank: expert parallelism is out of scope.

Dimension letters: T tokens, D model, E experts, k experts of a token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_trl.model.config import ModelConfig, MoE
from lean_trl.model.modules import MLP
from lean_trl.ops.grouped_mm import grouped_mm
from lean_trl.ops.layers import swiglu


class Routing(NamedTuple):
    """What a router did, for the load-balancing loss. Padding counts nowhere."""

    probs: Tensor  # fp32 [E, T]; softmax of its logits; 0 for padding
    counts: Tensor  # fp32 [E]; tokens that chose each expert


class Router(nn.Module):
    """Which experts a token has, and with what weight."""

    e_score_correction_bias: Tensor | None

    def __init__(self, config: ModelConfig, moe: MoE, **factory: Any) -> None:
        super().__init__()
        experts = config.family.experts
        assert experts is not None
        self.moe = moe
        self.choose = CHOOSE[experts.score]
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, **factory))
        self.bias = None
        if experts.router_bias:
            self.bias = nn.Parameter(torch.empty(moe.num_experts, **factory))
        # Moved by hand in pre-training to balance the experts, never by a gradient.
        correction = None
        if experts.score == "sigmoid":
            factory["dtype"] = torch.float32
            correction = torch.empty(moe.num_experts, **factory)
        self.register_buffer("e_score_correction_bias", correction)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, D] -> (logits [T, E], weights [T, k], experts int64 [T, k])."""
        if self.e_score_correction_bias is not None:  # trained with a router in full precision
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            logits = F.linear(x, self.weight.to(x.dtype))
        else:
            logits = F.linear(x, self.weight, self.bias)
        weights, experts = self.choose(logits, self.moe, self.e_score_correction_bias)
        return logits, weights, experts


def _softmax(logits: Tensor, moe: MoE, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    weights, experts = _full(logits).softmax(-1).topk(moe.top_k, dim=-1)
    if moe.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def _topk_softmax(logits: Tensor, moe: MoE, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    chosen, experts = logits.topk(moe.top_k, dim=-1)
    return _full(chosen).softmax(-1), experts


def _sigmoid(logits: Tensor, moe: MoE, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3, section 2.1.2: the bias decides who is chosen, never with what weight."""
    assert bias is not None
    scores = logits.sigmoid()
    choice = scores.detach() + bias
    grouped = choice.unflatten(-1, (moe.groups, -1))
    group_score = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    group = group_score.topk(moe.top_groups, dim=-1).indices
    allowed = torch.zeros_like(group_score).scatter(-1, group, 1.0)
    choice = grouped.masked_fill(allowed[..., None] == 0, -torch.inf).flatten(-2)
    experts = choice.topk(moe.top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if moe.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * moe.scaling, experts


Choose = Callable[[Tensor, MoE, Tensor | None], tuple[Tensor, Tensor]]
CHOOSE: dict[str, Choose] = {
    "softmax": _softmax,
    "topk_softmax": _topk_softmax,
    "sigmoid": _sigmoid,
}


class Experts(nn.Module):
    """All experts' matrices, one tensor for each kind of matrix."""

    def __init__(self, config: ModelConfig, moe: MoE, **factory: Any) -> None:
        super().__init__()
        assert config.family.experts is not None
        num, width, size = moe.num_experts, config.hidden_size, moe.size
        self.moe = moe
        self.activation = config.activation
        self.columns = config.family.experts.layout == "columns"
        up, down = (num, 2 * size, width), (num, width, size)
        self.gate_up_proj_bias = self.down_proj_bias = None
        if self.columns:
            up, down = (num, width, 2 * size), (num, size, width)
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num, 2 * size, **factory))
            self.down_proj_bias = nn.Parameter(torch.empty(num, width, **factory))
        self.gate_up_proj = nn.Parameter(torch.empty(up, **factory))
        self.down_proj = nn.Parameter(torch.empty(down, **factory))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """x [T, D], experts and weights [T, k], counts int64 [E] -> [T, D]."""
        num_tokens, k = experts.shape
        expert = experts.flatten()
        order = expert.argsort(stable=True)
        ends = counts.cumsum(0).to(torch.int32)
        h = x.index_select(0, order // k)
        h = self._linear(h, self.gate_up_proj, self.gate_up_proj_bias, ends, expert, order)
        h = self._act(h)
        h = self._linear(h, self.down_proj, self.down_proj_bias, ends, expert, order)
        # Back to token order, then one product sums the k outputs: deterministic, unlike index_add.
        h = h.index_select(0, order.argsort()).view(num_tokens, k, -1)
        return torch.bmm(weights.to(h.dtype).unsqueeze(1), h).squeeze(1)

    def _linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Tensor,
        expert: Tensor,
        order: Tensor,
    ) -> Tensor:
        y = grouped_mm(x, weight, ends, transposed=not self.columns)
        return y if bias is None else y + bias.index_select(0, expert[order])

    def _act(self, gate_up: Tensor) -> Tensor:
        if not self.columns:
            gate, up = gate_up.chunk(2, dim=-1)
            return swiglu(gate, up, activation=self.activation)
        # gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both clamped.
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate = gate.clamp(max=self.moe.limit)
        up = up.clamp(-self.moe.limit, self.moe.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.moe.alpha))


class SparseMLP(nn.Module):
    """The MLP of a layer with experts."""

    def __init__(self, config: ModelConfig, moe: MoE, **factory: Any) -> None:
        super().__init__()
        assert config.family.experts is not None
        self.router_name = config.family.experts.router
        self.add_module(self.router_name, Router(config, moe, **factory))
        self.experts = Experts(config, moe, **factory)
        self.shared_experts = None
        if moe.shared_size:
            self.shared_experts = MLP(config, moe.shared_size, **factory)

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Routing]:
        """x [T, D], real bool [T] -> ([T, D], what the router did)."""
        logits, weights, experts = self.get_submodule(self.router_name)(x)
        ones = torch.ones_like(experts).flatten()
        counts = ones.new_zeros(logits.shape[1]).scatter_add(0, experts.flatten(), ones)
        y = self.experts(x, experts, weights, counts)
        if self.shared_experts is not None:
            y = y + self.shared_experts(x)
        probs = _full(logits).softmax(-1)
        if real is not None:
            probs = probs * real[:, None]
            chosen = real[:, None].expand(experts.shape).flatten().to(ones.dtype)
            counts = torch.zeros_like(counts).scatter_add(0, experts.flatten(), chosen)
        return y, Routing(probs.t().float(), counts.float())


def _full(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
