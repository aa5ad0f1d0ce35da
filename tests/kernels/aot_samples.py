"""Launches with known properties, on which tests/kernels/test_aot.py tries the harness."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def product(a, b, out, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + start + k[None, :])
        right = tl.load(b + n[:, None] * K + start + k[None, :])
        total = tl.dot(left, right.T, total)
    tl.store(out + m[:, None] * BN + n[None, :], total)


def launch(block: int, num_warps: int, offset: int = 0) -> None:
    size = 512
    a, b = (torch.empty(block * size + 8, dtype=torch.bfloat16, device="meta") for _ in "ab")
    out = torch.empty(block, block, device="meta")
    views = (x[offset : offset + block * size].view(block, size) for x in (a, b))
    product[(1,)](*views, out, size, BM=block, BN=block, BK=64, num_warps=num_warps, num_stages=3)


CASES = {
    "good": lambda: launch(128, 8),
    "too large a tile": lambda: launch(256, 2),
}
