"""Ranks: joining them, laying them out as a mesh, summing gradients of replicas.

torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and the master's address; a plain `python
scripts/train.py` is one rank that needs none of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

BUCKET_BYTES = 64 * 2**20  # large enough to hide latency, small next to any model


@dataclass(frozen=True)
class World:
    """Where this process stands. group is None with one rank: then nothing is communicated."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None
    store: dist.Store | None = None  # shared by all ranks, for messages that need no collective

    @property
    def is_main(self) -> bool:
        return self.rank == 0


@contextmanager
def join_world(timeout_s: float) -> Iterator[World]:
    """Join the ranks that torchrun started; leave them on the way out.

    timeout_s: how long a collective waits for a rank that does not come, in seconds.
    """
    size = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store: dist.Store
    if size == 1:
        store = dist.HashStore()  # a mesh of one needs a group, but no network
    else:
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        # torchrun's store outlives a restart: addresses of the ranks before would still be in it.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt.{attempt}", store)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    try:
        yield World(rank, size, device, dist.group.WORLD if size > 1 else None, store)
    finally:
        dist.destroy_process_group()


def make_mesh(kind: str, replicas: int | None, device_type: str) -> DeviceMesh:
    """The ranks as FSDP2 wants them.

    kind: fsdp, every parameter is cut over all ranks, a mesh [W]; hsdp, `replicas` copies that are
    each cut over W / replicas ranks, a mesh [replicas, W / replicas]; none, a mesh of one for each
    rank. replicas None: one copy a host. Raises ValueError when they do not divide the ranks.
    """
    size = dist.get_world_size()
    if kind == "fsdp":
        return init_device_mesh(device_type, (size,), mesh_dim_names=("shard",))
    if kind == "none":
        names = ("replicate", "shard")
        return init_device_mesh(device_type, (size, 1), mesh_dim_names=names)["shard"]
    if replicas is None:
        replicas = size // int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size % replicas:
        raise ValueError(
            f"distributed.replicas {replicas} does not divide the {size} ranks: "
            f"set it to one of {', '.join(str(n) for n in range(1, size + 1) if size % n == 0)}"
        )
    shape = (replicas, size // replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def compute_device(model: nn.Module) -> torch.device:
    """Where the model computes. Sharded parameters may rest elsewhere (offloaded to the CPU)."""
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward has left gathered: the root stays whole after it, and
    `model.parameters()` would yield whole tensors that no optimizer knows.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_part(tensor: Tensor) -> tuple[Tensor, int]:
    """(the rows of `tensor` that this rank holds, sharing memory; which the first of them is).

    >>> local_part(torch.zeros(3, 2))
    (tensor([[0., 0.],
            [0., 0.],
            [0., 0.]]), 0)
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0
    first = 0
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, f"{placement}: only the first dimension is cut"
            rows = -(-tensor.shape[0] // tensor.device_mesh.size(dim))  # as torch.chunk cuts
            first = min(rows * tensor.device_mesh.get_local_rank(dim), tensor.shape[0])
    return tensor.to_local().detach(), first


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Add up the gradients of replicas over `group`, in buckets; those of parameters that are cut
    over several ranks are summed already.

    Sums, not means: the loss of each rank is already divided by a total over all ranks.
    """
    if group is None:
        return
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            continue
        if parameter.grad is None:  # unused on this rank: the others still wait for its share
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
        grad = grad.to_local() if isinstance(grad, DTensor) else grad
        if bucket and (size + grad.nbytes > BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            _sum_bucket(bucket, group)
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.nbytes
    if bucket:
        _sum_bucket(bucket, group)


def _sum_bucket(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    if len(grads) == 1 and grads[0].is_contiguous():
        dist.all_reduce(grads[0], group=group)
        return
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
