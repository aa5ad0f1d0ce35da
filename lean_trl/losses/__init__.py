"""Losses as pure functions: unreduced, no model, no mask, no rank. They import only torch.

    from lean_trl.losses import sft_loss

Every function says in its docstring which shapes it takes, its equation with the source, and one
worked example.
"""

from lean_trl.losses.advantages import group_advantages, leave_one_out, total_reward
from lean_trl.losses.divergences import F_DIVERGENCES
from lean_trl.losses.grpo import GRPO_LOSSES, GRPOLoss, grpo_loss, policy_weights
from lean_trl.losses.kto import KTO_LOSSES, KTOLoss, kl_estimate, kto_loss
from lean_trl.losses.off_policy import entropy_threshold, importance_weights, off_policy_mask
from lean_trl.losses.pairs import Pairs, PreferenceLoss, match_ranks
from lean_trl.losses.policy import POLICY_LOSSES, kl, policy_loss, policy_ratio, rloo_loss
from lean_trl.losses.preference import (
    DPO_LOSSES,
    DPOLoss,
    dpo_loss,
    shared_length_weights,
    wpo_weights,
)
from lean_trl.losses.reduce import segment_ids, segment_sum
from lean_trl.losses.reward import reward_loss
from lean_trl.losses.sft import SFT_LOSSES, sft_loss

__all__ = [
    "DPO_LOSSES",
    "F_DIVERGENCES",
    "GRPO_LOSSES",
    "KTO_LOSSES",
    "POLICY_LOSSES",
    "SFT_LOSSES",
    "DPOLoss",
    "GRPOLoss",
    "KTOLoss",
    "Pairs",
    "PreferenceLoss",
    "dpo_loss",
    "entropy_threshold",
    "group_advantages",
    "grpo_loss",
    "importance_weights",
    "kl",
    "kl_estimate",
    "kto_loss",
    "leave_one_out",
    "match_ranks",
    "off_policy_mask",
    "policy_loss",
    "policy_ratio",
    "policy_weights",
    "reward_loss",
    "rloo_loss",
    "segment_ids",
    "segment_sum",
    "sft_loss",
    "shared_length_weights",
    "total_reward",
    "wpo_weights",
]
