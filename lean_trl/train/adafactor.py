"""Adafactor (Shazeer and Stern 2018, algorithm 4 with the update clipping of section 6): a second
moment kept as one number a row and one a column of each matrix, and no first moment.

The learning rate is the schedule's, times the matrix's root mean square (relative steps, section 8,
with a fixed rate), so rates are larger than AdamW's: 1e-3 to 1e-2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lean_trl.train.compact_adamw import cut_like
from lean_trl.train.distributed import local_part

SQUARE_FLOOR = 1e-30  # added to squared gradients
SCALE_FLOOR = 1e-3  # least root mean square that a matrix counts as
CLIP = 1.0  # most root mean square of an update


class Adafactor(Optimizer):
    """State of a matrix [R, C]: `rows` [R, 1] and `columns` [1, C]; of a vector: `square`."""

    def __init__(
        self, params: Iterable[Any], *, lr: float, decay: float = 0.8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, dict(lr=lr, decay=decay, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        weight, grad = local_part(parameter)[0], local_part(parameter.grad)[0].float()
        state = self._state(parameter, weight)
        step = state["step"].add_(1)
        keep = 1 - step ** -group["decay"]  # beta_2 of this step: 0 at the first
        square = grad.square().add_(SQUARE_FLOOR)
        if parameter.ndim < 2:
            root = local_part(state["square"])[0].lerp_(square, 1 - keep).sqrt()
        else:
            rows = local_part(state["rows"])[0].lerp_(square.mean(-1, keepdim=True), 1 - keep)
            columns = local_part(state["columns"])[0]
            columns.lerp_(self._mean_of_rows(parameter, square), 1 - keep)
            # v_ij = r_i c_j / mean(r)
            root = (rows / self._mean_of_rows(parameter, rows)).sqrt_() * columns.sqrt()
        update = grad.div_(root)
        update.div_((self._rms(parameter, update) / CLIP).clamp_min(1.0))
        size = self._rms(parameter, weight.float()).clamp_min(SCALE_FLOOR)
        wide = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
        weight.copy_(wide.sub_(update.mul_(size), alpha=group["lr"]))

    def _state(self, parameter: nn.Parameter, weight: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            if parameter.ndim < 2:
                state["square"] = cut_like(parameter, torch.zeros_like(weight, dtype=torch.float32))
            else:
                state["rows"] = cut_like(parameter, _zeros(weight, (*weight.shape[:-1], 1)))
                shape = (*weight.shape[:-2], 1, weight.shape[-1])
                columns = _zeros(weight, shape)
                # Of a stack of matrices each rank has its own; of one matrix all have the same.
                state["columns"] = columns if parameter.ndim == 2 else cut_like(parameter, columns)
        return state

    def _mean_of_rows(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """The mean over the rows of the whole matrix, [..., 1, columns]."""
        if parameter.ndim > 2:
            return values.mean(-2, keepdim=True)
        return _sum(parameter, values.sum(-2, keepdim=True)) / parameter.shape[-2]

    def _rms(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        return (_sum(parameter, values.square().sum()) / parameter.numel()).sqrt()


def _zeros(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, device=weight.device)


def _sum(parameter: nn.Parameter, values: Tensor) -> Tensor:
    """Summed over the ranks that hold parts of the parameter."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        shards = [i for i, place in enumerate(parameter.placements) if place.is_shard()]
        for dim in shards:
            if mesh.size(dim) > 1:
                dist.all_reduce(values, group=mesh.get_group(dim))
    return values
