"""Held-out loss, each row once and with its own weight, for any batch size and number of ranks.

Statistics of a window (Method.window_statistics) are of one evaluation window: a fixed number of
rows, so that losses which compare rows with each other (aot, KTO's KL, expert shares) depend on
neither batch size nor ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from lean_trl.data.plan import Window
from lean_trl.train.distributed import compute_device, reshard
from lean_trl.train.metrics import Meter
from lean_trl.types import Method, Metric


@torch.no_grad()
def evaluate(
    model: nn.Module,
    windows: Iterable[Window],
    method: Method,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """{"eval_loss": ..., "eval_entropy": ...} over all windows, equal on all ranks of `group`.

    The loss is sum_k coef_k * sum(values_k * weights_k) / (total of unit_k over the whole set): a
    mean over tokens for SFT, never a mean of batch means. Three rows with token losses 1 1 1 1, 2 2
    and 5 give 13 / 7 = 1.857143 however they are batched. The model's training mode is restored.
    Raises ValueError when there is nothing to evaluate.
    """
    device = compute_device(model)
    was_training = model.training
    model.eval()
    meter = Meter(device)
    totals: dict[str, int] = {}
    for window in windows:
        for unit, count in window.totals.items():
            totals[unit] = totals.get(unit, 0) + count
        batches = [batch.to(device) for batch in window.batches]
        if method.window_statistics is not None:
            score = partial(model, want=method.want)
            batches = method.window_statistics(score, batches, group)
        for batch in batches:
            objective = method.objective(model(batch, method.want), batch)
            meter.add(objective.metrics)
            for term in objective.terms:
                meter.add({f"sum/{term.unit}": Metric(term.total().reshape(1), how="sum")})
    model.train(was_training)
    reshard(model)
    if not totals.get(method.unit):
        raise ValueError(
            f"the evaluation set has no {method.unit} to score: "
            "check data.eval_path and data.eval_split"
        )
    metrics = {name: value.item() for name, value in meter.reduce(group).items()}
    sums = {unit: metrics.pop(f"sum/{unit}") for unit in totals if f"sum/{unit}" in metrics}
    loss = sum(value / max(totals[unit], 1) for unit, value in sums.items())
    return {"eval_loss": loss, **{f"eval_{name}": value for name, value in metrics.items()}}
