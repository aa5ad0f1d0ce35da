"""One optimizer step. It knows no method, no technique and no data format.

    loss = sum_k coef_k * sum(values_k * weights_k over the window and all ranks) / totals[unit_k]

The denominators are known before the first forward, so the micro-batch size, the accumulation, the
number of ranks, packing and order change nothing but rounding. Nothing is read back from the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lean_trl.train.distributed import compute_device, sum_gradients
from lean_trl.train.in_backward import InBackward
from lean_trl.train.metrics import Meter
from lean_trl.types import UNITS, Batch, LossTerms, Method, Metric, Scores, StepReport, Totals


def train_step(
    model: nn.Module,
    window: Sequence[Batch],
    method: Method,
    optimizer: Optimizer,
    *,
    totals: Totals,
    max_grad_norm: float | None,
    around: Callable[[], AbstractContextManager] = nullcontext,
    group: dist.ProcessGroup | None = None,
) -> StepReport:
    """Forward and backward over the window's micro-batches, then one update.

    model: model(batch, want) -> Scores, on one device; the batches are moved there. window: this
    rank's micro-batches, equally many on every rank. method: a bound Method. totals: {unit: count
    over the window and all ranks}. max_grad_norm: clip the global norm to it; None or 0: measure
    only. around: a context for each micro-batch's forward and backward (techniques). group: the
    ranks that share the window; None: one.

    Gradients must be None or zero on entry and are None on exit. A window with nothing to learn
    from (totals[method.unit] == 0) leaves weights, optimizer state and weight decay alone. Returns
    tensors on the device.
    """
    device = compute_device(model)
    meter = Meter(device)
    batches = [batch.to(device) for batch in window]
    if method.window_statistics is not None:
        batches = _with_statistics(model, batches, method, group, meter)

    def backward(last: bool = True) -> None:
        for batch in batches:
            with around():
                scores = model(batch, method.want)
                objective = method.objective(scores, batch)
                loss = reduce_terms(objective, totals)
                loss.backward()
            if last:
                _log(meter, batch, loss, objective)

    learns = totals[method.unit] > 0
    if isinstance(optimizer, InBackward):
        assert len(batches) == 1, "an optimizer in backward steps at every micro-batch"
        grad_norm = optimizer.run(backward, max_grad_norm, learns)
    else:
        backward()
        parameters = [p for p in model.parameters() if p.requires_grad]
        sum_gradients(parameters, group)
        grad_norm = clip_gradients(parameters, max_grad_norm)
        if learns:
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    metrics = meter.reduce(group)
    return StepReport(metrics.pop("loss"), grad_norm, metrics)


def _log(meter: Meter, batch: Batch, loss: Tensor, objective: LossTerms) -> None:
    # A vector of all-zero weights must not reach the log as a number: each metric brings its own
    # weights.
    meter.add({"loss": Metric(loss.reshape(1), how="sum"), **objective.metrics})
    padding = 1 - batch.num_real_tokens / batch.num_tokens
    meter.add_host("padding_fraction", padding, batch.num_tokens)


def reduce_terms(objective: LossTerms, totals: Totals) -> Tensor:
    """This micro-batch's share of the loss: the one place that divides. fp32 scalar.

    >>> from lean_trl.types import Term
    >>> terms = LossTerms((Term(torch.tensor([2.0, 1.0, 0.5, 0.5, 1.0]), None, "tokens"),))
    >>> reduce_terms(terms, {"tokens": 6})       # the sixth token lies in another micro-batch
    tensor(0.8333)
    """
    parts = [term.total() / max(totals[term.unit], 1) for term in objective.terms]
    return torch.stack(parts).sum()


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
    """The global L2 norm before clipping: fp32 scalar, on the device of the gradients.

    Gradients are scaled in place by min(1, max_norm / (norm + 1e-6)). They may be cut over
    different meshes, or not at all.
    """
    layouts: dict[object, list[Tensor]] = {}  # torch cannot add norms across meshes
    for grad in (p.grad for p in parameters if p.grad is not None):
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        layouts.setdefault(layout, []).append(grad)
    norms = [get_total_norm(grads) for grads in layouts.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    if max_norm:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grads in layouts.values():
            local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
            torch._foreach_mul_(local, factor.to(local[0].device))
    return norm.float()


def count_totals(window: Sequence[Batch], group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """{unit: count} over the window and all ranks, for callers that have no plan that knows it
    already.

    Uses one all-reduce of a few integers on the CPU.
    """
    counts = torch.zeros(len(UNITS), dtype=torch.int64)
    for batch in window:
        counts += torch.tensor([batch.totals[unit] for unit in UNITS])
    if group is not None:
        dist.all_reduce(counts, group=group)
    return dict(zip(UNITS, counts.tolist(), strict=True))


def _with_statistics(
    model: nn.Module,
    batches: list[Batch],
    method: Method,
    group: dist.ProcessGroup | None,
    meter: Meter,
) -> list[Batch]:
    """Let the method score what it likes without gradients and write statistics into extras."""
    assert method.window_statistics is not None

    def score(batch: Batch) -> Scores:
        meter.add_host("extra_forward_tokens", batch.num_real_tokens, how="sum")
        return model(batch, method.want)

    with torch.no_grad():
        return method.window_statistics(score, batches, group)
