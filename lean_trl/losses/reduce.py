"""Sums over the scored tokens of each sequence, without a mask and without reading a tensor back.

U scored tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_ids(cu_units: Tensor, num_units: int) -> Tensor:
    """The sequence that each scored token belongs to: int64 [U].

    cu_units: int [S + 1], ascending, from 0 to U. num_units: U as a Python int, so that no device
    sync is needed.

    >>> segment_ids(torch.tensor([0, 2, 2, 3]), 3)
    tensor([0, 0, 2])
    """
    index = torch.arange(len(cu_units) - 1, device=cu_units.device)
    return torch.repeat_interleave(index, cu_units.diff(), output_size=num_units)


def segment_sum(values: Tensor, cu_units: Tensor) -> Tensor:
    """Sum the scored tokens of each sequence: [U] -> [S], differentiable; an empty sequence gives
    0.

    values: [U]. cu_units: int [S + 1]; tokens of sequence s are values[cu_units[s]:cu_units[s +
    1]].

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    tensor([3., 0., 4.])
    """
    sums = values.new_zeros(len(cu_units) - 1)
    return sums.index_add(0, segment_ids(cu_units, values.shape[0]), values)
