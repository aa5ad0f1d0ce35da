"""Load balancing of a mixture of experts.

    aux = E * sum_e f_e * p_e          (Fedus et al. 2022, Switch Transformers, equation 4)

f_e: share of the tokens that chose expert e, a number without a gradient; p_e: mean over tokens of
the router's probability. Both are means over layers too. The loss is linear in the tokens once f is
known, so f is counted over the whole window and all ranks first: then the loss does not depend on
how the window is cut into micro-batches.
"""

from __future__ import annotations

from torch import Tensor


def expert_shares(expert_counts: Tensor, top_k: int) -> Tensor:
    """f of the equation, fp32 [E], sums to top_k: the experts that each token chooses.

    expert_counts: fp32 [E], assignments over all layers, summed over the window and all ranks.

    >>> import torch
    >>> expert_shares(torch.tensor([6.0, 2.0, 0.0, 0.0]), top_k=2)
    tensor([1.5000, 0.5000, 0.0000, 0.0000])
    """
    return top_k * expert_counts / expert_counts.sum().clamp(min=1.0)


def router_aux_loss(router_probs: Tensor, shares: Tensor) -> Tensor:
    """Each token's part of the loss, fp32 [T]: E * sum_e shares_e * router_probs_e(t).

    router_probs: fp32 [E, T], mean over layers, 0 for padding. shares: fp32 [E], see expert_shares.
    The loss is the sum over all real tokens of the window, divided by their number (unit
    "processed"). It is at least top_k, which a perfect balance reaches.

    >>> import torch
    >>> router_probs = torch.tensor([[0.75, 0.5], [0.25, 0.5]])
    >>> router_aux_loss(router_probs, torch.tensor([1.0, 0.0]))
    tensor([1.5000, 1.0000])
    """
    return router_probs.shape[0] * (shares.detach() @ router_probs)
