"""f-divergences for preference losses: what a log-ratio log(policy / reference) is worth.

DPO's reward comes from a KL penalty; another divergence D_f gives f'(policy / reference) in place
of the log-ratio. Wang et al., "Beyond Reverse KL: Generalizing Direct Preference Optimization with
Diverse Divergence Constraints" (arXiv 2309.16240), section 4 and table 1.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

# exp(40)^2 is still finite in fp32, so squared losses stay finite too. Beyond it the score is flat.
EXPONENT_LIMIT = 40.0


def reverse_kl(log_ratio: Tensor, alpha: float) -> Tensor:
    """d: the log-ratio itself."""
    return log_ratio


def forward_kl(log_ratio: Tensor, alpha: float) -> Tensor:
    """1 - exp(-d)."""
    return 1 - (-log_ratio).clamp(max=EXPONENT_LIMIT).exp()


def js_divergence(log_ratio: Tensor, alpha: float) -> Tensor:
    """log 2 + log sigmoid(d) = log(2u / (1 + u)) for u = exp(d)."""
    return math.log(2) + logsigmoid(log_ratio)


def alpha_divergence(log_ratio: Tensor, alpha: float) -> Tensor:
    """(exp((alpha - 1) d) - 1) / (alpha - 1), which is d for alpha = 1."""
    power = alpha - 1
    if abs(power) < 1e-6:
        return log_ratio
    return (power * log_ratio).clamp(max=EXPONENT_LIMIT).expm1() / power


F_DIVERGENCES = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "js_divergence": js_divergence,
    "alpha_divergence": alpha_divergence,
}


def divergence_score(
    log_ratio: Tensor, *, f_divergence_type: str = "reverse_kl", alpha: float = 0.5
) -> Tensor:
    """The score of each log-ratio under a divergence: monotone, and 0 for a log-ratio of 0.

    log_ratio: [any], summed log-probs of the policy minus those of the reference, in nats.
    f_divergence_type: a key of F_DIVERGENCES. alpha: only read by "alpha_divergence".

    >>> import torch
    >>> d = torch.tensor([1.0, -0.5])
    >>> divergence_score(d, f_divergence_type="forward_kl")
    tensor([ 0.6321, -0.6487])
    >>> divergence_score(d, f_divergence_type="js_divergence")
    tensor([ 0.3799, -0.2809])
    >>> divergence_score(d, f_divergence_type="alpha_divergence", alpha=0.5)
    tensor([ 0.7869, -0.5681])

    Raises ValueError for an unknown f_divergence_type.
    """
    if f_divergence_type not in F_DIVERGENCES:
        raise ValueError(
            f"f_divergence_type must be one of {', '.join(F_DIVERGENCES)}, "
            f"got {f_divergence_type!r}"
        )
    return F_DIVERGENCES[f_divergence_type](log_ratio, alpha)
