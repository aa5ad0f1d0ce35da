"""Attention and the loss head alone, at the shapes of real models: time, rate and memory.

    python benchmarks/kernels.py attention [--out FOLDER]     each backend that supports the call
    python benchmarks/kernels.py head [--out FOLDER]          linear_logprobs against whole logits

On a GPU in bf16 at full size; on a CPU in fp32 at a size that only shows that it runs. Forward and
backward together, the median of ten after three to warm up; memory is the peak over what was there.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ceiling import Seconds, wait
from harness import facts, markdown, size
from torch import Tensor

from lean_trl.ops import linear_logprobs, varlen_attention
from lean_trl.ops.attention import BACKENDS

# Tokens of a packed batch and of a sequence in it; heads, kv heads, head dim.
ATTENTION = {
    "cuda": [(16384, n, 16, 8, 128) for n in (512, 2048, 16384)] + [(16384, 4096, 32, 8, 64)],
    "cpu": [(512, 128, 4, 2, 32)],
}
# Scored rows, width, vocabulary.
HEAD = {"cuda": [(8192, 1024, 151936), (8192, 4096, 151936)], "cpu": [(64, 32, 512)]}
NAIVE_LIMIT = 2**35  # bytes of logits and their gradient in fp32 that we are willing to make


def attention(device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Rate over the operations of a causal mask: 3.5 times those of the forward, 2 a product."""
    for tokens, length, heads, kv, dim in ATTENTION[device.type]:
        bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
        q, k, v = (
            torch.randn(tokens, n, dim, device=device, dtype=dtype).requires_grad_()
            for n in (heads, kv, kv)
        )
        work = 3.5 * 2 * heads * dim * length * tokens  # 2 products of 2 operations, halved
        for backend in BACKENDS:
            run = partial(attend, q, k, v, bounds, length, backend, torch.randn_like(q))
            what = f"{tokens} tokens in sequences of {length}, {heads}/{kv} heads of {dim}"
            yield {"shape": what, "backend": backend, **measure(run, device, work)}


def attend(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, length: int, backend: str, upstream: Tensor
) -> None:
    out = varlen_attention(q, k, v, bounds, length, backend=backend)
    torch.autograd.grad(out, (q, k, v), upstream)


def head(device: torch.device, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Rate over 6 N V D operations, the head's forward and backward without recomputation."""
    for rows, width, vocab in HEAD[device.type]:
        hidden = torch.randn(rows, width, device=device, dtype=dtype).requires_grad_()
        weight = (torch.randn(vocab, width, device=device, dtype=dtype) / 50).requires_grad_()
        targets = torch.randint(vocab, (rows,), device=device)
        what = f"{rows} rows, width {width}, vocabulary {vocab}"
        for name, loss in HEADS.items():
            if name == "whole logits" and 8 * rows * vocab > NAIVE_LIMIT:
                continue
            run = partial(differentiate, loss, hidden, weight, targets)
            work = 6 * rows * width * vocab
            yield {"shape": what, "backend": name, **measure(run, device, work)}


def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -linear_logprobs(hidden, weight, targets).logprobs.sum()


def whole_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")


def differentiate(loss: Callable, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    torch.autograd.grad(loss(hidden, weight, targets), (hidden, weight))


HEADS = {"linear_logprobs": fused, "whole logits": whole_logits}


def measure(run: Callable[[], None], device: torch.device, work: float) -> dict[str, Any]:
    """Median milliseconds, 10^12 operations a second, peak bytes over those before (on a GPU); or
    why it cannot run here."""
    try:
        for _ in range(3):
            run()
    except ValueError as error:  # the backend is not for this call
        return {"milliseconds": None, "note": str(error)}
    except torch.OutOfMemoryError:
        return {"milliseconds": None, "note": "out of memory"}
    taken = []
    before = _start_peak(device)
    for _ in itertools.repeat(None, 10):
        wait(device)
        start = Seconds.now()
        run()
        wait(device)
        taken.append(Seconds.now().since(start).wall)
    seconds = statistics.median(taken)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    return {"milliseconds": 1e3 * seconds, "tflops": work / seconds / 1e12, "peak": peak}


def _start_peak(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


KERNELS = {"attention": attention, "head": head}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", choices=KERNELS)
    parser.add_argument("--out", type=Path, help="folder for a CSV")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    rows = list(KERNELS[options.kernel](torch.device(device), dtype))
    header = ["shape", "backend", "ms", "TFLOP/s", "peak over before", "note"]
    print(markdown(header, [words(row) for row in rows]))
    print("".join(f"- {name}: {value}\n" for name, value in facts().items()))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        with open(options.out / f"{options.kernel}.csv", "w", newline="", encoding="utf-8") as file:
            keys = ["shape", "backend", "milliseconds", "tflops", "peak", "note"]
            table = csv.DictWriter(file, keys)
            table.writeheader()
            table.writerows(rows)


def words(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if row["milliseconds"] is None:
        return [row["shape"], row["backend"], "", "", "", row["note"]]
    figures = [f"{row['milliseconds']:.3f}", f"{row['tflops']:.3g}", size(row["peak"]), ""]
    return [row["shape"], row["backend"], *figures]


if __name__ == "__main__":
    main()
