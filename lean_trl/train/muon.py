"""Muon (Jordan et al. 2024): momentum whose update is made orthogonal by Newton-Schulz iterations.

For the matrices of the blocks; the embedding, the head and all vectors get AdamW, as its authors
say. One moment a weight. The update has a root mean square of 0.2 whatever the shape (Liu et al.
2025, "Muon is Scalable for LLM Training", 2.2), so AdamW's rates and weight decay fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from lean_trl.train.compact_adamw import cut_like
from lean_trl.train.distributed import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3, x^5
UPDATE_RMS = 0.2


class Muon(Optimizer):
    """groups: those with "adamw" true are stepped by AdamW."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        others = [group for group in self.param_groups if group["adamw"]]
        self.adamw = AdamW(others, lr=lr, betas=betas, eps=eps, fused=True) if others else None
        if self.adamw is not None:  # one rate and one state for whoever asks
            self.adamw.param_groups = others
            for group in others:
                group.update({k: v for k, v in self.adamw.defaults.items() if k not in group})
                group["fused"] = True
            self.adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]
        assert closure is None
        if self.adamw is not None:
            self.adamw.step()
        for group in self.param_groups:
            for parameter in group["params"] if not group["adamw"] else ():
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        weight, first = local_part(parameter)
        grad = local_part(parameter.grad)[0]
        state = self.state[parameter]
        if not state:
            state["momentum"] = cut_like(parameter, torch.zeros_like(weight))
        momentum = local_part(state["momentum"])[0].mul_(group["momentum"]).add_(grad)
        update = grad.add(momentum, alpha=group["momentum"])  # Nesterov's
        if isinstance(parameter, DTensor) and parameter.ndim == 2:
            update = cut_like(parameter, update).full_tensor()  # type: ignore[attr-defined]
            update = orthogonal(update)[first : first + len(weight)]
        else:  # of a stack of matrices every rank has whole ones
            update = orthogonal(update)
        scale = UPDATE_RMS * max(parameter.shape[-2:]) ** 0.5
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.sub_(update.to(weight.dtype), alpha=group["lr"] * scale)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T, of each of a stack of matrices.

    Singular values end between about 0.68 and 1.14. fp32 [..., R, C], bf16 products on a GPU.

    >>> values = orthogonal(torch.tensor([[3.0, 0.0], [0.0, 1.0]])).diag()
    >>> bool((0.68 < values).all() and (values < 1.14).all())
    True
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).float()
