"""Preference optimisation: what a pair of completions, one chosen and one rejected, costs.

U scored tokens, S sequences (2p chosen and 2p + 1 rejected of pair p), P pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lean_trl.losses.dpo import REFERENCE_LOSSES
from lean_trl.losses.pairs import Pairs, PreferenceLoss
from lean_trl.losses.reduce import segment_ids, segment_sum
from lean_trl.losses.reference_free import REFERENCE_FREE_LOSSES

DPO_LOSSES: dict[str, PreferenceLoss] = {**REFERENCE_LOSSES, **REFERENCE_FREE_LOSSES}


class DPOLoss(NamedTuple):
    """losses carry the gradient; the rewards beta * (policy - reference) are detached. Each [P]."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor | None = None,
    ref_rejected: Tensor | None = None,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    chosen_nll: Tensor | None = None,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    discopop_tau: float = 0.05,
    simpo_gamma: float = 0.5,
    cpo_alpha: float = 1.0,
    matched: tuple[Tensor, ...] | None = None,
) -> DPOLoss:
    """Loss of each pair, unreduced: [P] -> DPOLoss of [P].

    Divide the sum by the pairs of the whole optimizer step (by their chosen tokens for "sft").

    chosen, rejected: log p(completion | prompt) under the policy, summed over its tokens, in nats.
    ref_chosen, ref_rejected: the same under the frozen reference; reference-free losses ignore
    them. loss_type: a key of DPO_LOSSES; its function has the equation and the source. beta:
    strength of the pull to the reference. label_smoothing: share of labels assumed wrong.
    chosen_lengths, rejected_lengths: int [P] scored tokens; "ipo" divides by them when given.
    chosen_nll: -chosen before tokens were re-weighted (LD-DPO), for the likelihood terms. matched:
    DPO_LOSSES[loss_type].statistics(pairs of the whole step), where these pairs are fewer. Half
    precision is computed in fp32.

    >>> policy, reference = torch.tensor([[-12.0], [-15.0]]), torch.tensor([[-13.0], [-14.5]])
    >>> loss = dpo_loss(*policy, *reference)
    >>> loss.losses, loss.chosen_rewards, loss.rejected_rewards
    (tensor([0.6210]), tensor([0.1000]), tensor([-0.0500]))

    Raises ValueError for an unknown loss_type or divergence, missing or misshapen inputs, and
    settings without effect on the loss.
    """
    row = preference_row(loss_type)
    _check_shapes(row, loss_type, chosen, rejected, ref_chosen, ref_rejected)
    if label_smoothing and not row.smoothing:
        raise ValueError(f"label_smoothing has no effect on {loss_type!r}: set it to 0")
    if f_divergence_type != "reverse_kl" and not row.divergence:
        raise ValueError(f"f_divergence_type has no effect on {loss_type!r}: leave it reverse_kl")
    if row.lengths and (chosen_lengths is None or rejected_lengths is None):
        raise ValueError(f"{loss_type!r} needs chosen_lengths and rejected_lengths")
    pairs = Pairs(
        chosen,
        rejected,
        ref_chosen,
        ref_rejected,
        beta=beta,
        label_smoothing=label_smoothing,
        chosen_lengths=chosen_lengths,
        rejected_lengths=rejected_lengths,
        chosen_nll=chosen_nll,
        f_divergence_type=f_divergence_type,
        f_alpha_divergence_coef=f_alpha_divergence_coef,
        discopop_tau=discopop_tau,
        simpo_gamma=simpo_gamma,
        cpo_alpha=cpo_alpha,
        matched=matched,
    )
    return DPOLoss(row.loss(pairs), *_rewards(row, pairs))


def preference_row(loss_type: str) -> PreferenceLoss:
    """DPO_LOSSES[loss_type], or a ValueError that lists the known names."""
    if loss_type not in DPO_LOSSES:
        raise ValueError(f"loss_type must be one of {', '.join(DPO_LOSSES)}, got {loss_type!r}")
    return DPO_LOSSES[loss_type]


def _rewards(row: PreferenceLoss, p: Pairs) -> tuple[Tensor, Tensor]:
    """The implicit rewards of both sides, [P] each."""
    if row.reference:
        chosen, rejected = p.chosen_ratio, p.rejected_ratio
    elif row.lengths:
        chosen, rejected = p.per_token(p.chosen, p.rejected)
    else:
        chosen, rejected = p.chosen, p.rejected
    return p.beta * chosen.detach(), p.beta * rejected.detach()


def _check_shapes(
    row: PreferenceLoss, loss_type: str, chosen: Tensor, rejected: Tensor, *reference: Tensor | None
) -> None:
    if row.reference and any(tensor is None for tensor in reference):
        free = ", ".join(REFERENCE_FREE_LOSSES)
        raise ValueError(
            f"{loss_type!r} needs ref_chosen and ref_rejected; losses without a reference: {free}"
        )
    shapes = [tuple(t.shape) for t in (chosen, rejected, *reference) if t is not None]
    if chosen.ndim != 1 or len(set(shapes)) != 1:
        raise ValueError(
            f"expected one summed log-prob per pair, each of shape [P], got shapes {shapes}"
        )


def shared_length_weights(cu_units: Tensor, num_units: int, ld_alpha: float) -> Tensor:
    """A weight per scored token: 1 up to the length of the pair's shorter completion, then
    ld_alpha.

    LD-DPO's log-prob is the sum of weight * logprob, for the policy and for the reference.
    Liu et al., "Length Desensitization in Direct Preference Optimization" (arXiv 2409.06411),
    section 4.

    cu_units: int [S + 1]. num_units: U as a Python int. Returns fp32 [U].

    >>> shared_length_weights(torch.tensor([0, 3, 5]), 5, ld_alpha=0.5)
    tensor([1.0000, 1.0000, 0.5000, 1.0000, 1.0000])
    """
    ids = segment_ids(cu_units, num_units)
    lengths = cu_units.diff().reshape(-1, 2)
    shared = lengths.amin(1).repeat_interleave(2)
    depth = torch.arange(num_units, device=cu_units.device) - cu_units[ids]
    return torch.where(depth < shared[ids], 1.0, ld_alpha)


def wpo_weights(logprobs: Tensor, log_sum_sq: Tensor, cu_units: Tensor) -> Tensor:
    """exp(mean log-prob of the chosen + of the rejected) of each pair, detached: [U], [U] -> [P].

    Each log-prob is taken relative to log sum_v p_v^2, its expectation under the policy itself, so
    a typical sample of the policy weighs about 1. Zhou et al., "WPO: Enhancing RLHF with Weighted
    Preference Optimization" (arXiv 2406.11827), equation 2. Multiply the losses by it.

    >>> logprobs = torch.tensor([0.5, 0.25, 0.5]).log()
    >>> log_sum_sq = torch.tensor([0.5, 0.5, 0.5]).log()
    >>> wpo_weights(logprobs, log_sum_sq, torch.tensor([0, 2, 3]))            # sqrt(1 * 0.5) * 1
    tensor([0.7071])
    """
    sums = segment_sum((logprobs - log_sum_sq).detach(), cu_units)
    means = sums / cu_units.diff().clamp(min=1)
    return means.reshape(-1, 2).sum(1).exp()
