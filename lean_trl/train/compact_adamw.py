"""AdamW whose moments take 2 x 16, 8 or 4 bits a weight instead of 2 x 32.

Loshchilov and Hutter 2019, algorithm 2; states as in Dettmers et al. 2022 (8-bit optimizers) and
Li et al. 2023 (4-bit), with simpler codes (train/compact.py). Works on the local shard of sharded
parameters, one parameter at a time, so its scratch space is that of the largest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lean_trl.train.compact import PLAIN, Codec, State, hash_noise, round_stochastically
from lean_trl.train.distributed import local_part

# Smaller ones, and vectors, keep fp32 moments: they are few, and norms and biases are delicate.
MIN_ELEMENTS = 4096


class CompactAdamW(Optimizer):
    """AdamW with the moments in `codecs`; bfloat16 parameters are rounded stochastically."""

    def __init__(
        self,
        params: Iterable[Any],
        codecs: tuple[Codec, Codec],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
    ) -> None:
        self.codecs = codecs
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        weight, first_row = local_part(parameter)
        grad = local_part(parameter.grad)[0].float()
        state = self._state(parameter, weight)
        step = state["step"].add_(1)
        first, second = self._codecs(parameter)
        m, v = (_part(state, name) for name in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        width = weight.shape[-1] if weight.ndim else 1
        mean = first.load(m, width).lerp_(grad, 1 - beta1)
        square = second.load(v, width).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        place = first_row * (weight[0].numel() if weight.ndim > 1 and len(weight) else 1)

        def noise(salt: int) -> Tensor | None:
            return hash_noise(weight, place, step, salt) if self._rounds(parameter) else None

        first.store(mean, m, noise(1))
        second.store(square, v, noise(2))
        root = square.div_(1 - beta2**step).sqrt_().add_(group["eps"])
        update = mean.div_(1 - beta1**step).div_(root)
        wide = weight.float()
        wide = wide.mul(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
        if weight.dtype == torch.bfloat16:
            weight.copy_(round_stochastically(wide, hash_noise(weight, place, step, 3)))
        else:
            weight.copy_(wide)

    def _codecs(self, parameter: nn.Parameter) -> tuple[Codec, Codec]:
        small = parameter.ndim < 2 or parameter.numel() < MIN_ELEMENTS
        return PLAIN if small else self.codecs

    def _rounds(self, parameter: nn.Parameter) -> bool:
        return self._codecs(parameter)[0].bits == 16

    def _state(self, parameter: nn.Parameter, weight: Tensor) -> dict[str, Tensor]:
        """The state, laid out when it is first needed: tensors cut like the parameter."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            codecs = zip(("exp_avg", "exp_avg_sq"), self._codecs(parameter), strict=True)
            for name, codec in codecs:
                for key, tensor in codec.new(weight).items():
                    state[f"{name}.{key}" if key else name] = cut_like(parameter, tensor)
        return state


def _part(state: dict[str, Tensor], name: str) -> State:
    """The local tensors of one moment."""
    return {
        key.removeprefix(name).removeprefix("."): local_part(tensor)[0]
        for key, tensor in state.items()
        if key == name or key.startswith(f"{name}.")
    }


def cut_like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """A DTensor of local rows when the parameter is one."""
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=shape, stride=stride
    )
