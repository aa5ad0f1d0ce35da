"""What a technique is: up to four hooks, and evidence that it did something.

before_cuda   before torch touches the GPU (allocator settings)
on_model      change the model once, before the optimizer is built
around        surround the forward and backward of each micro-batch
evidence      what a trial micro-batch showed; nothing shown stops the run
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch.optim import Optimizer

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.types import Batch


@dataclass(frozen=True)
class Trial:
    """A micro-batch that has run forward and backward at start; its gradients are still there."""

    model: CausalLM
    batch: Batch
    optimizer: Optimizer


@dataclass(frozen=True)
class Evidence:
    """amount: measured, 0 when the technique did nothing. text: the same for people."""

    amount: float
    text: str


class Switch(NamedTuple):
    """Settings of a run with a technique and without it, for whoever measures what it is worth.

    on, off: dotted key -> value. ranks: the least that it has an effect on. device_type: the only
    one that it has an effect on; None: any. exact: training shows the same losses with it.
    """

    name: str
    on: Mapping[str, Any]
    off: Mapping[str, Any]
    ranks: int = 1
    device_type: str | None = None
    exact: bool = True


class Technique:
    """A technique that does nothing, for others to override what they need.

    settings: the keys that switch it on, for messages. enabled: whether the run's settings do.
    """

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]]
    enabled: bool

    def __init__(self, config: Config) -> None:
        raise NotImplementedError

    @classmethod
    def switches(cls) -> tuple[Switch, ...]:
        """How benchmarks turn it on and off, each part that can be had alone: `settings` true or
        false unless a technique knows better."""
        on, off = (dict.fromkeys(cls.settings, value) for value in (True, False))
        return (Switch(cls.name, on, off),)

    def before_cuda(self, environment: MutableMapping[str, str]) -> None:
        """Set what torch reads from the environment when it starts the GPU."""

    def on_model(self, model: CausalLM) -> None:
        """Change the model once, before the optimizer is built."""

    def around_micro_batch(self) -> AbstractContextManager:
        """Surround each micro-batch's forward and backward."""
        return nullcontext()

    def evidence(self, trial: Trial) -> Evidence:
        """What the trial micro-batch showed of this technique."""
        raise NotImplementedError
