"""Rewards of the completions of each prompt -> advantages, on the host, once per generation.

N completions, K reward functions. NaN is an abstention: no reward, not a reward of 0. Computed in
fp64, so that equal rewards such as 0.35 give 0 and not rounding over 1e-4.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-4  # added to a standard deviation that is divided by
SCALES = ("group", "batch", "none")
AGGREGATES = ("sum_then_normalize", "normalize_then_sum")


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: str = "group",
    aggregate: str = "sum_then_normalize",
    weights: Tensor | None = None,
) -> Tensor:
    """A_i = (r_i - mean of its group) / (standard deviation + 1e-4): fp [N] or [N, K] -> fp32 [N].

    Shao et al., "DeepSeekMath" (arXiv 2402.03300), section 4.1.2. The deviation is the sample's
    (n - 1), so |A| <= (n - 1) / sqrt(n).

    rewards: NaN where a function abstained. A completion without any reward gets the advantage 0
    and is in no mean or deviation. group_ids: int [N], equal for the completions of one prompt.
    scale: divide by the deviation of the group, of the batch, or not at all (none). aggregate, for
    [N, K]: sum_then_normalize adds up weights[k] * rewards[:, k] first; normalize_then_sum scales
    each function within its groups, adds, then scales over the batch (Liu et al., "GDPO",
    arXiv 2601.05242) and knows no other scale. weights: fp [K]; None: 1 each.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    tensor([ 1.4997, -0.4999, -0.4999, -0.4999])
    >>> rewards = torch.tensor([1.0, float("nan"), 0.0, 1.0])
    >>> group_advantages(rewards, torch.zeros(4, dtype=torch.int64), scale="none")
    tensor([ 0.3333,  0.0000, -0.6667,  0.3333])

    Raises ValueError for an unknown scale or aggregate and for misshapen inputs.
    """
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate must be one of {', '.join(AGGREGATES)}, got {aggregate!r}")
    columns = rewards.double().reshape(len(rewards), -1)
    groups = _groups(columns, group_ids)
    if aggregate == "normalize_then_sum":
        _refuse_infinite(columns)
        scaled = [_scaled(column, groups) for column in columns.unbind(1)]
        total = total_reward(torch.stack(scaled, 1), weights)
        return _finish(_scaled(total, torch.zeros_like(groups)))
    total = total_reward(columns, weights)
    mean, deviation = group_moments(total, groups)
    centred = total - mean
    if scale == "batch":
        deviation = group_moments(total, torch.zeros_like(groups))[1]
    return _finish(centred if scale == "none" else centred / (deviation + EPS))


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i - mean of the other rewards of its group: fp [N] -> fp32 [N].

    Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization" (arXiv 2402.14740),
    section 2.3. NaN (abstained), or alone in its group: 0.

    >>> leave_one_out(torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.zeros(4, dtype=torch.int64))
    tensor([-2.6667, -1.3333,  0.0000,  4.0000])
    """
    values = rewards.double()
    _refuse_infinite(values)
    groups = _groups(values.reshape(len(values), -1), group_ids)
    known = ~values.isnan()
    count = _sum_by(known.double(), groups)
    others = (_sum_by(values.nan_to_num(0.0), groups) - values) / (count - 1)
    return _finish(torch.where(count > 1, values - others, 0.0))


def total_reward(rewards: Tensor, weights: Tensor | None = None) -> Tensor:
    """sum_k weights[k] * rewards[:, k] over the functions that did not abstain: [N, K] -> [N].

    NaN where all abstained. Raises ValueError for weights of another shape and infinite rewards.

    >>> total_reward(torch.tensor([[1.0, 0.5], [float("nan"), 0.5]]), torch.tensor([1.0, 2.0]))
    tensor([2., 1.])
    """
    if weights is not None and weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"expected one weight for each of {rewards.shape[1]} rewards, got {len(weights)}"
        )
    _refuse_infinite(rewards)
    weighted = rewards if weights is None else rewards * weights.to(rewards)
    total = weighted.nan_to_num(0.0).sum(1)
    return total.masked_fill(rewards.isnan().all(1), torch.nan)


def _refuse_infinite(rewards: Tensor) -> None:
    infinite = rewards.isinf()
    if infinite.any():
        first = infinite.nonzero()[0].tolist()
        raise ValueError(
            f"the reward at {first} is infinite: give a number, or NaN where there is no reward"
        )


def group_moments(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, sample standard deviation) of each one's group: [N] -> two [N]; NaN values are left
    out, and the deviation of fewer than two is 0.

    groups: int64 [N], numbered from 0.

    >>> group_moments(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([0, 0, 1]))
    (tensor([2., 2., 5.]), tensor([1.4142, 1.4142, 0.0000]))
    """
    known = ~values.isnan()
    filled = values.nan_to_num(0.0)
    count = _sum_by(known.to(values.dtype), groups)
    mean = _sum_by(filled, groups) / count.clamp(min=1)
    squares = torch.where(known, (filled - mean).square(), 0.0)
    return mean, (_sum_by(squares, groups) / (count - 1).clamp(min=1)).sqrt()


def _scaled(values: Tensor, groups: Tensor) -> Tensor:
    mean, deviation = group_moments(values, groups)
    return (values - mean) / (deviation + EPS)


def _finish(advantages: Tensor) -> Tensor:
    return advantages.nan_to_num(0.0).float()


def _sum_by(values: Tensor, groups: Tensor) -> Tensor:
    """The sum over each one's group, [N] -> [N]."""
    sums = values.new_zeros(len(values)).index_add(0, groups, values)
    return sums[groups]


def _groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    if group_ids.shape != rewards.shape[:1]:
        raise ValueError(
            f"expected one group id for each of {len(rewards)} completions, got shape "
            f"{tuple(group_ids.shape)}"
        )
    return torch.unique(group_ids, return_inverse=True)[1]
