"""What packing costs attention on the CPU: many tiny sequences, and a realistic packed batch.

    OMP_NUM_THREADS=1 python benchmarks/attention_segments.py

1. 8,192 sequences of 8 tokens against the matmuls of the transformer block around the attention
   (D 512, N 8, H 64, an ungated MLP of 4 D: 12 D^2 weights), forward + backward: must stay under 2.
2. Sequences of 50 to 1000 tokens (N 9, K 3, H 64) against one batched SDPA call on sequences of one
   length with the same sum of squared lengths, and against the padded call that a batch dimension
   would need.

The two sides take turns; the least of the repeats counts, in CPU seconds of the process.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from lean_trl.ops import varlen_attention

REPEATS = 3


def least_seconds(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Least CPU seconds of each run, taking turns after one warm-up."""
    best = dict.fromkeys(runs, float("inf"))
    for repeat in range(REPEATS + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if repeat:
                best[name] = min(best[name], time.process_time() - start)
    return best


def packed_attention(lengths: list[int], heads: int, kv_heads: int, dim: int) -> Callable:
    """Forward + backward of the op on sequences of these lengths."""
    total = sum(lengths)
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = (torch.randn(total, n, dim).requires_grad_() for n in (heads, kv_heads, kv_heads))
    upstream = torch.randn(total, heads, dim)

    def run():
        out = varlen_attention(q, k, v, bounds, max(lengths))
        return torch.autograd.grad(out, (q, k, v), upstream)

    return run


def batched_sdpa(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> Callable:
    """Forward + backward of torch's own attention on a batch of one length."""
    q, k, v = (
        torch.randn(batch, length, n, dim).transpose(1, 2).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    upstream = torch.randn(batch, length, heads, dim).transpose(1, 2)

    def run():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), upstream)

    return run


def block_matmuls(tokens: int, dim: int) -> Callable:
    """y = x W, dx = dy W', dW = x' dy of the projections and of the MLP."""
    wide = torch.randn(tokens, 4 * dim)
    weights = [torch.randn(a * dim, b * dim) for a, b in ((1, 3), (1, 1), (1, 4), (4, 1))]

    def run():
        for weight in weights:
            x, upstream = wide[:, : weight.shape[0]], wide[:, : weight.shape[1]]
            _ = x @ weight, upstream @ weight.T, x.T @ upstream

    return run


def segments(count: int = 8192, length: int = 8, dim: int = 512, heads: int = 8) -> float:
    """Attention over the block's matmuls for tiny sequences."""
    attention = packed_attention([length] * count, heads, heads, dim // heads)
    seconds = least_seconds({"attention": attention, "matmuls": block_matmuls(count * length, dim)})
    ratio = seconds["attention"] / seconds["matmuls"]
    print(
        f"{count} sequences of {length}: attention {seconds['attention']:.3f} s, "
        f"block matmuls {seconds['matmuls']:.3f} s, ratio {ratio:.3f}"
    )
    return ratio


def packed(count: int, heads: int = 9, kv_heads: int = 3, dim: int = 64) -> float:
    """A packed batch over one batched call with the same work."""
    draw = random.Random(count)
    lengths = [draw.randint(50, 1000) for _ in range(count)]
    same = round((sum(n * n for n in lengths) / count) ** 0.5)
    seconds = least_seconds(
        {
            "packed": packed_attention(lengths, heads, kv_heads, dim),
            "same work": batched_sdpa(count, same, heads, kv_heads, dim),
            "padded": batched_sdpa(count, max(lengths), heads, kv_heads, dim),
        }
    )
    ratio = seconds["packed"] / seconds["same work"]
    print(
        f"{count} sequences of {min(lengths)} to {max(lengths)}: packed {seconds['packed']:.4f} s, "
        f"same work in one call {seconds['same work']:.4f} s, ratio {ratio:.3f}; "
        f"padded {seconds['padded']:.4f} s"
    )
    return ratio


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for count in (4, 8, 16):
        packed(count)
    segments()
