"""The ONE ordered list of techniques. The model, the step and the losses know none of them.

Order: what changes weights comes before what wraps blocks, and what moves parameters comes last
(quantise, adapters, compile, checkpointing, offload, shard): the innermost wrapper comes first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.adapters import Adapters
from lean_trl.techniques.allocator import Allocator
from lean_trl.techniques.checkpointing import ActivationCheckpointing
from lean_trl.techniques.compile import Compile
from lean_trl.techniques.in_backward import OptimizerInBackward
from lean_trl.techniques.offload import ActivationOffloading
from lean_trl.techniques.optimizer_state import OptimizerState
from lean_trl.techniques.padding import PaddingFree
from lean_trl.techniques.quantize import Quantization
from lean_trl.techniques.shard import Sharding
from lean_trl.techniques.technique import Evidence, Technique, Trial
from lean_trl.techniques.tiled_mlp import TiledMLP

T = TypeVar("T", bound=Technique)

TECHNIQUES: tuple[type[Technique], ...] = (
    Allocator,
    PaddingFree,
    Quantization,
    Adapters,
    TiledMLP,
    Compile,
    ActivationCheckpointing,
    ActivationOffloading,
    Sharding,
    OptimizerState,
    OptimizerInBackward,
)


class Applied:
    """The techniques of a run, in order. Called, it gives train_step's `around`."""

    def __init__(self, active: Sequence[Technique]) -> None:
        self.active = tuple(active)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as stack:
            for technique in self.active:
                stack.enter_context(technique.around_micro_batch())
            yield

    def find(self, kind: type[T]) -> T | None:
        """The technique of a kind, when the run has it."""
        return next((each for each in self.active if isinstance(each, kind)), None)

    def evidence(self, trial: Trial) -> dict[str, Evidence]:
        """{technique: what the trial showed}. ValueError names those that did nothing."""
        found = {technique.name: technique.evidence(trial) for technique in self.active}
        idle = [t for t in self.active if not found[t.name].amount]
        if idle:
            raise ValueError(
                "\n".join(
                    f"{t.name} is asked for by {' and '.join(t.settings)}, but a trial micro-batch "
                    f"shows no effect: {found[t.name].text}. Leave it out, or report it as a bug"
                    for t in idle
                )
            )
        return found


def asked_for(config: Config) -> list[Technique]:
    """The techniques that the settings switch on, in order."""
    return [technique for make in TECHNIQUES if (technique := make(config)).enabled]


def before_cuda(config: Config, environment: MutableMapping[str, str] = os.environ) -> None:
    """Call before anything touches the GPU: what torch reads from the environment is set here."""
    for technique in asked_for(config):
        technique.before_cuda(environment)


def apply_techniques(model: CausalLM, config: Config) -> Applied:
    """Apply every technique that the settings ask for, in order.

    The model is changed in place. Returns train_step's `around`, which also collects evidence.
    """
    applied = Applied(asked_for(config))
    for technique in applied.active:
        technique.on_model(model)
    return applied
