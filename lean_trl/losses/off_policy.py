"""Which sampled tokens are learnt from, and how far: masks, and the correction for an engine that
computes otherwise than the trainer. U scored tokens, S completions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lean_trl.losses.reduce import segment_ids, segment_sum

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_weights(
    old_logprobs: Tensor,
    sampled_logprobs: Tensor,
    cu_units: Tensor,
    *,
    mode: str = "sequence_mask",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> Tensor:
    """What each token's loss is multiplied by because the engine sampled it: fp [U] -> [U].

    rho = exp(old - sampled), of the token or of the whole completion (summed). truncate clamps rho
    to [clip_min, clip_max]; mask makes it 0 outside. Yao et al., "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training" (fengyao.notion.site/off-policy-rl, 2025).

    old_logprobs: of the trainer's weights when they sampled; sampled_logprobs: what the engine
    reported, NaN where it reported nothing (then rho = 1).

    >>> old, sampled = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.5, -1.0, -0.5])
    >>> cu_units = torch.tensor([0, 2, 3])
    >>> importance_weights(old, sampled, cu_units, mode="token_truncate", clip_max=1.5)
    tensor([1.5000, 1.0000, 0.2231])
    >>> importance_weights(old, sampled, cu_units, mode="sequence_mask", clip_min=0.5)
    tensor([1.6487, 1.6487, 0.0000])

    Raises ValueError for an unknown mode, or a truncation without a bound.
    """
    if mode not in CORRECTIONS:
        raise ValueError(f"mode must be one of {', '.join(CORRECTIONS)}, got {mode!r}")
    level, _, what = mode.partition("_")
    if what == "truncate" and clip_min is None and clip_max is None:
        raise ValueError(f"{mode} needs clip_min or clip_max")
    low = 0.0 if clip_min is None else clip_min
    high = torch.inf if clip_max is None else clip_max
    log_ratio = (old_logprobs - sampled_logprobs).detach().nan_to_num(0.0)
    if level == "sequence":
        sums = segment_sum(log_ratio, cu_units)
        log_ratio = sums[segment_ids(cu_units, len(log_ratio))]
    ratio = log_ratio.exp()
    if what == "truncate":
        return ratio.clamp(low, high)
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def off_policy_mask(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    cu_units: Tensor,
    threshold: float,
) -> Tensor:
    """1 for the tokens of a completion that was good (A >= 0) or that the policy has not moved away
    from, mean(sampled - log p) <= threshold; else 0: fp [U] -> [U], no gradient.

    DeepSeek-V3.2 (arXiv 2512.02556). advantages: fp [S].

    >>> off_policy_mask(torch.tensor([-3.0, -1.0]), torch.tensor([-1.0, -1.0]),
    ...                 torch.tensor([-1.0, -1.0]), torch.tensor([0, 1, 2]), threshold=1.0)
    tensor([0., 1.])
    """
    gap = (sampled_logprobs - logprobs).detach().nan_to_num(0.0)
    mean = segment_sum(gap, cu_units) / cu_units.diff().clamp(min=1)
    keep = ((advantages >= 0) | (mean <= threshold)).to(logprobs.dtype)
    return keep[segment_ids(cu_units, len(logprobs))]


def entropy_threshold(entropies: Tensor, quantile: float) -> Tensor:
    """The entropy that a token must reach to be among the top `quantile` of all: a scalar.

    Wang et al., "Beyond the 80/20 Rule" (arXiv 2506.01939): learn from the tokens where
    the policy forks. entropies: fp [U] of the whole step; empty gives 0.

    >>> entropy_threshold(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]), 0.25)
    tensor(0.4000)
    """
    values = entropies.detach().float()
    if not values.numel():
        return values.new_zeros(())
    # torch.quantile takes 16 million values at most; sorting takes any number.
    position = (1 - quantile) * (values.numel() - 1)
    ordered = values.sort().values
    low = int(position)
    high = min(low + 1, values.numel() - 1)
    return torch.lerp(ordered[low], ordered[high], position - low)
