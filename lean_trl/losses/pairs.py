"""What a preference loss looks at: the pairs of one batch and the settings of the loss.

P pairs. c and r: summed log-probs of chosen and rejected under the policy; c' and r' under the
reference; d_c = c - c' and d_r = r - r' the log-ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lean_trl.losses.divergences import divergence_score


@dataclass(frozen=True)
class Pairs:
    """Summed log-probs [P] in nats, with everything that a loss may be set to.

    Half precision becomes fp32: a sum of 1e3 nats has no decimals left in bfloat16.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0  # probability that a label is the wrong way round
    chosen_lengths: Tensor | None = None  # scored tokens of each completion
    rejected_lengths: Tensor | None = None
    chosen_nll: Tensor | None = None  # -c before any re-weighting of tokens; None: -c
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    cpo_alpha: float = 1.0
    # PreferenceLoss.statistics of the whole window; None: these pairs are the whole window.
    matched: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("chosen", "rejected", "ref_chosen", "ref_rejected", "chosen_nll"):
            value: Tensor | None = self.__dict__[name]
            if value is not None and value.dtype in (torch.float16, torch.bfloat16):
                object.__setattr__(self, name, value.float())

    @property
    def chosen_ratio(self) -> Tensor:
        """d_c [P]."""
        assert self.ref_chosen is not None
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """d_r [P]."""
        assert self.ref_rejected is not None
        return self.rejected - self.ref_rejected

    @property
    def scores(self) -> tuple[Tensor, Tensor]:
        """(s_c, s_r), each [P]: the log-ratios through the f-divergence."""

        def score(log_ratio: Tensor) -> Tensor:
            return divergence_score(
                log_ratio,
                f_divergence_type=self.f_divergence_type,
                alpha=self.f_alpha_divergence_coef,
            )

        return score(self.chosen_ratio), score(self.rejected_ratio)

    @property
    def margin(self) -> Tensor:
        """s_c - s_r [P]."""
        chosen, rejected = self.scores
        return chosen - rejected

    def per_token(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Both [P] divided by the tokens of their completion (at least 1)."""
        assert self.chosen_lengths is not None and self.rejected_lengths is not None
        return chosen / self.chosen_lengths.clamp(min=1), rejected / self.rejected_lengths.clamp(
            min=1
        )

    @property
    def nll(self) -> Tensor:
        """-log p(chosen) [P], summed over its tokens."""
        return -self.chosen if self.chosen_nll is None else self.chosen_nll

    @classmethod
    def example(cls, **changes: Any) -> Pairs:
        """The pair of the docstrings: policy -12 and -15, reference -13 and -14.5, 4 and 6 tokens.

        So d_c = 1, d_r = -0.5, and with beta = 0.1 the logit is 0.1 * 1.5 = 0.15.

        >>> Pairs.example().margin
        tensor([1.5000])
        """
        chosen, rejected, ref_chosen, ref_rejected = torch.tensor([[-12.0], [-15], [-13], [-14.5]])
        n, m = torch.tensor([[4], [6]])
        pair = cls(chosen, rejected, ref_chosen, ref_rejected, chosen_lengths=n, rejected_lengths=m)
        return replace(pair, **changes)


@dataclass(frozen=True)
class PreferenceLoss:
    """A row of DPO_LOSSES: the function and which inputs it reads."""

    loss: Callable[[Pairs], Tensor]  # Pairs -> [P]
    reference: bool = True  # needs ref_chosen and ref_rejected
    divergence: bool = False  # honours f_divergence_type
    smoothing: bool = False  # honours label_smoothing
    lengths: bool = False  # cannot do without chosen_lengths and rejected_lengths
    # Pairs of the whole window -> `matched`: statistics [P] that no pair can work out by itself.
    statistics: Callable[[Pairs], tuple[Tensor, ...]] | None = None
    unit: str = "pairs"  # what the window's sum of losses is divided by


def logistic(logits: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """-(1 - e) log sigmoid(x) - e log sigmoid(-x), elementwise, finite for any finite x."""
    loss = -logsigmoid(logits)
    if label_smoothing == 0:
        return loss
    # -log sigmoid(-x) = x - log sigmoid(x)
    return loss + label_smoothing * logits


def match_ranks(values: Tensor, others: Tensor) -> Tensor:
    """For each value, the member of `others` with the same rank: [N], [N] -> [N], detached.

    The statistic behind the optimal-transport losses, which compare sorted values with sorted
    others. Ranks are over everything given, so hand in the values of the whole optimizer step.

    >>> match_ranks(torch.tensor([0.3, 0.1, 0.2]), torch.tensor([7.0, 9.0, 8.0]))
    tensor([9., 7., 8.])
    """
    ranks = values.detach().argsort(stable=True).argsort()
    return others.detach().sort().values[ranks]
