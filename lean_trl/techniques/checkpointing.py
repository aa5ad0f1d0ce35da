"""Activation checkpointing: keep a block's input, run the block again in backward
(Chen et al. 2016).

Full checkpointing costs one more forward of the blocks, a third more time, and saves everything
else that a block keeps. `selective` also keeps attention's output and log-sum-exp, [T, N*H] and
[T, N] fp32, so that attention, the part whose cost grows with the square of the length, runs once.
The head is not part of it: it computes its logits tile by tile and keeps none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lean_trl.config import Config
from lean_trl.memory_config import CheckpointingConfig
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.technique import Evidence, Technique, Trial


class ActivationCheckpointing(Technique):
    """Wraps the forward of chosen blocks; parameter names and the model's code stay as they are."""

    name = "activation_checkpointing"
    settings = ("memory.activation_checkpointing",)

    def __init__(self, config: Config) -> None:
        self.enabled = config.memory.activation_checkpointing
        self.options = config.memory.activation_checkpointing_kwargs
        self.chosen: list[Recomputed] = []

    def on_model(self, model: CausalLM) -> None:
        for index in blocks_to_run_again(len(model.blocks), self.options):
            block = model.blocks[index]
            self.chosen.append(Recomputed(block, self.options.selective))
            block.forward = self.chosen[-1]

    def evidence(self, trial: Trial) -> Evidence:
        again = sum(each.runs > each.calls for each in self.chosen)
        text = f"{again} of {len(trial.model.blocks)} blocks run again in backward"
        if self.options.selective:
            kept = sum(each.attention_kept > 0 for each in self.chosen)
            return Evidence(min(again, kept), f"{text}, attention kept in {kept}")
        return Evidence(again, text)


def blocks_to_run_again(num_blocks: int, options: CheckpointingConfig) -> list[int]:
    """Indices of the blocks that keep their input only.

    A budget keeps the LAST blocks whole: backward frees them before the first block runs again, so
    their activations and a recomputed block's are never there together.

    >>> blocks_to_run_again(6, CheckpointingConfig(every=2)), blocks_to_run_again(
    ...     6, CheckpointingConfig(budget=0.4))
    ([0, 2, 4], [0, 1, 2, 3])
    """
    if options.budget is not None:
        kept = int(options.budget * num_blocks + 1e-9)
        return list(range(num_blocks - kept))
    return list(range(0, num_blocks, options.every))


class Recomputed:
    """A block's forward that runs again in backward.

    calls and runs count how often it was called and how often the block really ran.
    """

    def __init__(self, block: nn.Module, selective: bool) -> None:
        self.forward = block.forward
        # Saving and restoring generators is only needed for what draws from them.
        self.random = any(isinstance(m, nn.Dropout) and m.p > 0 for m in block.modules())
        self.contexts = partial(_keep_attention, self._keep) if selective else None
        self.calls = self.runs = self.attention_kept = 0

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args)
        self.calls += 1
        options: dict[str, Any] = {} if self.contexts is None else {"context_fn": self.contexts}
        # Non-reentrant: inputs that need no gradient (a frozen embedding) still let adapters learn.
        return checkpoint(
            self._run, *args, use_reentrant=False, preserve_rng_state=self.random, **options
        )

    def _run(self, *args: Any) -> Any:
        self.runs += 1
        return self.forward(*args)

    def _keep(self) -> None:
        self.attention_kept += 1


def _keep_attention(count: Callable[[], None]) -> tuple[Any, Any]:
    """Contexts for the forward and for running again: attention's results are kept."""
    attention = torch.ops.lean.varlen_attention.default

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not attention:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not ctx.is_recompute:
            count()
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)
