"""The frozen reference of a policy with adapters, without a second model.

A new adapter that starts at zero: the policy with its adapters off. Any other start (a saved
adapter, PiSSA, OLoRA, LoftQ, a method whose adapter is not off at first): the policy with the
values that its trained weights had at the start, swapped in while it scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.adapters import peft_settings
from lean_trl.train.distributed import local_part, reshard
from lean_trl.types import Batch, Scores


def shares_weights(config: Config) -> bool:
    """Whether the run's reference, if it has one, is the policy in other weights."""
    precomputed = config.loss.precompute_ref_log_probs
    return config.peft is not None and config.model.ref_path is None and not precomputed


def adapter_reference(policy: CausalLM) -> nn.Module:
    """A frozen model in the weights of `policy`, as it is now: before its first step."""
    return AdaptersOff(policy) if starts_at_zero(policy) else StartingWeights(policy)


def starts_at_zero(policy: CausalLM) -> bool:
    """Whether the policy without its adapters is the policy that training starts from."""
    settings = peft_settings(policy)
    return (
        settings.peft_type == "LORA"
        and settings.init_lora_weights in (True, "gaussian")
        and settings.bias == "none"
        and not _was_loaded(policy)
    )


def _was_loaded(policy: CausalLM) -> bool:
    """Whether an adapter came from a file: the factors that start at zero are not zero."""
    zero_at_first = (".lora_B.", ".lora_embedding_A.")
    factors = [p for name, p in policy.named_parameters() if any(z in name for z in zero_at_first)]
    return any(bool(local_part(factor)[0].any()) for factor in factors)


class _Reference(nn.Module):
    def __init__(self, policy: CausalLM) -> None:
        super().__init__()
        self.policy = policy

    @torch.no_grad()
    def forward(self, batch: Batch, want: tuple[str, ...] = ()) -> Scores:
        was_training = self.policy.training
        self.policy.eval()
        try:
            with self.as_reference():
                return self.policy(batch, want)
        finally:
            self.policy.train(was_training)

    def as_reference(self) -> AbstractContextManager:
        """The policy is the reference inside of it."""
        raise NotImplementedError


class AdaptersOff(_Reference):
    """The base model."""

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        layers = list(adapted(self.policy))
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


class StartingWeights(_Reference):
    """The policy with the trained weights of the moment when this was made."""

    def __init__(self, policy: CausalLM) -> None:
        super().__init__(policy)
        reshard(policy)
        self.trained = [p for p in policy.parameters() if p.requires_grad]
        self.start = [local_part(p)[0].clone() for p in self.trained]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        reshard(self.policy)  # gathered weights are copies
        self._swap()
        try:
            yield
        finally:
            reshard(self.policy)
            self._swap()

    def _swap(self) -> None:
        for parameter, other in zip(self.trained, self.start, strict=True):
            mine = local_part(parameter)[0]
            keep: Tensor = mine.clone()
            mine.copy_(other)
            other.copy_(keep)


def adapted(model: nn.Module) -> Iterator[Any]:
    """The layers that peft put into the model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield module
