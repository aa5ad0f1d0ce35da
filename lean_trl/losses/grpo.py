"""The GRPO family: which loss a token has and what the sum is divided by, and the whole for
outsiders. U scored tokens, S completions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lean_trl.losses.policy import kl, policy_loss, policy_ratio
from lean_trl.losses.reduce import segment_ids


class GRPOLoss(NamedTuple):
    """A row of GRPO_LOSSES."""

    kind: str  # of policy_loss
    # What a token weighs: 1 / tokens of its completion, 1 / max_completion_length, or 1.
    weights: str  # per_completion | per_max_length | per_token
    unit: str  # sequences | tokens; what the window's sum is divided by


GRPO_LOSSES: dict[str, GRPOLoss] = {
    # Mean over completions of each one's mean (DeepSeekMath, arXiv 2402.03300, equation 3).
    "grpo": GRPOLoss("clip", "per_completion", "sequences"),
    # Mean over tokens. With exact denominators both are the same: bnpo was the mean of a local
    # batch (Xiao et al., arXiv 2506.02864), dapo that of the whole step (arXiv 2503.14476).
    "bnpo": GRPOLoss("clip", "per_token", "tokens"),
    "dapo": GRPOLoss("clip", "per_token", "tokens"),
    # A constant length: no bias towards long wrong answers (Liu et al., arXiv 2503.20783).
    "dr_grpo": GRPOLoss("clip", "per_max_length", "sequences"),
    # Every completion weighs as much as it is long (arXiv 2602.05261).
    "luspo": GRPOLoss("clip", "per_token", "sequences"),
    "cispo": GRPOLoss("cispo", "per_token", "tokens"),
    "sapo": GRPOLoss("sapo", "per_completion", "sequences"),
    "vespo": GRPOLoss("vespo", "per_token", "tokens"),
}


def grpo_row(loss_type: str) -> GRPOLoss:
    """GRPO_LOSSES[loss_type], or a ValueError that lists the known names."""
    if loss_type not in GRPO_LOSSES:
        raise ValueError(f"loss_type must be one of {', '.join(GRPO_LOSSES)}, got {loss_type!r}")
    return GRPO_LOSSES[loss_type]


def policy_weights(
    loss_type: str,
    cu_units: Tensor,
    *,
    max_completion_length: int | None = None,
    num_units: int | None = None,
) -> tuple[Tensor, str]:
    """(fp32 [U], unit): the loss of a step is sum(values * weights) / its count of that unit.

    The count is over the whole step (tokens: scored ones; sequences: completions, those that are
    masked too), so cutting a step into micro-batches or over ranks changes nothing.

    cu_units: int [S + 1]. max_completion_length: for dr_grpo. num_units: U; None reads it from
    cu_units, which waits for the device.

    >>> policy_weights("grpo", torch.tensor([0, 4, 6]))
    (tensor([0.2500, 0.2500, 0.2500, 0.2500, 0.5000, 0.5000]), 'sequences')

    Raises ValueError for an unknown loss_type, or dr_grpo without max_completion_length.
    """
    row = grpo_row(loss_type)
    count = int(cu_units[-1]) if num_units is None else num_units
    if row.weights == "per_completion":
        lengths = cu_units.diff().clamp(min=1).float()
        return (1 / lengths)[segment_ids(cu_units, count)], row.unit
    weights = torch.ones(count, device=cu_units.device)
    if row.weights == "per_max_length":
        if not max_completion_length:
            raise ValueError(f"{loss_type!r} divides by max_completion_length: give it")
        weights = weights / max_completion_length
    return weights, row.unit


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cu_units: Tensor,
    *,
    loss_type: str = "dapo",
    level: str = "token",
    ref_logprobs: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    bias_correction_kl: bool = True,
    max_completion_length: int | None = None,
    total: int | None = None,
    token_weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The whole loss of some completions: a scalar.

    loss = sum(weights * (policy_loss * token_weights + beta * kl)) / total

    logprobs (with gradient), old_logprobs, ref_logprobs: fp [U]. advantages: fp [S]. cu_units: int
    [S + 1]. beta: strength of the pull to the reference; bias_correction_kl multiplies the estimate
    by the ratio, so that its gradient is the KL's (DeepSeek-V3.2, arXiv 2512.02556).
    total: the step's count of the loss's unit when these completions are a part of it; None: they
    are all. token_weights: fp [U], masks or corrections of the policy term. options: of
    policy_loss.

    >>> old = torch.zeros(3)
    >>> logprobs = torch.tensor([1.5, 0.5, 1.0]).log()
    >>> grpo_loss(logprobs, old, torch.tensor([1.0, -1.0]), torch.tensor([0, 2, 3]))
    tensor(-0.2333)
    >>> grpo_loss(logprobs, old, torch.tensor([1.0, -1.0]), torch.tensor([0, 2, 3]),
    ...           loss_type="grpo")
    tensor(0.0750)
    """
    num_units = logprobs.shape[0]
    ids = segment_ids(cu_units, num_units)
    values = policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        kind=grpo_row(loss_type).kind,
        sequence_ids=ids,
        level=level,
        **options,
    )
    if token_weights is not None:
        values = values * token_weights
    if beta:
        if ref_logprobs is None:
            raise ValueError(f"beta {beta} needs ref_logprobs")
        divergence = kl(logprobs, ref_logprobs, kl_estimator)
        if bias_correction_kl:
            ratio = policy_ratio(
                logprobs,
                old_logprobs,
                level=level,
                sequence_ids=ids,
                num_sequences=len(advantages),
            )
            divergence = divergence * ratio
        values = values + beta * divergence
    weights, unit = policy_weights(
        loss_type, cu_units, max_completion_length=max_completion_length, num_units=num_units
    )
    if total is None:
        total = len(advantages) if unit == "sequences" else num_units
    return (values * weights).sum() / max(total, 1)
