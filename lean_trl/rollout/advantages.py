"""The rewards of a generation -> what each completion is worth, by the settings of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lean_trl.loss_config import LossConfig
from lean_trl.losses import (
    group_advantages,
    importance_weights,
    leave_one_out,
    total_reward,
)
from lean_trl.losses.advantages import EPS
from lean_trl.rollout.buffer import Rollout


def finish_rewards(
    rollouts: Sequence[Rollout],
    rewards: np.ndarray,
    weights: Sequence[float] | None,
    loss: LossConfig,
    method: str,
) -> list[Rollout]:
    """The rollouts with rewards, total reward, advantage and importance weights.

    rewards: fp32 [N, K], NaN where a function abstained. What the method does with them:
    grpo group_advantages; rloo clip, take the KL off, leave_one_out; online_dpo only the reward,
    less missing_eos_penalty for a completion that did not end.
    """
    matrix = torch.from_numpy(rewards.astype(np.float64))
    factors = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    total = total_reward(matrix, factors)
    groups = torch.tensor([r.group for r in rollouts])
    advantages = torch.zeros(len(rollouts))
    if method == "grpo":
        advantages = group_advantages(
            matrix,
            groups,
            scale=loss.scale_rewards,
            aggregate=loss.multi_objective_aggregation,
            weights=factors,
        )
    elif method == "rloo":
        advantages = _rloo(total, groups, rollouts, loss)
    elif loss.missing_eos_penalty:
        cut_off = torch.tensor([r.truncated for r in rollouts])
        total = total - loss.missing_eos_penalty * cut_off
    finished = [
        replace(r, rewards=rewards[i], reward=total[i].item(), advantage=advantages[i].item())
        for i, r in enumerate(rollouts)
    ]
    return [_corrected(r, loss) for r in finished]


def _rloo(total: Tensor, groups: Tensor, rollouts: Sequence[Rollout], loss: LossConfig) -> Tensor:
    if loss.reward_clip_range is not None:
        total = total.clamp(*loss.reward_clip_range)
    if loss.beta:
        total = total - loss.beta * torch.tensor([_kl(r) for r in rollouts], dtype=torch.float64)
    advantages = leave_one_out(total, groups).double()
    if loss.normalize_advantages:
        known = advantages[~total.isnan()]
        if len(known) > 1:
            advantages = (advantages - known.mean()) / (known.std() + EPS)
            advantages = advantages.masked_fill(total.isnan(), 0.0)
    return advantages.float()


def _kl(r: Rollout) -> float:
    """k1 of the whole completion; 0 for one that was not scored."""
    if "old_logprobs" not in r.extras or "ref_logprobs" not in r.extras:
        return 0.0
    difference = r.extras["old_logprobs"].astype(np.float64) - r.extras["ref_logprobs"]
    return float(difference.sum())


def _corrected(r: Rollout, loss: LossConfig) -> Rollout:
    extras = dict(r.extras)
    if r.sampled_logprobs is not None and (
        loss.importance_correction or loss.off_policy_mask_threshold
    ):
        extras["sampled_logprobs"] = r.sampled_logprobs[r.scored]
    correction = loss.importance_correction
    if correction is not None and "old_logprobs" in extras:
        old = torch.from_numpy(extras["old_logprobs"].copy())
        reported = extras.get("sampled_logprobs")
        sampled = old if reported is None else torch.from_numpy(reported.copy())
        extras["importance_weights"] = importance_weights(
            old,
            sampled,
            torch.tensor([0, len(old)]),
            mode=correction.mode,
            clip_min=correction.clip_min,
            clip_max=correction.clip_max,
        ).numpy()
    return replace(r, extras=extras)
