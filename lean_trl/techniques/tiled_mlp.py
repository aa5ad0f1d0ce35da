"""The MLP in tiles of tokens, for very long sequences: its wide intermediates exist for one tile at
a time, in forward and in backward (Arctic Long Sequence Training, Bekman et al. 2025, section 3.3).

Backward runs each tile's forward again. Under activation checkpointing that is not a second time:
the input is saved by a node of its own before the MLP, and running a block again stops at the last
thing that backward needs, so it never gets to the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.model.moe import SparseMLP
from lean_trl.techniques.technique import Evidence, Switch, Technique, Trial


class TiledMLP(Technique):
    """`memory.tiled_mlp`: tokens of a tile. Layers with experts stay as they are."""

    name = "tiled_mlp"
    settings = ("memory.tiled_mlp",)

    def __init__(self, config: Config) -> None:
        self.tokens = config.memory.tiled_mlp
        self.enabled = self.tokens is not None
        self.wrapped: list[_Tiled] = []

    @classmethod
    def switches(cls) -> tuple[Switch, ...]:
        return (Switch(cls.name, {"memory.tiled_mlp": 8}, {"memory.tiled_mlp": None}),)

    def on_model(self, model: CausalLM) -> None:
        assert self.tokens is not None
        for block in model.blocks:
            mlp = block.get_submodule("mlp")
            if not isinstance(mlp, SparseMLP):
                self.wrapped.append(_Tiled(mlp, self.tokens))
                mlp.forward = self.wrapped[-1]

    def evidence(self, trial: Trial) -> Evidence:
        tiled = [each for each in self.wrapped if each.tiles]
        tokens = trial.batch.num_tokens
        # A trial is short: one tile holds all of it when tiles are for long sequences.
        size = min(self.tokens or 0, tokens)
        return Evidence(len(tiled), f"{len(tiled)} MLPs ran {size} of {tokens} tokens at a time")


class _Tiled:
    """The forward of an MLP, x [T, D] -> [T, D]."""

    def __init__(self, mlp: nn.Module, tokens: int) -> None:
        self.mlp, self.tokens = mlp, tokens
        self.forward = mlp.forward
        self.tiles = 0

    def __call__(self, x: Tensor) -> Tensor:
        size = self.tokens
        trained = [p for p in self.mlp.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (x.requires_grad or trained):
            return torch.cat([self.forward(tile) for tile in x.split(size)])
        self.tiles += 1
        kept: list[Any] = []
        return _TiledProduct.apply(_Keep.apply(x, kept), kept, self.forward, size, *trained)


class _Keep(torch.autograd.Function):
    """x itself, saved for the node that comes after this one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        kept.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _TiledProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kept: list[Any],
        forward: Callable[[Tensor], Tensor],
        size: int,
        *trained: Tensor,
    ) -> Tensor:
        ctx.kept, ctx.run, ctx.size, ctx.trained = kept, forward, size, trained
        return torch.cat([forward(tile) for tile in x.split(size)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.kept[0].saved_tensors
        # Gradients of weights add up in fp32, as they would over one long product.
        sums = [torch.zeros_like(p, dtype=_wide(p)) for p in ctx.trained]
        grads = []
        for tile, part in zip(x.split(ctx.size), dy.split(ctx.size), strict=True):
            leaf = tile.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.run(leaf)
            grad, *others = torch.autograd.grad(y, (leaf, *ctx.trained), part)
            grads.append(grad)
            for total, other in zip(sums, others, strict=True):
                total.add_(other)
        weights = [s.to(p.dtype) for s, p in zip(sums, ctx.trained, strict=True)]
        return torch.cat(grads), None, None, None, *weights


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
