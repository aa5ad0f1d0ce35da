"""The ONE ordered list of techniques. The model, the step and the losses know none of them.

Order: what changes weights comes before what wraps blocks, and what moves parameters comes last
(quantise, adapters, checkpointing, offload, compile, shard).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.checkpointing import ActivationCheckpointing
from lean_trl.techniques.shard import Sharding


class Technique(Protocol):
    """What a technique may do. `enabled` says whether the run's settings ask for it."""

    name: str
    enabled: bool

    def on_model(self, model: CausalLM) -> None:
        """Change the model once, before the optimizer is built."""

    def around_micro_batch(self) -> AbstractContextManager:
        """Surround each micro-batch's forward and backward."""


TECHNIQUES: tuple[Callable[[Config], Technique], ...] = (ActivationCheckpointing, Sharding)


def apply_techniques(model: CausalLM, config: Config) -> Callable[[], AbstractContextManager]:
    """Apply every technique that the settings ask for, in order; returns train_step's `around`.

    The model is changed in place.
    """
    active = [technique for make in TECHNIQUES if (technique := make(config)).enabled]
    for technique in active:
        technique.on_model(model)

    @contextmanager
    def around() -> Iterator[None]:
        with ExitStack() as stack:
            for technique in active:
                stack.enter_context(technique.around_micro_batch())
            yield

    return around
