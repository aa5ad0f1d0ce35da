"""A trial micro-batch at start: every technique that was asked for must show what it did.

The run's state is as before afterwards: random generators, gradients (none), mode and weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.optim import Optimizer

from lean_trl.config import Config
from lean_trl.data.batch import build_batch
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.apply import Applied
from lean_trl.techniques.technique import Evidence, Trial
from lean_trl.train.distributed import compute_device, reshard
from lean_trl.types import Batch, Example

# Unequal, so that a padded batch would have padding; together small next to any real micro-batch.
LENGTHS = (48, 16)


def trial_batch(config: Config, vocab_size: int) -> Batch:
    """Two sequences of made-up ids, laid out as the run's micro-batches are."""
    examples = [Example(np.arange(1, 1 + n) % vocab_size) for n in LENGTHS]
    data = config.data
    return build_batch(
        examples, padding_free=data.padding_free, pad_to_multiple_of=data.pad_to_multiple_of
    )


def prove(
    applied: Applied, model: CausalLM, optimizer: Optimizer, config: Config
) -> dict[str, Evidence]:
    """Forward and backward of one small batch; what each technique shows of it.

    Raises ValueError for a technique that did nothing. All ranks call it.
    """
    device = compute_device(model)
    batch = trial_batch(config, model.config.vocab_size).to(device)
    was_training = model.training
    with _generators_kept(device):
        model.train()
        with applied():
            scores = model(batch)
            (scores.logprobs if scores.reward is None else scores.reward).mean().backward()
        reshard(model)  # as the optimizer finds it
        try:
            return applied.evidence(Trial(model, batch, optimizer))
        finally:
            for parameter in model.parameters():
                parameter.grad = None
            model.train(was_training)


def table(evidence: dict[str, Evidence]) -> str:
    """One line a technique.

    >>> print(table({"activation_checkpointing": Evidence(2, "2 blocks of 2 run again")}))
    techniques, as a trial micro-batch shows them:
      activation_checkpointing   2 blocks of 2 run again
    """
    width = max((len(name) for name in evidence), default=0) + 3
    lines = [f"  {name:{width}}{found.text}" for name, found in evidence.items()]
    return "\n".join(["techniques, as a trial micro-batch shows them:", *lines])


@contextmanager
def _generators_kept(device: torch.device) -> Iterator[None]:
    """torch's generators continue afterwards as if nothing had been drawn."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
