"""The matrix products of a training step: how much work they are, and how fast they run alone.

A step cannot be faster than its products: attention, norms, the softmax over the vocabulary and
the optimizer would have to cost nothing. So tokens per second of the bare products, measured
at the end of an arm on the same machine in the same minute, are the arm's ceiling.

Two conventions of work, both without what is recomputed:

    palm    6 P per token + 12 L N H len per token: every weight for every token, the head too, and
            attention as if every token saw its whole sequence (Chowdhery et al. 2022, appendix B)
    needed  the head on scored tokens alone, and of attention the half that a causal mask leaves

with P the weights that a token meets (k of E experts, no embedding table), N H L heads, their size
and layers, len the tokens of its sequence. A frozen weight costs 4 instead of 6.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lean_trl.model.decoder import CausalLM
from lean_trl.model.moe import Experts
from lean_trl.model.value_head import RewardModel
from lean_trl.types import Batch


class Product(NamedTuple):
    """[rows, inner] @ [inner, columns], with the operands laid out as the step has them.

    kind: forward is x w', grad_x is g w, grad_w is g' x.
    """

    kind: str
    rows: int
    inner: int
    columns: int


def step_products(
    model: CausalLM, batches: Iterable[Batch], *, forwards: int = 1, reference: bool = False
) -> Counter[Product]:
    """Products of one step: forward and backward over the batches, weights of experts left out.

    forwards: 2 when the blocks are recomputed. reference: one more forward of a frozen model. The
    head works on the scored rows and computes its logits a second time in the backward.
    """
    head = head_weight(model)
    products: Counter[Product] = Counter()
    for batch in batches:
        tokens, scored = batch.num_tokens, _head_rows(batch)
        for weight in (m.weight for m in model.modules() if isinstance(m, nn.Linear)):
            _add(products, tokens, weight, forwards + reference)
        if head is not None and scored:
            _add(products, scored, head, 2 + reference)
    return products


def _add(products: Counter[Product], rows: int, weight: Tensor, forwards: int) -> None:
    size_out, size_in = weight.shape
    products[Product("forward", rows, size_in, size_out)] += forwards
    products[Product("grad_x", rows, size_out, size_in)] += 1
    if weight.requires_grad:
        products[Product("grad_w", size_out, rows, size_in)] += 1


def head_weight(model: CausalLM) -> Tensor | None:
    """[V, D], or None where there is no vocabulary to score."""
    if isinstance(model, RewardModel):
        return None
    return model.model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight


class Seconds(NamedTuple):
    """Wall time, and time of all threads of this process on the CPU: the steadier figure where
    others share the cores."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        return cls(time.perf_counter(), time.process_time())

    def since(self, start: Seconds) -> Seconds:
        return Seconds(self.wall - start.wall, self.cpu - start.cpu)


def seconds_of(products: Counter[Product], device: torch.device, dtype: torch.dtype) -> Seconds:
    """What the products take alone; each distinct shape counts with the least of three runs."""
    taken = {product: _seconds(product, device, dtype) for product in products}
    return Seconds(
        sum(times * taken[product].wall for product, times in products.items()),
        sum(times * taken[product].cpu for product, times in products.items()),
    )


def _seconds(product: Product, device: torch.device, dtype: torch.dtype) -> Seconds:
    kind, rows, inner, columns = product
    a = torch.ones(inner, rows, device=device, dtype=dtype).t()
    b = torch.ones(columns, inner, device=device, dtype=dtype).t()
    a, b = (a if kind == "grad_w" else a.contiguous()), (b if kind == "forward" else b.contiguous())
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    taken = []
    for _ in range(3):
        wait(device)
        start = Seconds.now()
        torch.mm(a, b, out=out)
        wait(device)
        taken.append(Seconds.now().since(start))
    return Seconds(*(min(times) for times in zip(*taken, strict=True)))


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flops(model: CausalLM, batches: Iterable[Batch]) -> dict[str, float]:
    """{palm, needed}: floating-point operations of one step, see above."""
    config, head = model.config, head_weight(model)
    body = sum(_work(m.weight) for m in model.modules() if isinstance(m, nn.Linear))
    for module in model.modules():
        if isinstance(module, Experts):
            share = module.moe.top_k / module.moe.num_experts
            body += share * (_work(module.gate_up_proj) + _work(module.down_proj))
    heads = 12 * config.num_layers * config.num_heads * config.head_dim
    work = {"palm": 0.0, "needed": 0.0}
    for batch in batches:
        tokens, pairs = batch.num_real_tokens, sum(n * n for n in batch.seqlens)
        top = 0 if head is None else _work(head)
        work["palm"] += (body + top) * tokens + heads * pairs
        work["needed"] += body * tokens + top * _head_rows(batch) + heads / 2 * pairs
    return work


def _work(weight: Tensor) -> int:
    return (6 if weight.requires_grad else 4) * weight.numel()


def _head_rows(batch: Batch) -> int:
    return batch.num_units if batch.row_map is None else batch.row_map[0].shape[0]
