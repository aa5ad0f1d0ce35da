"""The small operations of a decoder layer, each with a backward pass that keeps little.

    rms_norm    keeps x and one number a row     rotary      keeps cos and sin (one for all layers)
    swiglu      keeps gate and up                embedding   keeps the ids

Nothing keeps an fp32 copy of a low-precision input. Beside each is a plain twin, the textbook
formula under autograd: the reference for tests and for other backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# -- rms_norm --------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset)   (Zhang and Sennrich 2019, section 4)

    Statistics are fp32 (fp64 for fp64). Without an offset the normalised x is rounded to x's dtype
    before it meets the weight, as in Llama and Qwen; with one (Gemma stores weight - 1) everything
    is multiplied in fp32 and rounded once.

    Args:
        x: [..., D] float.
        weight: [D] float.

    Returns:
        [..., D], dtype of x.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
    tensor([[0.8485, 1.1314]])
    """
    assert weight.shape == x.shape[-1:], f"weight {list(weight.shape)} for x {list(x.shape)}"
    if torch.compiler.is_compiling():  # which fuses the formula and chooses what to keep
        return rms_norm_plain(x, weight, eps, offset=offset)
    return _RMSNorm.apply(x, weight, eps, offset)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        # The norm sums squares in one pass, and in fp32 without a cast copy of x.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_stat_dtype(x))
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        ctx.offset = offset
        if offset:
            return (x * rstd).mul_(weight.to(rstd.dtype) + offset).to(x.dtype)
        return torch.mul(x, rstd, out=torch.empty_like(x)).mul_(weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dx = rstd (dy w - x rstd^2 mean(dy w x)), dw = sum over rows of dy x rstd."""
        x, weight, rstd = ctx.saved_tensors
        shape, size = x.shape, x.shape[-1]
        x, dy, rstd = x.reshape(-1, size), dy.reshape(-1, size).to(rstd.dtype), rstd.view(-1, 1)
        w = weight.to(rstd.dtype) + ctx.offset
        grad_x = grad_weight = None
        product = dy * x
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mv(product.t(), rstd[:, 0]).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            mean = torch.mv(product, w)[:, None].div_(size)
            grad_x = torch.mul(dy, w, out=product)
            grad_x.addcmul_(x.to(rstd.dtype), mean.mul_(rstd.square()), value=-1).mul_(rstd)
            grad_x = grad_x.to(x.dtype).view(shape)
        return grad_x, grad_weight, None, None


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    wide = x.to(_stat_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        return (normed * (weight.to(wide.dtype) + offset)).to(x.dtype)
    return normed.to(x.dtype) * weight


# -- rotary ----------------------------------------------------------------------------------------


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turns each pair (a, b) of a head by its angle   (Su et al. 2021, section 3.4.2)

        a' = a cos - b sin,    b' = b cos + a sin

    Args:
        x: [T, N, H]: queries or keys.
        cos, sin: [T, F] float, F <= H / 2; rounded to x's dtype. The first 2 F dimensions of a head
            are turned, the rest passes unchanged. No gradient flows to them.
        interleaved: pair i is (2i, 2i + 1); otherwise (i, i + F), the layout of HF checkpoints.

    Returns:
        [T, N, H], dtype of x.

    >>> rotary(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    tensor([[[-2.,  1.]]])
    """
    assert cos.shape == sin.shape and cos.shape[0] == x.shape[0] and 2 * cos.shape[1] <= x.shape[2]
    if torch.compiler.is_compiling():
        return rotary_plain(x, cos, sin, interleaved=interleaved)
    return _Rotary.apply(x, cos, sin, interleaved)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, -sin, ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turned = 2 * cos.shape[-1]
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    a, b = _pairs(x[..., :turned], interleaved)
    new_a, new_b = _pairs(out[..., :turned], interleaved)
    torch.mul(a, cos, out=new_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=new_b).addcmul_(a, sin)
    if turned < x.shape[-1]:
        out[..., turned:] = x[..., turned:]
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second member of each pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def rotary_plain(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    turned = 2 * cos.shape[-1]
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    a, b = _pairs(x[..., :turned], interleaved)
    pair = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((out, x[..., turned:]), -1)


# -- swiglu ----------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """forward(gate); backward(dy, gate, out) writes dy * forward'(gate) to out, which may be dy."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


def _gelu(approximate: str) -> Activation:
    gelu_backward = torch.ops.aten.gelu_backward.grad_input
    return Activation(
        lambda gate: F.gelu(gate, approximate=approximate),
        lambda dy, gate, out: gelu_backward(dy, gate, approximate=approximate, grad_input=out),
    )


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(
        F.silu,
        lambda dy, gate, out: torch.ops.aten.silu_backward.grad_input(dy, gate, grad_input=out),
    ),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
}


def swiglu(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    """act(gate) * up   (Shazeer 2020, equation 6); act: silu, gelu or gelu_tanh.

    Args:
        gate, up: [...] float, same shape and dtype.

    Returns:
        [...], same dtype.

    >>> round(swiglu(torch.tensor(1.0), torch.tensor(2.0)).item(), 6)
    1.462117
    """
    assert gate.shape == up.shape, f"gate {list(gate.shape)}, up {list(up.shape)}"
    if torch.compiler.is_compiling():
        return swiglu_plain(gate, up, activation=activation)
    return _GatedProduct.apply(gate, up, activation)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of gelu, as in Gemma."""
    return swiglu(gate, up, activation="gelu_tanh")


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ACTIVATIONS[activation].forward(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        act = ACTIVATIONS[ctx.activation]
        grad_gate = grad_up = None
        if ctx.needs_input_grad[0]:
            grad_gate = dy * up
            act.backward(grad_gate, gate, grad_gate)
        if ctx.needs_input_grad[1]:
            grad_up = act.forward(gate).mul_(dy)
        return grad_gate, grad_up, None


def swiglu_plain(gate: Tensor, up: Tensor, *, activation: str = "silu") -> Tensor:
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


# -- embedding -------------------------------------------------------------------------------------


def embedding(ids: Tensor, weight: Tensor, *, grad_into: Tensor | None = None) -> Tensor:
    """weight[ids].

    Args:
        ids: int [...], in [0, V).
        weight: [V, D].
        grad_into: [V, D], any float dtype. The backward pass ADDS the weight's gradient to it and
            autograd gets none. Otherwise autograd gets one of [V, D]. Repeated ids are added in a
            fixed order either way.

    Returns:
        [..., D].

    >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    assert grad_into is None or grad_into.shape == weight.shape
    return _Embedding.apply(ids, weight, grad_into)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, grad_into: Tensor | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.grad_into, ctx.num = grad_into, weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        total: Tensor | None = ctx.grad_into
        if total is None:
            grad = torch.ops.aten.embedding_dense_backward(dy, ids, ctx.num, -1, False)
            return None, grad, None
        ids, dy = ids.flatten(), dy.reshape(-1, dy.shape[-1]).to(total.dtype)
        # Both add in the order of the ids; index_add_ does not on a GPU, index_put_ not on a CPU.
        if total.is_cuda:
            total.index_put_((ids,), dy, accumulate=True)
        else:
            total.index_add_(0, ids, dy)
        return None, None, None


def _stat_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
