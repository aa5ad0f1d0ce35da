"""The weight of the entropy bonus: fixed, or moved until the entropy is where it should be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lean_trl.loss_config import LossConfig
from lean_trl.types import Batch, StepReport


class EntropyController:
    """Adds `entropy_coef` to the batches of each window.

    Adaptive (He et al., "Skywork Open Reasoner 1", arXiv 2505.22312): after a step the coefficient
    goes up by delta when the window's entropy was below the target, else down, within
    [min, max]; and it counts only after windows whose entropy was at or below the target. The first
    window has no bonus. All of it are tensors: nothing waits for the device.
    """

    def __init__(self, loss: LossConfig) -> None:
        self.loss = loss
        self._coef = torch.tensor(loss.entropy_coef)
        # Of the last window; infinity: there was none.
        self._entropy = torch.tensor(torch.inf)

    @property
    def active(self) -> bool:
        return self.loss.use_adaptive_entropy or self.loss.entropy_coef > 0

    def mark(self, batch: Batch) -> Batch:
        """The batch with the coefficient of this window."""
        if not self.active:
            return batch
        coef = self._coef
        if self.loss.use_adaptive_entropy:
            coef = torch.where(self._entropy <= self.loss.entropy_target, coef, 0.0)
        return batch.with_extras(entropy_coef=coef)

    def observe(self, report: StepReport) -> None:
        """Take in what the step measured."""
        loss = self.loss
        if not loss.use_adaptive_entropy:
            return
        self._entropy = report.metrics["entropy"].detach()
        coef = self._coef.to(self._entropy.device)
        step = torch.where(self._entropy < loss.entropy_target, 1.0, -1.0)
        moved = coef + step * loss.entropy_coef_delta
        moved = moved.clamp(loss.entropy_coef_min, loss.entropy_coef_max)
        # A window without tokens has no entropy and moves nothing.
        self._coef = torch.where(self._entropy.isnan(), coef, moved)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self._coef.item(), "entropy": str(self._entropy.item())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coef = torch.tensor(state["coef"])
        self._entropy = torch.tensor(float(state["entropy"]))  # text: JSON has no infinity
