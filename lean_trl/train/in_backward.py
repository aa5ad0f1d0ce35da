"""The update inside backward: a parameter steps when its gradient is there, and the gradient goes.

So gradients of all parameters are never there together (Lv et al. 2023, LOMO, section 3). The
embedding and the head add theirs in place; autograd calls their hooks all the same, when every use
of them is through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lean_trl.train.distributed import local_part

Clip = Literal["two_passes", "previous_norm"]


class InBackward(Optimizer):
    """An optimizer for each parameter. `run` is a whole step; outside of it nothing steps.

    clip: how the global norm is bounded. two_passes: backward runs twice, first to measure; exact.
    previous_norm: by the norm of the step before; not exact. None: it is not.
    """

    def __init__(
        self, optimizers: Mapping[nn.Parameter, Optimizer], clip: Clip | None = None
    ) -> None:
        self.optimizers, self.clip = dict(optimizers), clip
        self.param_groups = [g for each in optimizers.values() for g in each.param_groups]
        self.arrived = 0  # gradients that came one by one, since the run began
        self._on_arrival: Callable[[nn.Parameter], None] = lambda parameter: None
        self._squares: list[Tensor] = []
        self._factor: Tensor | None = None
        self._previous: Tensor | None = None
        for parameter in self.optimizers:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    @property
    def state(self) -> dict[nn.Parameter, Any]:  # type: ignore[override]
        """{parameter: its state}, of those that have one."""
        found = {p: each.state.get(p) for p, each in self.optimizers.items()}
        return {parameter: state for parameter, state in found.items() if state}

    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient, as any optimizer does."""
        assert closure is None
        for parameter, optimizer in self.optimizers.items():
            if parameter.grad is not None:
                optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.optimizers:
            parameter.grad = None

    def run(self, backward: Callable[[bool], None], max_norm: float | None, learns: bool) -> Tensor:
        """The global norm of the gradient before clipping, fp32, after a whole step.

        backward(last): one forward and backward; last: what it logs counts. learns: False leaves
        all weights and states as they are.
        """
        self._factor = None
        if self.clip is not None and max_norm:
            previous = self._previous if self.clip == "previous_norm" else None
            if previous is None:  # the first step has none before it
                with _generators_kept():
                    previous = self._pass(self._measure, backward, last=False)
            self._factor = (max_norm / (previous + 1e-6)).clamp(max=1.0)
        norm = self._pass(self._step_one if learns else self._measure, backward, last=True)
        self._previous = norm if learns else self._previous
        return norm

    def _pass(
        self,
        on_arrival: Callable[[nn.Parameter], None],
        backward: Callable[[bool], None],
        *,
        last: bool,
    ) -> Tensor:
        self._squares, self._on_arrival = [], on_arrival
        try:
            backward(last)
            for parameter in self.optimizers:
                if parameter.grad is not None:  # no hook has seen it
                    on_arrival(parameter)
        finally:
            self._on_arrival = lambda parameter: None
        return self._norm()

    def _arrive(self, parameter: nn.Parameter) -> None:
        self.arrived += 1
        self._on_arrival(parameter)

    def _measure(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        grad = local_part(parameter.grad)[0]
        self._squares.append(torch.linalg.vector_norm(grad, dtype=torch.float32).square())
        parameter.grad = None

    def _step_one(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        local = local_part(grad)[0]
        self._squares.append(torch.linalg.vector_norm(local, dtype=torch.float32).square())
        if self._factor is not None:
            local.mul_(self._factor.to(local.dtype))
        self.optimizers[parameter].step()
        parameter.grad = None

    def _norm(self) -> Tensor:
        first = next(iter(self.optimizers))
        total = torch.zeros((), device=local_part(first)[0].device)
        if self._squares:
            total = torch.stack([square.to(total.device) for square in self._squares]).sum()
        if isinstance(first, DTensor):
            for dim, place in enumerate(first.placements):
                if place.is_shard() and first.device_mesh.size(dim) > 1:
                    dist.all_reduce(total, group=first.device_mesh.get_group(dim))
        return total.sqrt()


@contextmanager
def _generators_kept():
    """The second pass draws what the first one drew."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
