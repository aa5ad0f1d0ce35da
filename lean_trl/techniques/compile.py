"""torch.compile for each block: fewer, fused kernels. One graph serves all blocks of one kind, and
all lengths, because the number of tokens is dynamic in it.

Innermost of what wraps a block, so checkpointing runs the compiled block again and offloading moves
what it saves. Scoring and sampling without gradients run the plain block.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch._dynamo.utils import counters

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.technique import Evidence, Technique, Trial


class Compile(Technique):
    """`memory.compile`."""

    name = "compile"
    settings = ("memory.compile",)
    backend: ClassVar[str] = "inductor"

    def __init__(self, config: Config) -> None:
        self.enabled = config.memory.compile
        self.captured_before = _captured()

    def on_model(self, model: CausalLM) -> None:
        for block in model.blocks:
            block.forward = _Compiled(block, self.backend)

    def evidence(self, trial: Trial) -> Evidence:
        captured = _captured() - self.captured_before
        breaks = sum(counters["graph_break"].values())
        blocks = len(trial.model.blocks)
        text = f"{captured} operations captured for {blocks} blocks, {breaks} graph breaks"
        return Evidence(captured, text)


class _Compiled:
    def __init__(self, block: nn.Module, backend: str) -> None:
        self.plain = block.forward
        self.compiled = torch.compile(block.forward, backend=backend, dynamic=True)

    def __call__(self, *args: Any) -> Any:
        return (self.compiled if torch.is_grad_enabled() else self.plain)(*args)


def _captured() -> int:
    """Operations in the graphs that this process has compiled."""
    return counters["stats"]["calls_captured"]
