"""Attention on CUDA through the FlashAttention kernels that torch brings (those behind
torch.nn.attention.varlen): packed sequences as they are, exact lse, GQA, no second forward.

Dropout is always 0, so the backward's random state is never read. With deterministic algorithms
switched on, torch runs the kernel's deterministic backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lean_trl.ops.attention_base import Call

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward

DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
CAPABILITY = (8, 0)  # Ampere


class TorchVarlen:
    """FlashAttention-2, or what torch.nn.attention.activate_flash_attention_impl put there."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v = (_rows(x) for x in (q, k, v))
        # The two last of the sizes: no dropout, no debug mask.
        sizes = (*_bounds(call), 0.0, _fully_causal(call), False)
        out, lse, *_ = _flash(q, k, v, *sizes, **_window(call), scale=call.scale)
        return out, lse

    def backward(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Call,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        grad_out, q, k, v = (_rows(x) for x in (grad_out, q, k, v))
        random_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        sizes = (*_bounds(call), 0.0, _fully_causal(call), random_state, unused)
        grads = _flash_backward(
            grad_out, q, k, v, out, lse, *sizes, **_window(call), scale=call.scale
        )
        return grads[0], grads[1], grads[2], None

    def supports(self, q: Tensor, call: Call) -> str | None:
        if q.device.type != "cuda":
            return f"it runs on CUDA only, not on {q.device.type}"
        if q.dtype not in DTYPES:
            return f"its kernels take float16 and bfloat16, not {str(q.dtype).partition('.')[2]}"
        if q.shape[-1] > MAX_HEAD_DIM or q.shape[-1] % 8:
            return (
                f"its kernels take head dimensions that are multiples of 8 up to {MAX_HEAD_DIM}, "
                f"not {q.shape[-1]}"
            )
        for value, what in (
            (call.softcap, "softcap"),
            (call.sinks, "sinks"),
            (call.end, "tree mask (end)"),
        ):
            if value is not None:
                return f"its kernels have no {what}"
        if torch.cuda.get_device_capability(q.device) < CAPABILITY:
            return "its kernels need compute capability 8.0 or newer"
        return None


def _bounds(call: Call) -> tuple[Tensor, Tensor, int, int]:
    """Queries and keys have the same bounds."""
    bounds = call.cu_seqlens.to(torch.int32)
    return bounds, bounds, call.max_seqlen, call.max_seqlen


def _fully_causal(call: Call) -> bool:
    """With a window it is the right side that hides what is ahead."""
    return call.causal and call.window is None


def _window(call: Call) -> dict[str, int]:
    """Tokens that are seen to the left and to the right beside the token itself; -1: all."""
    if call.window is None:
        return {"window_size_left": -1, "window_size_right": 0 if call.causal else -1}
    reach = call.window - 1
    return {"window_size_left": reach, "window_size_right": 0 if call.causal else reach}


def _rows(x: Tensor) -> Tensor:
    """The kernels need a last stride of 1; the gradient of a sum, an expanded scalar, has 0."""
    return x if x.stride(-1) == 1 else x.contiguous()


TORCH_VARLEN = TorchVarlen()
