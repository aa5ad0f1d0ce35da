"""Losses as pure functions: unreduced, no model, no mask, no rank. They import only torch.

    from lean_trl.losses import sft_loss

Every function says in its docstring which shapes it takes, its equation with the source, and one
worked example.
"""

from lean_trl.losses.divergences import F_DIVERGENCES
from lean_trl.losses.kto import KTO_LOSSES, KTOLoss, kl_estimate, kto_loss
from lean_trl.losses.pairs import Pairs, PreferenceLoss, match_ranks
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
    "KTO_LOSSES",
    "SFT_LOSSES",
    "DPOLoss",
    "KTOLoss",
    "Pairs",
    "PreferenceLoss",
    "dpo_loss",
    "kl_estimate",
    "kto_loss",
    "match_ranks",
    "reward_loss",
    "segment_ids",
    "segment_sum",
    "sft_loss",
    "shared_length_weights",
    "wpo_weights",
]
