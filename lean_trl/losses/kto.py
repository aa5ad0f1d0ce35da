"""Unpaired preferences: what one completion, labelled desirable or not, costs. S completions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def kto(rewards: Tensor, labels: Tensor, kl: Tensor) -> Tensor:
    """sigmoid(z - r) for desirable, sigmoid(r - z) for undesirable; r = beta d, z = beta KL.

    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv 2402.01306),
    section 4.

    >>> kto(torch.tensor([0.2, 0.2]), torch.tensor([True, False]), torch.tensor(0.1))
    tensor([0.4750, 0.5250])
    """
    return torch.sigmoid(torch.where(labels, kl - rewards, rewards - kl))


def apo_zero_unpaired(rewards: Tensor, labels: Tensor, kl: Tensor) -> Tensor:
    """1 - sigmoid(r) for desirable, sigmoid(r) for undesirable: the anchor is 0, kl is not read.

    D'Oosterlinck et al., "Anchored Preference Optimization and Contrastive Revisions"
    (arXiv 2408.06266), section 4, APO-zero without pairs.

    >>> apo_zero_unpaired(torch.tensor([0.2, 0.2]), torch.tensor([True, False]), torch.tensor(0.0))
    tensor([0.4502, 0.5498])
    """
    return torch.sigmoid(torch.where(labels, -rewards, rewards))


KTO_LOSSES = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}
NEEDS_KL = frozenset({"kto"})


class KTOLoss(NamedTuple):
    """losses carry the gradient; the rewards beta * (policy - reference) are detached. Each [S]."""

    losses: Tensor
    rewards: Tensor


def kto_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    labels: Tensor,
    kl: Tensor | float | None = None,
    *,
    loss_type: str = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KTOLoss:
    """Loss of each completion, unreduced: [S] -> KTOLoss of [S].

    Divide the sum by the completions of the whole optimizer step.

    logprobs, ref_logprobs: log p(completion | prompt), summed over its tokens, of policy and
    reference. labels: bool [S], desirable. kl: kl_estimate of the whole step, a scalar or [S];
    "kto" needs it. desirable_weight, undesirable_weight: factors on the losses of each kind, for
    unbalanced data.

    >>> logprobs, reference = torch.tensor([-10.0, -10.0]), torch.tensor([-12.0, -12.0])
    >>> kto_loss(logprobs, reference, torch.tensor([True, False]), kl=1.0)
    KTOLoss(losses=tensor([0.4750, 0.5250]), rewards=tensor([0.2000, 0.2000]))

    Raises ValueError for an unknown loss_type, misshapen inputs or a missing kl.
    """
    if loss_type not in KTO_LOSSES:
        raise ValueError(f"loss_type must be one of {', '.join(KTO_LOSSES)}, got {loss_type!r}")
    shapes = [tuple(tensor.shape) for tensor in (logprobs, ref_logprobs, labels)]
    if logprobs.ndim != 1 or len(set(shapes)) != 1 or labels.dtype != torch.bool:
        raise ValueError(
            "expected a summed log-prob, its reference and a bool label per completion, "
            f"each of shape [S], got shapes {shapes} and labels of {labels.dtype}"
        )
    if kl is None and loss_type in NEEDS_KL:
        raise ValueError(f"{loss_type!r} needs kl: kl_estimate over the mismatched completions")
    rewards = beta * (logprobs - ref_logprobs)
    anchor = beta * torch.as_tensor(0.0 if kl is None else kl, device=rewards.device).detach()
    losses = KTO_LOSSES[loss_type](rewards, labels, anchor.to(rewards.dtype))
    weights = torch.where(labels, desirable_weight, undesirable_weight)
    return KTOLoss(losses * weights.to(losses.dtype), rewards.detach())


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """max(0, mean(log-ratio)) over completions put after prompts that they do not answer: a scalar.

    logprobs, ref_logprobs: [K], summed over the tokens of each mismatched completion of the whole
    step: the means of parts, each clamped, would not add up. It carries no gradient. KTO, section
    4.

    >>> kl_estimate(torch.tensor([-3.0, -5.0]), torch.tensor([-4.0, -6.5]))
    tensor(1.2500)
    """
    difference = (logprobs - ref_logprobs).detach()
    return difference.mean().clamp(min=0) if difference.numel() else difference.new_zeros(())
