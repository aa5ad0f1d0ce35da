"""What a checkpoint holds of a run as tensors: weights, optimizer state, random generators."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lean_trl.train.checkpoint_files import saved_sizes
from lean_trl.train.distributed import reshard


def run_tensors(model: nn.Module, optimizer: Optimizer, rank: int) -> dict[str, Tensor]:
    """{name: tensor} of everything that training changes.

    model.<parameter>, optimizer.<parameter>.<key> as the optimizer keeps them (sharded like their
    parameter), rng.<rank>.<generator> of this rank.
    """
    return trained_tensors(model) | _optimizer_tensors(model, optimizer) | _generators(rank)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """{model.<parameter>: weight}."""
    reshard(model)
    return {f"model.{name}": p.detach() for name, p in model.named_parameters()}


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """{model.<parameter>: weight} of what is trained; frozen weights are where they came from."""
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    return {name: weight for name, weight in model_tensors(model).items() if name in trained}


def tensors_to_load(
    path: Path, model: nn.Module, optimizer: Optimizer, rank: int
) -> dict[str, Tensor]:
    """Where the tensors of a checkpoint go, for a run that has not stepped yet.

    After loading call `set_generators`. A rank that the checkpoint does not know keeps the
    generators of a new run.
    """
    sizes = saved_sizes(path)
    if any(name.startswith("optimizer.") for name in sizes):
        _make_state(optimizer)
    wanted = trained_tensors(model) | _optimizer_tensors(model, optimizer)
    mine = [name for name in sizes if name.startswith(f"rng.{rank}.")]
    return wanted | {name: torch.empty(sizes[name], dtype=torch.uint8) for name in mine}


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            assert isinstance(value, Tensor), f"optimizer state {key} is no tensor"
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _make_state(optimizer: Optimizer) -> None:
    """Let the optimizer lay out its state itself: a step of rate 0 on gradients of 0.

    It comes before the weights are loaded, so it cannot spoil them.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _generators(rank: int) -> dict[str, Tensor]:
    """The states of this process's random generators, uint8."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    kind, keys, *rest = np.random.get_state(legacy=True)
    numpy = (kind, np.asarray(keys).tolist(), *rest)
    for name, state in (("python", random.getstate()), ("numpy", numpy)):
        states[name] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    return {f"rng.{rank}.{name}": state for name, state in states.items()}


def set_generators(tensors: dict[str, Tensor], rank: int) -> None:
    """Continue the generators whose states are among loaded tensors."""
    states = {
        name.rpartition(".")[2]: state
        for name, state in tensors.items()
        if name.startswith(f"rng.{rank}.")
    }
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        version, internal, gauss = json.loads(bytes(states["python"].tolist()))
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        np.random.set_state(tuple(json.loads(bytes(states["numpy"].tolist()))))
