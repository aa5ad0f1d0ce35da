"""Log-probabilities of tokens straight from hidden states: the logits never exist as a whole.

Dimension letters: N hidden rows, Q distinct rows that need logits, U scored tokens, D model,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from lean_trl.ops.linear_logprobs_torch import Head, Stats, stat_dtype, torch_backend
from lean_trl.types import IGNORE_INDEX, WANT, Scores

RowMap = tuple[Tensor, Tensor]
Adapter = tuple[Tensor, Tensor]
Backend = Callable[[Tensor, Tensor, Tensor | None, Adapter | None, Head], Stats]

# Open table: (hidden, weight, bias, adapter, head) -> Stats.
BACKENDS: dict[str, Backend] = {"torch": torch_backend}


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    want: Sequence[str] = (),
    grad_into: Tensor | None = None,
    chunk_size: int | None = None,
    backend: str = "auto",
    row_map: RowMap | Literal["auto"] | None = "auto",
) -> Scores:
    """Log-probability of each target, and statistics of the distribution that predicts it.

        a = scale * (hidden @ weight.T + low @ up.T + bias)
        z = softcap * tanh(a / softcap) / temperature       (a / temperature without a softcap)
        p = softmax(z),  logprob = log p_y,  entropy = -sum p log p,  log_sum_sq = log sum p^2

    With g and g_H the gradients of logprob and entropy H, the gradient of a row of logits is
    dz_j = g (1[j = y] - p_j) - g_H p_j (log p_j + H); top1 and log_sum_sq carry none.

    Args:
        hidden: [N, D] float. Statistics are fp32 whatever its dtype (fp64 for fp64).
        weight: [V, D], dtype and device of hidden. No gradient is computed if it requires none.
        targets: int [U]. Without `rows`: [N], and a target of -100 gives 0 (top1: False) and a
            zero gradient; such rows cost their logits all the same (how many there are is only
            known on the device), so pass `rows` when most are ignored.
        rows: int [U]; target u is predicted from hidden[rows[u]]. Rows may repeat.
        bias: [V], dtype of weight.
        adapter: (low [N, r], up [V, r]), both float: a low-rank adapter on the head, never folded
            into the weight. For LoRA, low = alpha / r * dropout(hidden) @ A.T, and up = B. Both get
            gradients. Rounded to hidden's dtype.
        temperature: a float > 0, or a float tensor [N], one per row of hidden (no gradient).
        want: any of "entropy", "top1", "log_sum_sq". top1: the target has the largest logit; a tie
            with an earlier token counts as wrong.
        grad_into: [V, D], float32 or weight's dtype. The backward pass ADDS the weight's gradient
            to it and autograd gets none. Otherwise autograd gets one, accumulated in fp32.
        chunk_size: logits rows per tile. Memory is bounded either way (WORKSPACE_BYTES).
        row_map: "auto" finds repeated rows, so that each distinct row gets its logits once
            (torch.unique: a host sync on a GPU, and refused by FakeTensorMode). A pair
            (distinct[Q], index[U]) with rows == distinct[index] says it without a sync
            (Batch.row_map). None: all rows differ (a repeated one is right, only computed again).
        backend: a key of BACKENDS, or "auto".

    Returns:
        Scores of [U] tensors.

    Raises:
        ValueError: shapes, dtypes or settings that do not fit.
        RuntimeError: a target outside [0, V). Checked on the device without a sync: on a GPU it
            surfaces at a later call.

    >>> hidden, weight = torch.tensor([[2.0, 1.0, 0.0]]), torch.eye(3)  # logits 2, 1, 0
    >>> token = torch.tensor([0])
    >>> round(linear_logprobs(hidden, weight, token).logprobs.item(), 6)
    -0.407606
    >>> round(linear_logprobs(hidden, weight, token, temperature=0.5).logprobs.item(), 6)
    -0.142932
    """
    _check_tensors(hidden, weight, targets, rows, bias, grad_into)
    if adapter is not None:
        low, up = adapter
        if low.ndim != 2 or up.shape != (weight.shape[0], low.shape[1]) or len(low) != len(hidden):
            raise ValueError(
                f"linear_logprobs: adapter must be ([{hidden.shape[0]}, r], [{weight.shape[0]}, "
                f"r]), got {list(low.shape)} and {list(up.shape)}"
            )
        adapter = low.to(hidden.dtype), up.to(hidden.dtype)
    _check_settings(temperature, softcap, want, chunk_size, backend, hidden.shape[0])

    targets = targets.long()
    ignored = None
    if rows is None:
        if isinstance(row_map, tuple):
            raise ValueError("linear_logprobs: row_map maps units to rows, so it needs rows")
        ignored = targets == IGNORE_INDEX
        targets = targets.masked_fill(ignored, 0)
        distinct, index = None, None
    else:
        distinct, index = _row_map(rows, row_map)
    in_range = ((targets >= 0) & (targets < weight.shape[0])).all()
    torch._assert_async(in_range, f"linear_logprobs: a target is outside [0, {weight.shape[0]})")

    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(stat_dtype(hidden))
        temperature = (temperature if distinct is None else temperature[distinct])[:, None]
    head = Head(
        targets=targets,
        distinct=distinct,
        index=index,
        slope=scale / (temperature if softcap is None else softcap),
        cap=None if softcap is None else softcap / temperature,
        want=frozenset(want),
        grad_into=grad_into,
        chunk_size=chunk_size,
    )
    run = BACKENDS["torch" if backend == "auto" else backend]
    stats = run(hidden, weight, bias, adapter, head)
    return _scores(stats, head, ignored)


def _scores(stats: Stats, head: Head, ignored: Tensor | None) -> Scores:
    """Row statistics -> unit statistics."""

    def per_unit(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        if head.index is not None:
            values = values.index_select(0, head.index)  # its backward pass adds in a fixed order
        return values if ignored is None else values.masked_fill(ignored, 0)

    logprobs = stats.logprobs
    top1 = None
    if stats.argmax is not None:
        argmax = stats.argmax if head.index is None else stats.argmax[head.index]
        top1 = argmax == head.targets
    if ignored is not None:
        logprobs = logprobs.masked_fill(ignored, 0)
        top1 = None if top1 is None else top1 & ~ignored
    return Scores(logprobs, per_unit(stats.entropy), top1, per_unit(stats.log_sum_sq))


def _check_tensors(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    grad_into: Tensor | None,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            "linear_logprobs: expected hidden [N, D] and weight [V, D], got "
            f"{list(hidden.shape)} and {list(weight.shape)}; flatten batch dimensions first"
        )
    if not hidden.is_floating_point() or weight.dtype != hidden.dtype:
        raise ValueError(
            f"linear_logprobs: hidden is {hidden.dtype} and weight {weight.dtype}; "
            "cast one of them: they must be of one floating dtype"
        )
    for name, ids in (("targets", targets), ("rows", rows)):
        if ids is not None and (ids.ndim != 1 or ids.dtype not in (torch.int64, torch.int32)):
            raise ValueError(
                f"linear_logprobs: {name} must be a vector of int64 or int32, "
                f"got {ids.dtype} of shape {list(ids.shape)}"
            )
    expected = hidden.shape[0] if rows is None else rows.shape[0]
    if targets.shape[0] != expected:
        raise ValueError(
            f"linear_logprobs: {targets.shape[0]} targets for {expected} "
            f"{'rows of hidden; pass rows to score some of them' if rows is None else 'rows'}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"linear_logprobs: bias must be [{weight.shape[0]}] of {weight.dtype}, "
            f"got {list(bias.shape)} of {bias.dtype}"
        )
    if grad_into is not None and (
        grad_into.shape != weight.shape or grad_into.dtype not in (weight.dtype, torch.float32)
    ):
        raise ValueError(
            f"linear_logprobs: grad_into must be {list(weight.shape)} of float32 or "
            f"{weight.dtype}, got {list(grad_into.shape)} of {grad_into.dtype}"
        )


def _check_settings(
    temperature: float | Tensor,
    softcap: float | None,
    want: Sequence[str],
    chunk_size: int | None,
    backend: str,
    num_rows: int,
) -> None:
    if isinstance(temperature, Tensor):
        if temperature.shape != (num_rows,) or not temperature.is_floating_point():
            raise ValueError(
                "linear_logprobs: a temperature tensor holds one float per row of hidden, "
                f"[{num_rows}]; got {temperature.dtype} of shape {list(temperature.shape)}"
            )
    elif not temperature > 0:
        raise ValueError(f"linear_logprobs: temperature must be positive, got {temperature}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"linear_logprobs: softcap must be positive or None, got {softcap}")
    if isinstance(want, str) or not set(want) <= set(WANT):
        raise ValueError(f"linear_logprobs: want must be a tuple out of {WANT}, got {want!r}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"linear_logprobs: chunk_size must be at least 1, got {chunk_size}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(
            f"linear_logprobs: unknown backend {backend!r}; known: auto, {', '.join(BACKENDS)}"
        )


def _row_map(
    rows: Tensor, row_map: RowMap | Literal["auto"] | None
) -> tuple[Tensor, Tensor | None]:
    """(rows that need logits [Q], logits row of each unit [U]; None: unit u has row u)."""
    if row_map is None:
        return rows, None
    if isinstance(row_map, str):
        if row_map != "auto":
            raise ValueError(
                f"linear_logprobs: row_map must be 'auto', None or a pair, got {row_map!r}"
            )
        return torch.unique(rows, return_inverse=True)
    distinct, index = row_map
    if index.shape != rows.shape:
        raise ValueError(
            f"linear_logprobs: row_map's index has shape {list(index.shape)} "
            f"for {rows.shape[0]} rows"
        )
    return distinct, index


def linear_logprobs_plain(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    adapter: Adapter | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    want: Sequence[str] = (),
) -> Scores:
    """linear_logprobs by materialised [U, V] logits and autograd: the reference for tests.

    >>> hidden, token = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    >>> round(linear_logprobs_plain(hidden, torch.eye(3), token).logprobs.item(), 6)
    -0.407606
    """
    ignored = (
        targets == IGNORE_INDEX if rows is None else torch.zeros_like(targets, dtype=torch.bool)
    )
    targets = targets.masked_fill(ignored, 0)[:, None]
    low = None if adapter is None else adapter[0]
    if rows is not None:
        hidden = hidden[rows]
        low = None if low is None else low[rows]
        temperature = temperature[rows] if isinstance(temperature, Tensor) else temperature
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if adapter is not None and low is not None:
        logits = logits + low @ adapter[1].t()
    logits = scale * logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    logp = torch.log_softmax(logits, dim=1)
    p = logp.exp()
    entropy = -(p * logp).sum(1)
    top1 = (logits.argmax(1) == targets[:, 0]) & ~ignored
    log_sum_sq = (2 * logp).logsumexp(1).detach()
    return Scores(
        logprobs=logp.gather(1, targets)[:, 0].masked_fill(ignored, 0),
        entropy=entropy.masked_fill(ignored, 0) if "entropy" in want else None,
        top1=top1 if "top1" in want else None,
        log_sum_sq=log_sum_sq.masked_fill(ignored, 0) if "log_sum_sq" in want else None,
    )
