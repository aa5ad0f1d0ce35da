"""The optimizer in backward: gradients of all parameters are never there together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.shard import sharding_kind
from lean_trl.techniques.technique import Evidence, Switch, Technique, Trial
from lean_trl.train.in_backward import InBackward


class OptimizerInBackward(Technique):
    """`memory.optimizer_in_backward`. train.optim builds it; here it is checked and shown."""

    name = "optimizer_in_backward"
    settings = ("memory.optimizer_in_backward",)

    def __init__(self, config: Config) -> None:
        options = config.memory.optimizer_in_backward
        self.enabled = options is not None
        self.kind = sharding_kind(config)
        self.clip = None if options is None else options.clip

    @classmethod
    def switches(cls) -> tuple[Switch, ...]:
        on: dict[str, Any] = {"memory.optimizer_in_backward": {}, "train.max_grad_norm": None}
        return (Switch(cls.name, on, {"memory.optimizer_in_backward": None}),)

    def on_model(self, model: CausalLM) -> None:
        size = dist.get_world_size() if dist.is_initialized() else 1
        if size > 1 and self.kind != "fsdp":
            raise ValueError(
                f"memory.optimizer_in_backward needs summed gradients when they arrive, which "
                f"distributed.sharding {self.kind} has only after backward: set it fsdp"
            )

    def evidence(self, trial: Trial) -> Evidence:
        optimizer = trial.optimizer
        if not isinstance(optimizer, InBackward):
            return Evidence(0, "the optimizer steps after backward")
        cost = {
            "two_passes": ", clipped exactly: forward and backward run twice",
            "previous_norm": ", clipped by the norm of the step before, which is not exact",
        }.get(self.clip or "", "")
        count = len(optimizer.optimizers)
        text = f"{optimizer.arrived} of {count} parameters step as their gradient arrives{cost}"
        return Evidence(optimizer.arrived, text)
