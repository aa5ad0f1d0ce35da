"""Activation checkpointing: keep a block's input, run the block again in backward.

Costs about one more forward of the blocks (a third more time), saves everything else that a block
keeps for backward. The head is not part of it: it recomputes its logits by itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch.utils.checkpoint import checkpoint

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM


class ActivationCheckpointing:
    """Wraps the forward of every block; parameter names and the model's code stay as they are."""

    name = "activation_checkpointing"

    def __init__(self, config: Config) -> None:
        self.enabled = config.memory.activation_checkpointing

    def on_model(self, model: CausalLM) -> None:
        for block in model.blocks:
            # Non-reentrant, so that frozen inputs (adapters) still give gradients; no early stop
            # surprises.
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    def around_micro_batch(self) -> AbstractContextManager:
        return nullcontext()
