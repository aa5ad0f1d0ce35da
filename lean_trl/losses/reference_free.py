"""The preference losses that need no reference model, and the likelihood term of mixtures.

c and r: summed log-probs of chosen and rejected, n_c and n_r their tokens. The examples use
Pairs.example(): c = -12, r = -15, n_c = 4, n_r = 6.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lean_trl.losses.pairs import Pairs, PreferenceLoss, logistic


def sft(p: Pairs) -> Tensor:
    """-c: maximum likelihood of the chosen completions. Divide by their tokens, not by the pairs.

    The generation term of mixed preference optimisation: Wang et al., "Enhancing the Reasoning
    Ability of Multimodal Large Language Models via Mixed Preference Optimization" (arXiv
    2411.10442).

    >>> sft(Pairs.example())
    tensor([12.])
    """
    return p.nll


def simpo(p: Pairs) -> Tensor:
    """logistic(beta (c / n_c - r / n_r) - gamma).

    Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward"
    (arXiv 2405.14734), equation 6; beta there is 2 to 10.

    >>> simpo(Pairs.example(beta=2.0))                             # x = 2 (-3 + 2.5) - 0.5
    tensor([1.7014])
    """
    chosen, rejected = p.per_token(p.chosen, p.rejected)
    return logistic(p.beta * (chosen - rejected) - p.simpo_gamma, p.label_smoothing)


def cpo(p: Pairs) -> Tensor:
    """logistic(beta (c - r)) - alpha c / n_c.

    Xu et al., "Contrastive Preference Optimization" (arXiv 2401.08417), section 3. The likelihood
    is per token, as everyone trains it; the paper writes the sum.

    >>> cpo(Pairs.example())                                       # -log sigmoid(0.3) + 12 / 4
    tensor([3.5544])
    """
    nll, _ = p.per_token(p.nll, p.nll)
    return logistic(p.beta * (p.chosen - p.rejected), p.label_smoothing) + p.cpo_alpha * nll


def orpo(p: Pairs) -> Tensor:
    """-c / n_c - beta log sigmoid(lo(c / n_c) - lo(r / n_r)), lo(l) = log(e^l / (1 - e^l)).

    Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model"
    (arXiv 2403.07691), equations 6 and 7; beta is the paper's lambda.

    >>> orpo(Pairs.example())                                      # 3 + 0.1 * 0.9964
    tensor([3.0996])
    """
    chosen, rejected = p.per_token(p.chosen, p.rejected)
    nll, _ = p.per_token(p.nll, p.nll)
    return nll - p.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p, finite where p rounds to 1."""
    logprob = logprob.clamp(max=-torch.finfo(logprob.dtype).eps)
    return logprob - torch.log(-torch.expm1(logprob))


REFERENCE_FREE_LOSSES = {
    "sft": PreferenceLoss(sft, reference=False, unit="chosen_tokens"),
    "simpo": PreferenceLoss(simpo, reference=False, smoothing=True, lengths=True),
    "cpo": PreferenceLoss(cpo, reference=False, smoothing=True, lengths=True),
    "orpo": PreferenceLoss(orpo, reference=False, lengths=True),
}
