"""Supervised fine-tuning: what one scored token costs. U scored tokens."""

from __future__ import annotations

from torch import Tensor


def nll(logprobs: Tensor) -> Tensor:
    """-log p: maximum likelihood."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """-sg(p) * log p: dynamic fine-tuning, which takes the 1/p out of the gradient of maximum
    likelihood.

    Wu et al., "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward
    Rectification" (arXiv 2508.05629), equation 9.
    """
    return -logprobs * logprobs.detach().exp()


SFT_LOSSES = {"nll": nll, "dft": dft}


def sft_loss(logprobs: Tensor, *, loss_type: str = "nll") -> Tensor:
    """Loss of each scored token, unreduced: fp32 [U] -> [U].

    logprobs: log-probabilities of the target tokens, in nats. loss_type: a key of SFT_LOSSES ("nll"
    or "dft"). Divide the sum by the number of scored tokens of the whole optimizer step, not of a
    micro-batch.

    >>> import torch
    >>> sft_loss(torch.tensor([0.5, 0.25]).log())
    tensor([0.6931, 1.3863])
    >>> sft_loss(torch.tensor([0.5, 0.25]).log(), loss_type="dft")
    tensor([0.3466, 0.3466])

    Raises ValueError for an unknown loss_type.
    """
    if loss_type not in SFT_LOSSES:
        raise ValueError(f"unknown SFT loss_type {loss_type!r}: choose one of {sorted(SFT_LOSSES)}")
    return SFT_LOSSES[loss_type](logprobs)
