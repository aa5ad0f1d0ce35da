"""Weights in 4 or 8 bits, and products with them: codes are looked up when they are needed.

NF4 (Dettmers et al. 2023, QLoRA, section 3): a weight is a code of 4 bits, a place in a table of
normal quantiles, times the largest magnitude of its block of 64. FP4 has the table of a 4-bit
float. int8: rounded to 1/127 of the largest magnitude of its row.

Everything is uint8 [out, ...], scales too (as bytes of fp32): rows can be cut, gathered and saved
like any weight, and nothing casts a scale to another dtype on the way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
# The values of the paper's appendix E, in ascending order, and of bitsandbytes' fp4.
TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(-1.0, -2 / 3, -0.5, -1 / 3, -0.25, -1 / 6, -0.0052083333, 0.0),
        *(0.0052083333, 1 / 6, 0.25, 1 / 3, 0.5, 2 / 3, 1.0, 1.0),
    ),
}


class Quantized(NamedTuple):
    """A matrix [out, width] in few bits.

    codes uint8 [out, ceil(width / 2)] (4 bits, the even column in the low half) or [out, width]
    (8 bits, 128 is 0). scales: bytes of fp32 [out, blocks], one block a row for 8 bits; or, when
    they are quantised themselves, uint8 [out, blocks] times `row_scales`, bytes of fp32 [out, 1].
    """

    codes: Tensor
    scales: Tensor
    row_scales: Tensor


class Format(NamedTuple):
    """kind: nf4, fp4 or int8. width: columns of the matrix. double: scales are quantised too."""

    kind: str
    width: int
    double: bool = False


def quantize(weight: Tensor, form: Format) -> Quantized:
    """weight: float [out, width].

    >>> w = torch.tensor([[0.5, -1.0, 0.0, 0.25]])
    >>> dequantize(quantize(w, Format("nf4", 4)), Format("nf4", 4), torch.float32)
    tensor([[ 0.4407, -1.0000,  0.0000,  0.2461]])
    """
    wide, none = weight.float(), weight.new_empty((len(weight), 0), dtype=torch.uint8)
    if form.kind == "int8":
        scale = wide.abs().amax(1, keepdim=True)
        codes = (wide / scale.clamp_min(1e-30) * 127).round_().add_(128).to(torch.uint8)
        return Quantized(codes, scale.view(torch.uint8), none)
    blocks = F.pad(wide, (0, -form.width % BLOCK)).unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax(2)
    row_scales = none
    stored = scales.contiguous().view(torch.uint8)
    if form.double:
        largest = scales.amax(1, keepdim=True)
        # Up, so that no weight is cut off at its block's largest magnitude.
        stored = (scales / largest.clamp_min(1e-30) * 255).ceil_().to(torch.uint8)
        row_scales = largest.view(torch.uint8)
        scales = stored.float() / 255 * largest
    table = _table(form.kind, weight)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / scales.clamp_min(1e-30)[..., None], middles).to(torch.uint8)
    codes = codes.flatten(1)[:, : form.width]
    codes = F.pad(codes, (0, form.width % 2)).unflatten(1, (-1, 2))
    return Quantized(codes[..., 0] | codes[..., 1] << 4, stored, row_scales)


def dequantize(weight: Quantized, form: Format, dtype: torch.dtype) -> Tensor:
    """[out, width] in `dtype`."""
    if form.kind == "int8":
        values = weight.codes.to(torch.float32).sub_(128).div_(127)
        return values.mul_(weight.scales.view(torch.float32)).to(dtype)
    codes = torch.stack((weight.codes & 15, weight.codes >> 4), -1).flatten(1)[:, : form.width]
    scales = weight.scales
    if form.double:
        scales = scales.float().div_(255).mul_(weight.row_scales.view(torch.float32))
    else:
        scales = scales.view(torch.float32)
    values = _table(form.kind, codes)[codes.int()]
    return values.mul_(scales.repeat_interleave(BLOCK, 1)[:, : form.width]).to(dtype)


def quantized_linear(
    x: Tensor, weight: Quantized, form: Format, bias: Tensor | None = None
) -> Tensor:
    """x [..., width] -> [..., out]. The weight in x's dtype exists while a product runs, in forward
    and in backward; no gradient flows to it.
    """
    y = _QuantizedLinear.apply(x, *weight, form)
    return y if bias is None else y + bias


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, row_scales: Tensor, form: Format
    ) -> Tensor:
        ctx.save_for_backward(codes, scales, row_scales)
        ctx.form = form
        return F.linear(x, dequantize(Quantized(codes, scales, row_scales), form, x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        weight = dequantize(Quantized(*ctx.saved_tensors), ctx.form, dy.dtype)
        return dy @ weight, None, None, None, None


def _table(kind: str, like: Tensor) -> Tensor:
    return torch.tensor(TABLES[kind], device=like.device)
