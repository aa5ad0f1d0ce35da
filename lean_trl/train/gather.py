"""Collecting what each rank holds a part of, where the parts differ in size."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def gather_columns(values: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, int]:
    """(the columns of all ranks side by side, in rank order; where this rank's begin).

    values: [K, n], any n on each rank. Returns [K, N] with N the sum of n. The sizes travel as CPU
    integers, so nothing waits for the device.

    >>> gather_columns(torch.tensor([[1.0, 2.0]]), None)
    (tensor([[1., 2.]]), 0)
    """
    if group is None:
        return values, 0
    size = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([values.shape[1]]), group=group)
    columns = [int(count) for count in counts]
    padded = values.new_zeros(values.shape[0], max(columns))
    padded[:, : values.shape[1]] = values
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:, :n] for part, n in zip(parts, columns, strict=True)], 1)
    return whole, sum(columns[: dist.get_rank(group)])
