"""MXFP4 checkpoints (gpt-oss), read as plain weights.

A block of 32 values is 16 bytes, two E2M1 values in each (low half first), and one shared exponent
byte with bias 127 (OCP Microscaling Formats 1.0, section 5.2). Every such value fits bfloat16
exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lean_trl.model.safetensors_io import Stored

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4:
    """Stored blocks [E, out, G, 16] and scales [E, out, G], seen as a weight [E, 32 G, out]."""

    blocks: Stored
    scales: Stored

    @property
    def file(self) -> Path:
        return self.blocks.file

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        num, out, groups, size = self.blocks.shape
        return (num, groups * size * 2, out)

    def copy_into(self, destination: Tensor, name: str, row: int = 0) -> None:
        """Fill `destination` with experts from `row` on, one in memory at a time."""
        for expert in range(row, row + destination.shape[0]):
            weight = dequantize(_part(self.blocks, expert), _part(self.scales, expert))
            if not torch.isfinite(weight).all():
                raise ValueError(f"{self.file}: {name} has a scale that is not finite")
            destination[expert - row] = weight.t()


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 blocks [..., G, 16] and uint8 scales [..., G] -> fp32 [..., 32 G].

    >>> blocks = torch.zeros(1, 16, dtype=torch.uint8)
    >>> blocks[0, 0] = 0xA7                        # low half 7: 6.0; high half 10: -1.0
    >>> dequantize(blocks, torch.tensor([128], dtype=torch.uint8))[:3]
    tensor([12., -2.,  0.])
    """
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    exponent = scales.to(torch.int32)[..., None] - BIAS
    return torch.ldexp(table[pairs.long()], exponent).flatten(-2)


def unpack_names(stored: dict[str, Stored]) -> dict[str, Stored | Mxfp4]:
    """The tensors of a folder with each pair of blocks and scales as one weight."""
    out: dict[str, Stored | Mxfp4] = dict(stored)
    for name in stored:
        base = name.removesuffix(BLOCKS)
        if base == name or base + SCALES not in stored:
            continue
        blocks, scales = stored[name], stored[base + SCALES]
        if blocks.shape != (*scales.shape, 16) or len(scales.shape) != 3:
            raise ValueError(
                f"{blocks.file}: {name} {list(blocks.shape)} and its scales {list(scales.shape)} "
                "do not fit [E, out, G, 16] and [E, out, G]"
            )
        if (blocks.dtype, scales.dtype) != (torch.uint8, torch.uint8):
            raise ValueError(f"{blocks.file}: {name} and its scales must be bytes")
        del out[name], out[base + SCALES]
        out[base] = Mxfp4(blocks, scales)
    return out


def _part(stored: Stored, expert: int) -> Tensor:
    shape = stored.shape[1:]
    size = torch.Size(shape).numel() * stored.dtype.itemsize
    return replace(stored, shape=shape, offset=stored.offset + expert * size).load()
