"""The preference losses that compare with a reference: each maps Pairs to a loss per pair [P].

    x = beta * (s_c - s_r)

with s the log-ratio policy / reference of a completion (through an f-divergence where one is set).
The examples use the pair of Pairs.example: d_c = 1, d_r = -0.5, beta = 0.1, so x = 0.15.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

from lean_trl.losses.pairs import Pairs, PreferenceLoss, logistic, match_ranks


def sigmoid(p: Pairs) -> Tensor:
    """-(1 - e) log sigmoid(x) - e log sigmoid(-x): DPO; with label smoothing e, conservative DPO.

    Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290), equation 7; Mitchell,
    "A note on DPO with noisy preferences" (2023), equation 3.

    >>> sigmoid(Pairs.example())
    tensor([0.6210])
    >>> sigmoid(Pairs.example(label_smoothing=0.1))
    tensor([0.6360])
    """
    return logistic(p.beta * p.margin, p.label_smoothing)


def hinge(p: Pairs) -> Tensor:
    """max(0, 1 - x).

    Zhao et al., "SLiC-HF" (arXiv 2305.10425), section 2, in the form of Liu et al., "Statistical
    Rejection Sampling Improves Preference Optimization" (arXiv 2309.06657), section 3.

    >>> hinge(Pairs.example())
    tensor([0.8500])
    """
    return relu(1 - p.beta * p.margin)


def ipo(p: Pairs) -> Tensor:
    """(s_c / n_c - s_r / n_r - 1 / (2 beta))^2; without lengths n = 1, as the paper writes it.

    Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences"
    (arXiv 2310.12036), equation 17. Dividing by the tokens n of a completion is practice, not
    paper.

    >>> ipo(Pairs.example())                                       # (1/4 + 0.5/6 - 5)^2
    tensor([21.7778])
    >>> ipo(Pairs.example(chosen_lengths=None))         # (1.5 - 5)^2
    tensor([12.2500])
    """
    chosen, rejected = p.scores
    if p.chosen_lengths is not None:
        chosen, rejected = p.per_token(chosen, rejected)
    return (chosen - rejected - 1 / (2 * p.beta)).square()


def exo_pair(p: Pairs) -> Tensor:
    """q (log q - log(1 - e)) + (1 - q) (log(1 - q) - log e), q = sigmoid(x): KL to smoothed labels.

    Ji et al., "Towards Efficient Exact Optimization of Language Model Alignment" (arXiv
    2402.00856), equation 16. The label smoothing e must lie in (0, 1).

    >>> exo_pair(Pairs.example(label_smoothing=0.1))
    tensor([0.4314])
    """
    if not 0 < p.label_smoothing < 1:
        raise ValueError(
            f"exo_pair needs label_smoothing in (0, 1), got {p.label_smoothing}: 1e-3 is usual"
        )
    logits = p.beta * p.margin
    log_win, log_lose = logsigmoid(logits), logsigmoid(-logits)
    win = log_win.exp() * (log_win - math.log1p(-p.label_smoothing))
    return win + log_lose.exp() * (log_lose - math.log(p.label_smoothing))


def nca_pair(p: Pairs) -> Tensor:
    """-log sigmoid(beta d_c) - log sigmoid(-beta d_c) / 2 - log sigmoid(-beta d_r) / 2.

    Chen et al., "Noise Contrastive Alignment of Language Models with Explicit Rewards"
    (arXiv 2402.05369), NCA for a pair.

    >>> nca_pair(Pairs.example())
    tensor([1.3508])
    """
    chosen, rejected = p.beta * p.chosen_ratio, p.beta * p.rejected_ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def robust(p: Pairs) -> Tensor:
    """[-(1 - e) log sigmoid(x) + e log sigmoid(-x)] / (1 - 2 e): unbiased when a share e is
    flipped.

    Chowdhury et al., "Provably Robust DPO" (arXiv 2403.00409), section 3. e must lie in [0, 0.5).

    >>> robust(Pairs.example(label_smoothing=0.1))
    tensor([0.6022])
    """
    e = p.label_smoothing
    if not 0 <= e < 0.5:
        raise ValueError(f"robust needs label_smoothing in [0, 0.5), got {e}")
    logits = p.beta * p.margin
    return (-(1 - e) * logsigmoid(logits) + e * logsigmoid(-logits)) / (1 - 2 * e)


def bco_pair(p: Pairs) -> Tensor:
    """-log sigmoid(beta d_c) - log sigmoid(-beta d_r): a binary classifier, without reward shift.

    Jung et al., "Binary Classifier Optimization for Large Language Model Alignment"
    (arXiv 2404.04656), with delta = 0.

    >>> bco_pair(Pairs.example())
    tensor([1.3129])
    """
    return -logsigmoid(p.beta * p.chosen_ratio) - logsigmoid(-p.beta * p.rejected_ratio)


def sppo_hard(p: Pairs) -> Tensor:
    """(d_c - 1 / (2 beta))^2 + (d_r + 1 / (2 beta))^2: the chosen always wins.

    Wu et al., "Self-Play Preference Optimization" (arXiv 2405.00675), equation 4.7 with the hard
    label.

    >>> sppo_hard(Pairs.example())                                 # (1 - 5)^2 + (-0.5 + 5)^2
    tensor([36.2500])
    """
    half = 1 / (2 * p.beta)
    return (p.chosen_ratio - half).square() + (p.rejected_ratio + half).square()


def aot_statistics(window: Pairs) -> tuple[Tensor, ...]:
    """`matched` for aot: the reference's margin of the rank of each policy margin, [P]."""
    assert window.ref_chosen is not None and window.ref_rejected is not None
    margin, ref_margin = window.chosen - window.rejected, window.ref_chosen - window.ref_rejected
    return (match_ranks(margin, ref_margin),)


def aot(p: Pairs) -> Tensor:
    """logistic(beta (m - m'_rank(m))): each margin m = c - r against the reference's of equal rank.

    Melnyk et al., "Distributional Preference Alignment of LLMs via Optimal Transport"
    (arXiv 2406.05882), algorithm 1, paired. Ranks are over the window, see aot_statistics.

    >>> aot(Pairs.example())
    tensor([0.6210])
    >>> margins, ref = torch.tensor([3.0, 1.0]), torch.tensor([0.0, 2.0])   # equal rank: 2, 0
    >>> zero = torch.zeros(2)
    >>> aot(Pairs(margins, zero, ref, zero, beta=1.0))                      # logits 1 and 1
    tensor([0.3133, 0.3133])
    """
    margin = p.chosen - p.rejected
    (matched,) = p.matched or aot_statistics(p)
    return logistic(p.beta * (margin - matched), p.label_smoothing)


def aot_unpaired_statistics(window: Pairs) -> tuple[Tensor, ...]:
    """`matched` for aot_unpaired: d_r of the rank of each d_c, d_c of the rank of each d_r."""
    chosen, rejected = window.chosen_ratio, window.rejected_ratio
    return match_ranks(chosen, rejected), match_ranks(rejected, chosen)


def aot_unpaired(p: Pairs) -> Tensor:
    """f(d_c - sg(d_r')) + f(sg(d_c') - d_r) - sg(f), f(x) = logistic(beta x), ' = of equal rank.

    Melnyk et al. (arXiv 2406.05882), algorithm 1, unpaired: sorted chosen against sorted rejected
    log-ratios. Summed over a window this has the value and the gradient of
    sum_k f(sort(d_c)_k - sort(d_r)_k), and each pair can be worked out by itself. Ranks are over
    the window, see aot_unpaired_statistics.

    >>> aot_unpaired(Pairs.example())
    tensor([0.6210])
    """
    chosen, rejected = p.chosen_ratio, p.rejected_ratio
    lower, upper = p.matched or aot_unpaired_statistics(p)
    ahead = logistic(p.beta * (chosen - lower), p.label_smoothing)
    behind = logistic(p.beta * (upper - rejected), p.label_smoothing)
    return ahead + behind - ahead.detach()


def apo_zero(p: Pairs) -> Tensor:
    """1 - sigmoid(beta d_c) + sigmoid(beta d_r): chosen up, rejected down.

    D'Oosterlinck et al., "Anchored Preference Optimization and Contrastive Revisions"
    (arXiv 2408.06266), section 4, APO-zero.

    >>> apo_zero(Pairs.example())
    tensor([0.9625])
    """
    return torch.sigmoid(-p.beta * p.chosen_ratio) + torch.sigmoid(p.beta * p.rejected_ratio)


def apo_down(p: Pairs) -> Tensor:
    """sigmoid(beta d_c) + 1 - sigmoid(beta (d_c - d_r)): both down, the rejected faster.

    D'Oosterlinck et al. (arXiv 2408.06266), section 4, APO-down.

    >>> apo_down(Pairs.example())
    tensor([0.9875])
    """
    gap = p.chosen_ratio - p.rejected_ratio
    return torch.sigmoid(p.beta * p.chosen_ratio) + torch.sigmoid(-p.beta * gap)


def discopop(p: Pairs) -> Tensor:
    """(1 - w) (-log sigmoid(x)) + w exp(-x), w = sigmoid(x / tau): log-ratio modulated loss.

    Lu et al., "Discovering Preference Optimization Algorithms with and for Large Language Models"
    (arXiv 2406.08414), equation 5 (LRML). tau must lie in (0, 1].

    >>> discopop(Pairs.example())
    tensor([0.8493])
    """
    tau = p.discopop_tau
    if not 0 < tau <= 1:
        raise ValueError(f"discopop_tau must lie in (0, 1], got {tau}")
    x = p.beta * p.margin
    # w exp(-x) in one exponent: apart, a very negative x would give 0 * inf.
    exponential = (logsigmoid(x / tau) - x).exp()
    return torch.sigmoid(-x / tau) * -logsigmoid(x) + exponential


def sigmoid_norm(p: Pairs) -> Tensor:
    """logistic(beta (s_c / n_c - s_r / n_r)): DPO on log-ratios per token.

    Lambert et al., "Tulu 3" (arXiv 2411.15124), section 5: length-normalised DPO.

    >>> sigmoid_norm(Pairs.example())                              # x = 0.1 (1/4 + 0.5/6)
    tensor([0.6766])
    """
    chosen, rejected = p.per_token(*p.scores)
    return logistic(p.beta * (chosen - rejected), p.label_smoothing)


REFERENCE_LOSSES = {
    "sigmoid": PreferenceLoss(sigmoid, divergence=True, smoothing=True),
    "hinge": PreferenceLoss(hinge, divergence=True),
    "ipo": PreferenceLoss(ipo, divergence=True),
    "exo_pair": PreferenceLoss(exo_pair, divergence=True, smoothing=True),
    "nca_pair": PreferenceLoss(nca_pair),
    "robust": PreferenceLoss(robust, divergence=True, smoothing=True),
    "bco_pair": PreferenceLoss(bco_pair),
    "sppo_hard": PreferenceLoss(sppo_hard),
    "aot": PreferenceLoss(aot, smoothing=True, statistics=aot_statistics),
    "aot_unpaired": PreferenceLoss(
        aot_unpaired, smoothing=True, statistics=aot_unpaired_statistics
    ),
    "apo_zero": PreferenceLoss(apo_zero),
    "apo_down": PreferenceLoss(apo_down),
    "discopop": PreferenceLoss(discopop, divergence=True),
    "sigmoid_norm": PreferenceLoss(sigmoid_norm, divergence=True, smoothing=True, lengths=True),
}
