"""Sharding: FSDP2 cuts parameters, gradients and optimizer state over the ranks (ZeRO-3,
Rajbhandari et al. 2020), and computes in another dtype than the parameters are stored in.

Units: each block; an untied head; the rest (embedding, final norm, tied head) is the root, which
stays whole after its forward because the backward begins with it. A mesh of one rank cuts nothing,
but still stores in fp32 and computes in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from lean_trl.config import Config
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.technique import Evidence, Switch, Technique, Trial
from lean_trl.train.distributed import make_mesh, reshard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """Storage dtype of trained parameters and their gradients, and what is computed and sent in."""

    storage: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype | None = None  # None: storage


class Sharding(Technique):
    """`distributed.sharding`, `memory.cpu_offload`, a `model.dtype` that is not the storage's."""

    name = "sharding"
    settings = ("distributed.sharding", "model.dtype", "memory.cpu_offload")

    def __init__(self, config: Config) -> None:
        self.distributed = config.distributed
        self.kind = sharding_kind(config)
        reduce = config.distributed.reduce_dtype
        self.precision = Precision(
            DTYPES[config.train.param_dtype],
            DTYPES[config.model.dtype],
            None if reduce is None else DTYPES[reduce],
        )
        self.cpu_offload = config.memory.cpu_offload
        self.enabled = needs_mesh(config)

    @classmethod
    def switches(cls) -> tuple[Switch, ...]:
        sharding, offload = "distributed.sharding", "memory.cpu_offload"
        return (
            Switch("fsdp", {sharding: "fsdp"}, {sharding: "none"}, ranks=2),
            # Without a GPU everything is in CPU memory already.
            Switch("cpu_offload", {offload: True}, {offload: False}, device_type="cuda"),
        )

    def on_model(self, model: CausalLM) -> None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        shard_model(
            model,
            make_mesh(self.kind, self.distributed.replicas, device_type),
            self.precision,
            reshard_after_forward=self.distributed.reshard_after_forward,
            cpu_offload=self.cpu_offload,
        )

    def evidence(self, trial: Trial) -> Evidence:
        cut = [p for p in trial.model.parameters() if isinstance(p, DTensor)]
        mine, whole = sum(p.to_local().numel() for p in cut), sum(p.numel() for p in cut)
        dtype = str(self.precision.compute).removeprefix("torch.")
        place = " in CPU memory" if self.cpu_offload else ""
        if self.cpu_offload:
            cut = [p for p in cut if p.device.type == "cpu"]
        return Evidence(
            len(cut), f"{self.kind}: {mine:,} of {whole:,} weights{place}, computed in {dtype}"
        )


def sharding_kind(config: Config) -> str:
    """none, fsdp or hsdp: as set, else fsdp when there are several ranks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    return config.distributed.sharding or ("fsdp" if size > 1 else "none")


def needs_mesh(config: Config) -> bool:
    """Whether parameters become DTensors: they are cut, computed in another dtype or offloaded."""
    mixed = config.model.dtype != config.train.param_dtype
    return sharding_kind(config) != "none" or mixed or config.memory.cpu_offload


def shard_model(
    model: CausalLM,
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Turn the model's parameters into DTensors over `mesh`, in place.

    model: has `blocks`, and `lm_head` when its head is a module of its own; on the mesh's device or
    on meta (then fill its weights afterwards). Each forward gathers a unit's parameters in
    precision.compute, each backward leaves sums (no means) of gradients in precision.storage.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute,
        reduce_dtype=precision.reduce or precision.storage,
        # The rotary tables travel with the blocks' arguments and must stay fp32. Scores are fp32 by
        # themselves, so there is no output to cast.
        cast_forward_inputs=False,
    )
    pin = cpu_offload and mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin) if cpu_offload else OffloadPolicy()
    wrap = partial(fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    for block in model.blocks:
        wrap(block, reshard_after_forward=reshard_after_forward)
    if model.lm_head is not None:  # its backward follows its forward at once
        wrap(model.lm_head, reshard_after_forward=False)
        _accumulate_in(model.lm_head, precision.storage)
    wrap(model, reshard_after_forward=False)
    _accumulate_in(model, precision.storage)
    # Sampling calls these instead of a forward; they must gather parameters all the same.
    for method in ("hidden", "run", "logits"):
        register_fsdp_forward_method(model, method)
    if model.lm_head is not None:
        register_fsdp_forward_method(model.lm_head, "logits")
    for unit in units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
        # Ranks may use other parameters (experts); all must still meet in the same collectives.
        unit.set_reduce_scatter_unused_params(True, recurse=False)


def units(model: nn.Module) -> Iterator[FSDPModule]:
    """The modules that are gathered and freed as one, the root first."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


@contextmanager
def kept_whole(model: CausalLM, config: Config) -> Iterator[None]:
    """Blocks stay gathered from their first forward in here on: for many forwards in a row of a
    model that fits. Does nothing to one that is not sharded.
    """
    blocks = [block for block in model.blocks if isinstance(block, FSDPModule)]
    for block in blocks:
        block.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(config.distributed.reshard_after_forward, recurse=False)
        reshard(model)


def _accumulate_in(unit: nn.Module, dtype: torch.dtype) -> None:
    """Gradients of the unit's gathered parameters are kept in `dtype` until they are reduced.

    The head and the embedding add many small parts into one gradient. In bf16 a sum of n equal
    parts stops growing at n = 256; and FSDP2 wants one dtype in a unit.
    """
    inner = {
        id(module)
        for child in unit.modules()
        if isinstance(child, FSDPModule) and child is not unit
        for module in child.modules()
    }
    owners = [module for module in unit.modules() if id(module) not in inner]

    def set_dtype(*_: Any) -> None:
        for module in owners:
            for parameter in module.parameters(recurse=False):
                parameter.grad_dtype = dtype

    unit.register_forward_pre_hook(set_dtype)  # after FSDP2's own, which gathers
