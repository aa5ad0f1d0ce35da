"""The settings of memory techniques, and the checks across them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from lean_trl.settings import Count, Index, Positive, Share, setting


@dataclass(frozen=True)
class CheckpointingConfig:
    selective: bool = setting(False, "keep attention's output too, so that it runs once")
    every: Count = setting(1, "run every k-th block again, keep the others whole")
    budget: Share | None = setting(
        None, "share of the blocks' activations to keep, from 0 (none) to 1 (all)"
    )


@dataclass(frozen=True)
class OffloadingConfig:
    use_streams: bool = setting(True, "GPU: copy while it computes, on a stream each way")
    pin_memory: bool = setting(True, "GPU: copy through page-locked host memory")
    min_bytes: Index = setting(1024, "smaller tensors stay on the device")
    max_pinned_gib: Positive | None = setting(
        None, "most host memory to page-lock, in GiB; null: half of what there is"
    )


@dataclass(frozen=True)
class InBackwardConfig:
    clip: Literal["two_passes", "previous_norm"] | None = setting(
        None,
        "two_passes: exact, at twice the cost; previous_norm: by the step before's; null: none",
    )


@dataclass(frozen=True)
class MemoryConfig:
    activation_checkpointing: bool = setting(True, "recompute each block in the backward")
    activation_checkpointing_kwargs: CheckpointingConfig = field(
        default_factory=CheckpointingConfig
    )
    activation_offloading: bool = setting(
        False, "keep what blocks save for backward in host memory"
    )
    activation_offloading_kwargs: OffloadingConfig = field(default_factory=OffloadingConfig)
    cpu_offload: bool = setting(
        False, "keep parameters, gradients and optimizer state in CPU memory; the update runs there"
    )
    optimizer_in_backward: InBackwardConfig | None = None
    compile: bool = setting(False, "torch.compile each block; the first step takes a minute")
    tiled_mlp: Count | None = setting(
        None, "run MLPs over so many tokens at a time, for very long sequences; null: all at once"
    )
    expandable_segments: bool | None = setting(
        None, "GPU: memory segments that grow, against fragmentation; null: where there is one"
    )


def memory_contradictions(memory: MemoryConfig) -> Iterator[str]:
    """Options of techniques that are off, and options that exclude each other."""
    for name, default in (
        ("activation_checkpointing", CheckpointingConfig()),
        ("activation_offloading", OffloadingConfig()),
    ):
        options = getattr(memory, f"{name}_kwargs")
        if options != default and not getattr(memory, name):
            yield (
                f"memory.{name}_kwargs has no effect while memory.{name} is false: set it true, "
                "or leave the kwargs out"
            )
    checkpointing = memory.activation_checkpointing_kwargs
    if memory.compile and checkpointing.selective:
        yield (
            "memory.compile hides attention from activation_checkpointing_kwargs.selective: leave "
            "one of them out"
        )
    if memory.compile and memory.tiled_mlp:
        yield "memory.compile and memory.tiled_mlp both rewrite MLPs: leave one of them out"
    if checkpointing.budget is not None and checkpointing.every != 1:
        yield (
            "memory.activation_checkpointing_kwargs: budget and every both say which blocks run "
            "again: leave one of them out"
        )


def in_backward_contradictions(
    memory: MemoryConfig,
    *,
    micro_batches: int | None,
    micro_batch_size: int,
    max_grad_norm: float | None,
) -> Iterator[str]:
    """What an update inside backward cannot have. micro_batches: of a step; None: not fixed."""
    options = memory.optimizer_in_backward
    if options is None:
        return
    if micro_batches != 1:
        instead = (
            "leave out train.max_tokens_per_micro_batch"
            if micro_batches is None
            else f"set train.micro_batch_size {micro_batch_size * micro_batches}"
        )
        yield (
            "memory.optimizer_in_backward steps in every backward, so a step is one micro-batch: "
            f"{instead}"
        )
    if max_grad_norm and options.clip is None:
        yield (
            "memory.optimizer_in_backward does not know the global norm before it steps: set "
            "train.max_grad_norm null, or its clip to two_passes (exact) or previous_norm"
        )
    if options.clip and not max_grad_norm:
        yield "memory.optimizer_in_backward.clip has no effect without train.max_grad_norm"
