"""Reward modelling: what a pair of scores costs. P pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def reward_loss(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    margin: Tensor | None = None,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """-log sigmoid(R_c - R_r - margin) + coefficient (R_c + R_r)^2 of each pair: [P] -> [P].

    Bradley and Terry's model as in Ouyang et al., "Training language models to follow instructions
    with human feedback" (arXiv 2203.02155), equation 1; the margin of Touvron et al., "Llama 2"
    (arXiv 2307.09288), equation 2; the centring of Eisenstein et al., "Helping or Herding?" (arXiv
    2312.09244), section 2. Divide the sum by the pairs of the whole optimizer step.

    chosen_rewards, rejected_rewards: fp [P], unbounded scores. margin: fp [P], how much better the
    chosen one ought to be. center_rewards_coefficient: pulls the sum of both scores to 0; 0.01 is
    usual.

    >>> import torch
    >>> reward_loss(torch.tensor([1.5, 0.5]), torch.tensor([0.5, 1.5]))
    tensor([0.3133, 1.3133])
    >>> reward_loss(torch.tensor([1.5]), torch.tensor([0.5]), margin=torch.tensor([0.5]))
    tensor([0.4741])
    >>> reward_loss(torch.tensor([1.5]), torch.tensor([0.5]), center_rewards_coefficient=0.01)
    tensor([0.3533])

    Raises ValueError when the shapes differ.
    """
    tensors = [t for t in (chosen_rewards, rejected_rewards, margin) if t is not None]
    if len({tuple(tensor.shape) for tensor in tensors}) != 1:
        raise ValueError(
            "expected one reward (and margin) per pair, each of shape [P], got shapes "
            f"{[tuple(tensor.shape) for tensor in tensors]}"
        )
    difference = chosen_rewards - rejected_rewards
    if margin is not None:
        difference = difference - margin
    loss = -logsigmoid(difference)
    if center_rewards_coefficient:
        loss = loss + center_rewards_coefficient * (chosen_rewards + rejected_rewards).square()
    return loss
