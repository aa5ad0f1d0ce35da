"""Optimizers that keep less than AdamW's two fp32 moments: the proof that this one does."""

from __future__ import annotations

from torch import nn

from lean_trl.config import Config
from lean_trl.techniques.technique import Evidence, Switch, Technique, Trial
from lean_trl.train.distributed import local_part

ADAMW_BYTES = 8  # a weight: two fp32 moments


class OptimizerState(Technique):
    """`train.optimizer` other than adamw. train.optim builds it; here it is only measured."""

    name = "optimizer_state"
    settings = ("train.optimizer",)

    def __init__(self, config: Config) -> None:
        self.kind = config.train.optimizer
        self.enabled = self.kind != "adamw"

    @classmethod
    def switches(cls) -> tuple[Switch, ...]:
        kinds = ("adamw_bf16_sr", "adamw_8bit", "adamw_4bit", "adafactor", "muon")
        off = {"train.optimizer": "adamw"}
        return tuple(Switch(kind, {"train.optimizer": kind}, off, exact=False) for kind in kinds)

    def evidence(self, trial: Trial) -> Evidence:
        """Steps the largest matrix alone, looks at its state, and takes both back."""
        trained = [p for p in trial.model.parameters() if p.requires_grad]
        of_blocks = [p for p in trial.model.blocks.parameters() if p.requires_grad and p.ndim > 1]
        largest = max(of_blocks or trained, key=nn.Parameter.numel)
        for parameter in trained:
            if parameter is not largest:
                parameter.grad = None
        before = local_part(largest)[0].clone()
        trial.optimizer.step()
        local_part(largest)[0].copy_(before)
        state = [local_part(tensor)[0] for tensor in trial.optimizer.state.pop(largest).values()]
        size = sum(t.nbytes for t in state) / max(before.numel(), 1)
        dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in state if t.numel() > 1})
        text = f"{self.kind}: {size:.2f} bytes a weight of state ({', '.join(dtypes)})"
        return Evidence(max(0.0, ADAMW_BYTES - size), f"{text}, {ADAMW_BYTES} with adamw")
