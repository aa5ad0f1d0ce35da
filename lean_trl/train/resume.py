"""A run and its checkpoints: which one it continues, what is put back, what is saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lean_trl.config import Config, units_per_step
from lean_trl.techniques.shard import DTYPES
from lean_trl.train.checkpoint import Checkpointer
from lean_trl.train.checkpoint_files import read_manifest
from lean_trl.train.distributed import World
from lean_trl.train.snapshot import (
    model_tensors,
    run_tensors,
    set_generators,
    tensors_to_load,
    trained_tensors,
)

if TYPE_CHECKING:
    from lean_trl.train.setup import Run

# What may change between the parts of a run: how it is cut, shown and stored, and how far it goes.
FREE = {
    "output_dir",
    "eval_only",
    "checkpoint",
    "distributed",
    "logging",
    "memory",
    "model.attention",
    "data.cache_dir",
    "data.eval_path",
    "data.eval_split",
    "train.batch_size",  # see same_window
    "train.micro_batch_size",
    "train.max_tokens_per_micro_batch",
    "train.gradient_accumulation_steps",
    "train.max_steps",
    "train.num_epochs",
    "train.eval_every",
    "train.deterministic",
    "rollout.gather_for_generation",
    "rollout.kv_cache_gib",
    "rollout.log_completions",
    "rollout.reward_timeout_s",
    "rollout.steps_per_generation",  # the feed compares the completions of a generation
}


def open_checkpoints(config: Config, world: World) -> tuple[Checkpointer, Path | None]:
    """The run's checkpoints, and the one to continue from.

    Raises ValueError when the newest was saved with settings that give other results.
    """
    folder = Path(config.output_dir) / "checkpoints"
    group, settings = world.group, config.checkpoint
    if settings.async_save and group is not None:
        group = dist.new_group(backend="gloo")  # a thread of its own needs a group of its own
    checkpointer = Checkpointer(
        folder, group=group, keep=settings.keep, background=settings.async_save
    )
    if settings.resume == "never":
        if world.is_main and not config.eval_only and folder.is_dir() and any(folder.iterdir()):
            print(f"starting anew; earlier checkpoints are now {_set_aside(folder)}", flush=True)
        return checkpointer, None
    path = checkpointer.newest(tidy=not config.eval_only)
    if path is not None and settings.resume == "auto":
        changed = list(_changes(read_manifest(path)["state"]["config"], asdict(config)))
        if changed:
            raise ValueError(
                f"{path} was saved with other settings: {'; '.join(changed)}. Set "
                "checkpoint.resume to always (continue with the new ones) or never (start anew), "
                "or set another output_dir"
            )
    return checkpointer, path


def same_window(config: Config, path: Path, world: World) -> Config:
    """The settings with the checkpoint's units per step, whatever the number of ranks is now: data
    position and learning rate count in steps.
    """
    units = read_manifest(path)["state"]["units_per_step"]
    train = config.train
    if units_per_step(train, world.size) == units:
        return config
    if train.batch_size is not None:
        raise ValueError(
            f"{path} counts steps of {units} units, train.batch_size is {train.batch_size}: "
            f"set it to {units}, or start anew with checkpoint.resume never"
        )
    return replace(config, train=replace(train, batch_size=units, gradient_accumulation_steps=None))


def restore(run: Run, path: Path) -> None:
    """Put back what `save` saved: the run goes on as if it had not stopped."""
    tensors = tensors_to_load(path, run.model, run.optimizer, run.world.rank)
    tensors |= _moving_reference(run)
    state = run.checkpoints.load(path, tensors)
    set_generators(tensors, run.world.rank)
    run.train_feed.load_state_dict(state["feed"])
    run.log.load_state_dict(state["log"])
    run.step = run.saved_step = state["step"]
    run.say(f"resumed from {path}")


def save(run: Run) -> None:
    """Write a checkpoint of the step that is done, unless there is one."""
    if run.saved_step == run.step:
        return
    state = {
        "step": run.step,
        "feed": run.train_feed.state_dict(),
        "log": run.log.state_dict(),
        "units_per_step": units_per_step(run.config.train, run.world.size),
        "config": asdict(run.config),
    }
    tensors = run_tensors(run.model, run.optimizer, run.world.rank) | _moving_reference(run)
    run.checkpoints.save(run.step, tensors, state)
    run.saved_step = run.step
    run.log.pause()


def _moving_reference(run: Run) -> dict[str, torch.Tensor]:
    """{reference.<parameter>: weight} when training moves it; a frozen one is loaded anew."""
    if not run.config.loss.sync_ref_model:
        return {}
    assert run.reference is not None
    weights = model_tensors(run.reference).items()
    return {f"reference.{name.removeprefix('model.')}": weight for name, weight in weights}


def dry_run(run: Run) -> None:
    """Fail before the first step where the first save would: with what is trained, two moments of
    it, and a reference that moves.
    """

    def size(tensors: Mapping[str, torch.Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors.values())

    run.checkpoints.dry_run(3 * size(trained_tensors(run.model)) + size(_moving_reference(run)))


def export_weights(run: Run) -> dict[str, torch.Tensor]:
    """{name: whole tensor on the CPU} on rank 0: parameters in model.dtype, buffers as they are.

    All ranks call it.
    """
    dtype = DTYPES[run.config.model.dtype]
    whole = {}
    for name, weight in model_tensors(run.model).items():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if run.world.is_main:
            whole[name.removeprefix("model.")] = full.to("cpu", dtype)
    if run.world.is_main:  # what a model has beside its parameters is whole on every rank
        parameters = {name for name, _ in run.model.named_parameters()}
        state = run.model.state_dict()
        whole |= {name: state[name].cpu() for name in state if name not in parameters}
    return whole


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs in keys that are not free."""
    for key in sorted({*before, *now}):
        path, old, new = f"{prefix}{key}", before.get(key), now.get(key)
        if path in FREE or old == new:
            continue
        if isinstance(old, Mapping) and isinstance(new, Mapping) and not prefix:
            yield from _changes(old, new, f"{path}.")
        else:
            yield f"{path} was {old!r}, is {new!r}"


def _set_aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)
