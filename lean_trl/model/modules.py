"""The small modules of the decoder. Each holds weights under their HF names and calls one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lean_trl.model.config import ModelConfig
from lean_trl.ops.layers import embedding, rms_norm, swiglu


def linear(size_in: int, size_out: int, bias: bool, **factory: Any) -> nn.Linear:
    """A plain nn.Linear: what adapters and quantisation look for."""
    return nn.Linear(size_in, size_out, bias=bool(bias), **factory)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset), statistics in fp32 (Zhang, Sennrich 2019)."""

    def __init__(self, size: int, eps: float, offset: float = 0.0, **factory: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size, **factory))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, size: int, **factory: Any) -> None:
        super().__init__()
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


class Embedding(nn.Embedding):
    """Rows of weight [V, D]; an nn.Embedding to adapters. Its gradient is added in place."""

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, grad_into=grad_buffer(self.weight))


def grad_buffer(weight: Tensor) -> Tensor | None:
    """weight.grad (zeros where there was none) for ops that add a large gradient in place, or None:
    leave it to autograd.

    The embedding and the head are the two matrices of vocabulary size. Adding straight into .grad
    means that neither a second [V, D] gradient nor, when the head is tied, a sum of two ever
    exists. Only a leaf that is being trained has a .grad to add to; under FSDP2 that is the
    unsharded parameter, whose .grad is what gets reduced.
    """
    if not (weight.requires_grad and weight.is_leaf and torch.is_grad_enabled()):
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)  # fp32 for a sharded bf16
    return weight.grad
