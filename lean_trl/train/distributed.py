"""Ranks: joining them, averaging nothing, summing gradients of replicas.
 torchrun sets RANK, WORLD_SIZE, LOCAL_RANK and the master's address; a plain `python
scripts/train.py` is one rank without a process group.
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
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 64 * 2**20  # large enough to hide latency, small next to any model


@dataclass(frozen=True)
class World:
    """Where this process stands. group is None with one rank: then nothing is communicated."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None

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
    if size == 1:
        yield World(rank, size, device, None)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield World(rank, size, device, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Add up the gradients of replicas over `group`, in buckets; sharded (DTensor) gradients are
    summed already.

    Sums, not means: the loss of each rank is already divided by a total over all ranks.
    """
    if group is None:
        return
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if not parameter.requires_grad or isinstance(parameter, DTensor):
            continue
        if parameter.grad is None:  # unused on this rank: the others still wait for its share
            parameter.grad = torch.zeros_like(parameter)
        grad = parameter.grad
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
