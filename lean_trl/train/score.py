"""The frozen reference: its log-probs are data, written into extras before the policy's graph
exists.

Two ways: a second model that scores each window (`referenced`), or log-probs on disk
(train/precompute.py) that the feed hands out, with no reference in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from lean_trl.data.plan import Window
from lean_trl.train.distributed import compute_device, local_part, reshard
from lean_trl.types import Batch


def freeze(model: nn.Module) -> nn.Module:
    """The model without gradients and in evaluation mode."""
    return model.requires_grad_(False).eval()


@torch.no_grad()
def with_ref_logprobs(model: nn.Module, batch: Batch) -> Batch:
    """The batch on the model's device, with ref_logprobs; its mismatched completions too."""
    batch = batch.to(compute_device(model))
    if batch.mismatched is not None:
        batch = replace(batch, mismatched=with_ref_logprobs(model, batch.mismatched))
    return batch.with_extras(ref_logprobs=model(batch).logprobs)


def referenced(windows: Iterable[Window], model: nn.Module | None) -> Iterator[Window]:
    """The windows with ref_logprobs of a frozen model in every batch; None: as they are.

    All batches of a window are scored before it is handed out, so no activations of the policy are
    alive meanwhile.
    """
    for window in windows:
        if model is None:
            yield window
            continue
        batches = [with_ref_logprobs(model, batch) for batch in window.batches]
        reshard(model)
        yield replace(window, batches=batches)


@torch.no_grad()
def move_reference(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """reference <- alpha policy + (1 - alpha) reference, weight by weight, each rank its own part.

    Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment" (arXiv 2404.09656),
    equation 5 (soft update; alpha = 1 is the hard one).

    >>> reference, policy = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> _ = nn.init.constant_(reference.weight, 1.0), nn.init.constant_(policy.weight, 3.0)
    >>> move_reference(reference, policy, 0.25)
    >>> reference.weight.item()
    1.5
    """
    ours, theirs = dict(reference.named_parameters()), dict(policy.named_parameters())
    assert ours.keys() == theirs.keys(), "reference and policy differ in their parameters"
    for name, weight in ours.items():
        mine, first = local_part(weight)
        target, other_first = local_part(theirs[name])
        assert (mine.shape, first) == (target.shape, other_first), f"{name} is cut differently"
        mine.lerp_(target.to(mine.device, mine.dtype), alpha)
