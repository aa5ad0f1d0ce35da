"""Optimizer state in few bits, as plain tensors shaped like the parameter.

A code tensor of a parameter [..., C] is [..., C] (8 bits) or [..., C / 2] (4 bits), and its scales
are [..., blocks], a scale for each block along the last dimension. So a shard of the parameter's
rows needs the same rows of both, and checkpoints cut them like any other tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

State = dict[str, Tensor]


class Codec(Protocol):
    """How one moment is kept."""

    @property
    def bits(self) -> int:
        """Of an element, scales apart."""

    def new(self, like: Tensor) -> State:
        """The moment 0 of a parameter."""

    def load(self, state: State, width: int) -> Tensor:
        """fp32, of the parameter's shape [..., width]; the caller may change it."""

    def store(self, value: Tensor, state: State, noise: Tensor | None) -> None:
        """Write an fp32 value back. noise: int32, 16 random bits an element, for rounding."""


@dataclass(frozen=True)
class Wide:
    """fp32, or bfloat16 with stochastic rounding."""

    dtype: torch.dtype

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def new(self, like: Tensor) -> State:
        return {"": torch.zeros_like(like, dtype=self.dtype)}

    def load(self, state: State, width: int) -> Tensor:
        return state[""].float() if self.dtype != torch.float32 else state[""].clone()

    def store(self, value: Tensor, state: State, noise: Tensor | None) -> None:
        if self.dtype == torch.bfloat16:
            assert noise is not None
            value = round_stochastically(value, noise)
        state[""].copy_(value)


@dataclass(frozen=True)
class Blockwise:
    """A number of [0, 1] or [-1, 1] times the block's largest magnitude, on a curve that is finest
    at 0:  x = scale * sign(c) |c / levels| ^ power.

    signed: two's complement codes around 0. 4 bits: two codes in a byte, the even column first.
    """

    bits: int
    signed: bool
    power: int
    block: int

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 1

    def new(self, like: Tensor) -> State:
        width = like.shape[-1]
        columns = width if self.bits == 8 else -(-width // 2)
        rows, blocks = like.shape[:-1], -(-width // self.block)
        # The middle of a signed code is 0.
        zero = (self.levels if self.signed else 0) * (1 if self.bits == 8 else 17)
        return {
            "codes": like.new_full((*rows, columns), zero, dtype=torch.uint8),
            "scales": like.new_zeros((*rows, blocks), dtype=torch.float32),
        }

    def load(self, state: State, width: int) -> Tensor:
        codes = state["codes"]
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :width]
        x = codes.float().sub_(self.levels if self.signed else 0).div_(self.levels)
        x = x.abs().pow_(self.power).mul_(x.sign()) if self.signed else x.pow_(self.power)
        return x.mul_(self._spread(state["scales"], width))

    def store(self, value: Tensor, state: State, noise: Tensor | None) -> None:
        width = value.shape[-1]
        padded = F.pad(value.abs(), (0, -width % self.block))
        scales = padded.unflatten(-1, (-1, self.block)).amax(-1)
        state["scales"].copy_(scales)
        x = value / self._spread(scales, width).clamp_min_(torch.finfo(torch.float32).tiny)
        x = x.sign() * x.abs().pow_(1 / self.power) * self.levels
        codes = x.round_()
        if self.signed:
            codes = codes.add_(self.levels)
        else:  # a second moment of 0 beside a first moment that is not would be an endless step
            codes = torch.where(value > 0, codes.clamp_min_(1), codes)
        codes = codes.to(torch.uint8)
        if self.bits == 4:
            codes = F.pad(codes, (0, width % 2)).unflatten(-1, (-1, 2))
            codes = codes[..., 0] | codes[..., 1] << 4
        state["codes"].copy_(codes)

    def _spread(self, scales: Tensor, width: int) -> Tensor:
        return scales.repeat_interleave(self.block, -1)[..., :width]


# optimizer -> (first moment, second moment). The curves keep small values apart: the second moment
# of a block spans many orders of magnitude. Blocks are shorter where codes are coarser.
CODECS: dict[str, tuple[Codec, Codec]] = {
    "adamw_bf16_sr": (Wide(torch.bfloat16), Wide(torch.bfloat16)),
    "adamw_8bit": (Blockwise(8, True, 2, 256), Blockwise(8, False, 4, 256)),
    "adamw_4bit": (Blockwise(4, True, 2, 64), Blockwise(4, False, 4, 64)),
}
PLAIN: tuple[Codec, Codec] = (Wide(torch.float32), Wide(torch.float32))


def round_stochastically(value: Tensor, noise: Tensor) -> Tensor:
    """fp32 -> bfloat16, up or down with the probability that makes the mean exact.

    noise: int32 with uniform low 16 bits.

    >>> third = torch.full((3 * 2**16,), 1 + 2**-8 / 3)       # between 1 and 1 + 2^-7
    >>> rounded = round_stochastically(third, hash_noise(third, 0, torch.zeros(())))
    >>> sorted(set(rounded.tolist())), round((rounded.float() - 1).mean().item() * 2**8, 2)
    ([1.0, 1.0078125], 0.33)
    """
    bits = value.contiguous().view(torch.int32)
    return ((bits + (noise & 0xFFFF)) & -0x10000).view(torch.float32).to(torch.bfloat16)


def hash_noise(like: Tensor, first: int, step: Tensor, salt: int = 0) -> Tensor:
    """int32 of the shape of `like`: a hash of each element's place (from `first` on) and the step.

    No generator: replicas, other shards and resumed runs round alike, and nothing is read back.
    """
    place = torch.arange(first, first + like.numel(), device=like.device)
    x = place + step.to(torch.int64) * 0x9E3779B1 + salt * 0x7F4A7C15
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (0x27D4EB2F, 16)):
        x = (x ^ (x >> shift)) * multiplier & 0xFFFFFFFF
    return ((x ^ (x >> 15)) & 0xFFFF).to(torch.int32).view_as(like)
