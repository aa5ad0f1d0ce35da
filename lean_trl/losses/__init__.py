"""Losses as pure functions: unreduced, no model, no mask, no rank. They import only torch.

    from lean_trl.losses import sft_loss
 Every function says in its docstring which shapes it takes, its equation with the source, and one
worked example.
"""

from lean_trl.losses.reduce import segment_ids, segment_sum
from lean_trl.losses.sft import SFT_LOSSES, sft_loss

__all__ = ["SFT_LOSSES", "segment_ids", "segment_sum", "sft_loss"]
