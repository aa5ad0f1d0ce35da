"""Matrix product of rows sorted by expert with each expert's matrix: one registered torch op.

    y_m = x_m @ W_e    for the rows m in [ends[e - 1], ends[e])

Shapes do not depend on how many rows an expert got, so nothing is read back and the op runs under
FakeTensorMode. Letters: M rows, E experts, K in, N out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# What torch's grouped kernel takes; fp64 and rows that are not a multiple of 16 bytes go one expert
# at a time, which waits for the device on an accelerator.
GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    """x [M, K] times weight [E, K, N] -> [M, N], each row with the matrix of its expert.

    ends: int32 [E], the row after each expert's last one; rises, and ends with M. An expert may
    have no rows: its gradient is zero.
    transposed: weight is [E, N, K], as nn.Linear stores it.

    Raises ValueError for shapes that do not fit.

    >>> x, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[[10.0]], [[100.0]]])
    >>> grouped_mm(x, weight, torch.tensor([2, 3], dtype=torch.int32)).flatten()
    tensor([ 10.,  20., 300.])
    """
    size_in = weight.shape[2 if transposed else 1] if weight.dim() == 3 else -1
    if x.dim() != 2 or size_in != x.shape[1] or ends.shape != weight.shape[:1]:
        raise ValueError(
            f"grouped_mm: x {list(x.shape)}, weight {list(weight.shape)} and ends "
            f"{list(ends.shape)} do not fit x [M, K], weight [E, K, N] and ends [E]"
        )
    return torch.ops.lean.grouped_mm(x, weight, ends, transposed)


@torch.library.custom_op("lean::grouped_mm", mutates_args=())
def _forward_op(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    weight = weight.transpose(1, 2) if transposed else weight
    x = x.contiguous()
    if _aligned(x) and _aligned(weight):
        return F.grouped_mm(x, weight, offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[2])
    for part, rows, matrix in zip(_split(out, ends), _split(x, ends), weight, strict=True):
        torch.mm(rows, matrix, out=part)
    return out


@_forward_op.register_fake
def _(x, weight, ends, transposed):
    return x.new_empty(x.shape[0], weight.shape[1 if transposed else 2])


@torch.library.custom_op("lean::grouped_mm_weight_grad", mutates_args=())
def _weight_grad_op(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """left [M, A], right [M, B] -> [E, A, B]: left^T @ right over each expert's rows."""
    left, right = left.contiguous(), right.contiguous()
    if _aligned(left) and _aligned(right):
        return F.grouped_mm(left.t(), right, offs=ends)
    out = left.new_empty(ends.shape[0], left.shape[1], right.shape[1])
    for part, a, b in zip(out, _split(left, ends), _split(right, ends), strict=True):
        torch.mm(a.t(), b, out=part)
    return out


@_weight_grad_op.register_fake
def _(left, right, ends):
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _save(ctx, inputs, output):
    x, weight, ends, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, ends)


def _backward(ctx, grad):
    x, weight, ends = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.lean.grouped_mm(grad, weight, ends, not ctx.transposed)
    if ctx.needs_input_grad[1]:
        # In the layout of the weight, so that it becomes .grad without a copy.
        left, right = (grad, x) if ctx.transposed else (x, grad)
        grad_weight = torch.ops.lean.grouped_mm_weight_grad(left, right, ends)
    return grad_x, grad_weight, None, None


_forward_op.register_autograd(_backward, setup_context=_save)


def _aligned(tensor: Tensor) -> bool:
    # All but the innermost: rows of one element have two strides of 1, and are not aligned.
    strides = [stride * tensor.itemsize % ALIGNMENT for stride in sorted(tensor.stride())[1:]]
    return tensor.dtype in GROUPED_DTYPES and not any(strides) and 0 not in tensor.shape


def _split(tensor: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return tensor.tensor_split(ends[:-1].cpu().long())
