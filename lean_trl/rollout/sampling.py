"""Drawing the next tokens of several sequences at once, each from its own stream of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import pad

from lean_trl.rollout.engine import Sampling

STEPS = 1 << 24  # numbers that fp32 can tell apart below 1
ONE = 1 << 40  # a probability of 1 as an integer: 2^22 of them still fit into 63 bits
BLOCK = 256


class Dice:
    """The random numbers of one completion: they depend on the request's seed and the completion's
    index alone, so neither on what else is generated nor on the order.
    """

    def __init__(self, seed: int, index: int) -> None:
        self._random = Random(f"{seed} {index}")

    def roll(self) -> float:
        """Uniform in [0, 1), exact in fp32."""
        return self._random.randrange(STEPS) / STEPS


def draw(
    logits: Tensor, sampling: Sampling, uniform: Tensor, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(ids int64 [S], their log-probs fp32 [S]) from fp32 logits [S, V].

    uniform: fp32 [S] in [0, 1); the id is where the distribution's running sum passes it. seen:
    bool [S, V], ids that the repetition penalty lowers; needed when there is one. The log-prob is
    that of the whole distribution at the temperature (at 1 for greedy), as training computes it:
    before penalty and filters.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
    >>> draw(logits, Sampling(), torch.tensor([0.1]))
    (tensor([0]), tensor([-0.4076]))
    >>> draw(logits, Sampling(temperature=0.5), torch.tensor([0.1]))
    (tensor([0]), tensor([-0.1429]))
    """
    temperature = sampling.temperature
    scaled = logits if temperature in (0.0, 1.0) else logits / temperature
    total = scaled.logsumexp(-1)
    if sampling.repetition_penalty != 1:
        assert seen is not None
        factor = sampling.repetition_penalty
        lowered = torch.where(scaled > 0, scaled / factor, scaled * factor)
        candidates = torch.where(seen, lowered, scaled)
    else:
        candidates = scaled
    if temperature == 0:
        ids = candidates.argmax(-1)
    else:
        ids = _pick(_filter(candidates, sampling), uniform)
    return ids, scaled.gather(-1, ids[:, None])[:, 0] - total


def _filter(logits: Tensor, sampling: Sampling) -> Tensor:
    if 0 < sampling.top_k < logits.shape[-1]:
        smallest = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if sampling.top_p < 1:
        # A token stays when those before it do not hold top_p yet: the first one always does.
        ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
        shares = (ordered * ONE).long()
        drop = shares.cumsum(-1) - shares >= int(sampling.top_p * ONE)
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    if sampling.min_p > 0:
        largest = logits.amax(-1, keepdim=True)
        threshold = largest + torch.tensor(sampling.min_p).log()
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    return logits


def _pick(logits: Tensor, uniform: Tensor) -> Tensor:
    """Where the running sum of the probabilities first exceeds uniform * their sum.

    In integers: exact, the same on every device, and nothing without a probability is ever found.
    Block by block, so that one pass over V is enough.
    """
    num, vocab = logits.shape
    weights = ((logits - logits.amax(-1, keepdim=True)).exp_() * ONE).long()
    weights = pad(weights, (0, -vocab % BLOCK)).view(num, -1, BLOCK)
    sums = weights.sum(-1).cumsum(-1)  # [S, blocks]
    target = (uniform[:, None].double() * sums[:, -1:].double()).long()
    block = torch.searchsorted(sums, target, right=True)
    before = pad(sums, (1, 0)).gather(1, block)
    inner = weights[torch.arange(num, device=logits.device), block[:, 0]].cumsum(-1)
    return (block * BLOCK + torch.searchsorted(inner, target - before, right=True))[:, 0]


def runs(samplings: Sequence[Sampling]) -> dict[Sampling, list[int]]:
    """{sampling: the rows that use it}: as a rule one entry."""
    groups: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        groups.setdefault(sampling, []).append(row)
    return groups
