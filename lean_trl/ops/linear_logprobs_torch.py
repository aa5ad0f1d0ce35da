"""The plain-torch backend of linear_logprobs: two passes over tiles of logits.

A tile is a [rows, vocabulary slice] piece of the logits in fp32; the tiles that exist at one time
take a fixed number of bytes. The forward pass reduces each to row statistics; the backward pass
computes it again and turns it into its own gradient, in place. Tiles take all rows first and slice
the vocabulary, so a slice of the weight gradient is finished before the next begins: no second
[V, D] buffer in any dtype. Nothing is read back to the host.

Dimension letters: N hidden rows, Q distinct rows that need logits, U scored tokens, D model,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Bytes of logits that exist at one time, split over the one to three tiles that a pass needs. A CPU
# wants tiles that stay in cache: forward and backward of 800 x 576 x 49152 took 1.03x the time of
# the bare matmuls at 8 to 32 MiB, 1.10x at 64, 1.22x at 256 (fp32, one core of a Sapphire Rapids).
# A GPU wants few launches.
WORKSPACE_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
# Rows of a tile unless chunk_size says otherwise.
MAX_ROWS = 4096


@dataclass(frozen=True)
class Head:
    """What a backend needs beside hidden, weight and bias.

    a = slope * (hidden weight + bias);  z = cap * tanh(a), or a when cap is None
    """

    targets: Tensor  # int64 [U], all in [0, V)
    distinct: Tensor | None  # int64 [Q]; rows of hidden that need logits; None: all, Q = N
    index: Tensor | None  # int64 [U]; logits row of each unit; None: unit u has row u, Q = U
    slope: float | Tensor  # or [Q, 1] in the statistics' dtype
    cap: float | Tensor | None  # or [Q, 1]
    want: frozenset[str]
    grad_into: Tensor | None
    chunk_size: int | None


class Stats(NamedTuple):
    """What a backend returns. logprobs and entropy are differentiable."""

    logprobs: Tensor  # [U]
    entropy: Tensor | None  # [Q]
    argmax: Tensor | None  # int64 [Q]; the first of the largest logits
    log_sum_sq: Tensor | None  # [Q]


def stat_dtype(hidden: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 input."""
    return torch.promote_types(hidden.dtype, torch.float32)


def matmul_dtype(hidden: Tensor) -> torch.dtype:
    """A GPU multiplies low precision into fp32; a CPU would round the logits, so it casts first."""
    return hidden.dtype if hidden.is_cuda else stat_dtype(hidden)


def torch_backend(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: tuple[Tensor, Tensor] | None,
    head: Head,
) -> Stats:
    low, up = adapter or (None, None)
    return Stats(*_LinearLogprobs.apply(hidden, weight, bias, low, up, head))


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        head: Head,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        buffers = 1 + ("entropy" in head.want)
        tiles = _Tiles(hidden, weight, bias, low, up, head, buffers)
        stats = _RowStats(tiles, head.want)
        target_logits = tiles.x.new_zeros(head.targets.shape, dtype=tiles.dtype)
        for v, w in tiles.vocabulary():
            for r in tiles.rows:
                z = tiles.activations(r, v, w)
                if head.cap is not None:
                    z.tanh_().mul_(_part(head.cap, r))
                units, place, inside = tiles.locate(r, v)
                found = z.view(-1)[place]
                target_logits[units] = torch.where(inside, found, target_logits[units])
                stats.add(z, r, v)
        top, total = stats.normaliser()
        log_total = total.log()
        # Subtracting the maximum first keeps the result exact when all logits share a large offset.
        logprobs = (target_logits - _per_unit(top, head)) - _per_unit(log_total, head)
        entropy, argmax, log_sum_sq = stats.moments(top, total)
        ctx.head = head
        ctx.save_for_backward(hidden, weight, bias, low, up, top, total, entropy)
        ctx.mark_non_differentiable(*(s for s in (argmax, log_sum_sq) if s is not None))
        return logprobs, entropy, argmax, log_sum_sq

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor | None, g_entropy: Tensor | None, *_: None) -> tuple[Any, ...]:
        hidden, weight, bias, low, up, top, total, entropy = ctx.saved_tensors
        head: Head = ctx.head
        buffers = 1 + (head.cap is not None) + (g_entropy is not None)
        tiles = _Tiles(hidden, weight, bias, low, up, head, buffers)
        logits_grad = _LogitsGrad(tiles, g, g_entropy, top, total, entropy)
        need_hidden, need_weight, need_bias, *need_adapter = ctx.needs_input_grad[:5]
        grad_x = torch.zeros_like(tiles.x, dtype=tiles.dtype) if need_hidden else None
        grad_bias = tiles.x.new_zeros(weight.shape[0], dtype=tiles.dtype) if need_bias else None
        grad_weight = _WeightGrad(tiles, weight, head.grad_into) if need_weight else None
        grad_adapter = None
        if low is not None and up is not None:
            grad_adapter = _AdapterGrad(tiles, low, up, need_adapter)
        for v, w in tiles.vocabulary():
            for r in tiles.rows:
                da = logits_grad.tile(r, v, w)
                if grad_bias is not None:
                    grad_bias[v].addmv_(da.t(), tiles.slope_column[r, 0])
                da = da.to(tiles.x.dtype)
                if grad_x is not None:
                    _addmm(grad_x[r], da, w)
                if grad_weight is not None:
                    grad_weight.add(da, r, v)
                if grad_adapter is not None:
                    grad_adapter.add(da, r, v)
        return (
            None if grad_x is None else tiles.grad_rows(grad_x, hidden),
            None if grad_weight is None else grad_weight.result,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *((None, None) if grad_adapter is None else grad_adapter.result),
            None,
        )


class _Tiles:
    """The inputs as the matmuls need them, and how the [Q, V] logits are cut."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        up: Tensor | None,
        head: Head,
        buffers: int,
    ) -> None:
        self.weight, self.bias, self.head = weight, bias, head
        self.dtype = stat_dtype(hidden)
        self.sloped = isinstance(head.slope, Tensor) or head.slope != 1
        self.x = self._rows(hidden)  # [Q, D]; holds the slope: tiles need no pass for it
        self.low = None if low is None else self._rows(low)  # [Q, r], with the slope too
        self.up = None if up is None else up.to(self.x.dtype)

        num_rows, vocab = self.x.shape[0], weight.shape[0]
        self.rows = _slices(num_rows, head.chunk_size or _even(num_rows, MAX_ROWS))
        height = self.rows[0].stop if self.rows else 1
        workspace = WORKSPACE_BYTES.get(hidden.device.type, WORKSPACE_BYTES["cuda"])
        room = workspace // self.dtype.itemsize // buffers
        self.columns = _slices(vocab, _even(vocab, max(1, room // height)))
        width = self.columns[0].stop
        self._buffers = self.x.new_empty(buffers, height * width, dtype=self.dtype)
        self.slope_column = self.x.new_ones(num_rows, 1, dtype=self.dtype) * head.slope

    def _rows(self, hidden: Tensor) -> Tensor:
        """The rows that need logits, times the slope, as the matmuls need them."""
        x = hidden if self.head.distinct is None else hidden.index_select(0, self.head.distinct)
        if self.sloped:
            x = x.to(self.dtype) * self.head.slope
        return x.to(matmul_dtype(hidden))

    def vocabulary(self) -> Iterator[tuple[slice, Tensor]]:
        """(slice, its rows of the weight in the dtype of x)."""
        for v in self.columns:
            yield v, self.weight[v].to(self.x.dtype)

    def buffer(self, number: int, like: Tensor) -> Tensor:
        """Scratch tile in the shape of another; number 0 is the one that activations() fills."""
        return self._buffers[number, : like.numel()].view_as(like)

    def activations(self, r: slice, v: slice, w: Tensor) -> Tensor:
        """slope * (x w + low up + bias) of a tile, without softcap; valid until the next call."""
        shape = (r.stop - r.start, v.stop - v.start)
        out = self._buffers[0, : shape[0] * shape[1]].view(shape)
        _mm(out, self.x[r], w.t())
        if self.low is not None and self.up is not None:
            _addmm(out, self.low[r], self.up[v].t())
        if self.bias is not None:
            out.addcmul_(self.slope_column[r], self.bias[v].to(self.dtype))
        return out

    def locate(self, r: slice, v: slice) -> tuple[slice, Tensor, Tensor]:
        """Targets of a tile: (units to look at, flat place in the tile, whether it lies there)."""
        if self.head.index is None:
            units = r
            row = torch.arange(r.stop - r.start, device=self.x.device)
            inside = torch.ones_like(row, dtype=torch.bool)
        else:
            units = slice(None)
            row = self.head.index - r.start
            inside = (row >= 0) & (row < r.stop - r.start)
        width = v.stop - v.start
        column = self.head.targets[units] - v.start
        inside = inside & (column >= 0) & (column < width)
        return units, torch.where(inside, row * width + column, 0), inside

    def grad_rows(self, grad_x: Tensor, hidden: Tensor) -> Tensor:
        """The gradient of hidden [N, ...] from that of its rows with the slope, [Q, ...]."""
        if self.sloped:
            grad_x.mul_(self.head.slope)
        grad_x = grad_x.to(hidden.dtype)
        if self.head.distinct is None:
            return grad_x
        return torch.zeros_like(hidden).index_add_(0, self.head.distinct, grad_x)


class _RowStats:
    """Row statistics of each vocabulary slice, merged in a fixed order when all are there."""

    def __init__(self, tiles: _Tiles, want: frozenset[str]) -> None:
        self.tiles = tiles
        self.column = {v.start: i for i, v in enumerate(tiles.columns)}

        def table(wanted: bool, dtype: torch.dtype = tiles.dtype) -> Tensor | None:
            shape = (len(tiles.columns), tiles.x.shape[0])
            return tiles.x.new_zeros(shape, dtype=dtype) if wanted else None

        self.tops = tiles.x.new_zeros(len(tiles.columns), tiles.x.shape[0], dtype=tiles.dtype)
        self.sums = torch.zeros_like(self.tops)  # sum e, e = exp(z - top)
        self.dots = table("entropy" in want)  # sum e (z - top)
        self.squares = table("log_sum_sq" in want)  # sum e^2
        self.argmax = table("top1" in want, torch.int64)

    def add(self, z: Tensor, r: slice, v: slice) -> None:
        """Reduces a tile of logits, overwriting it."""
        at = (self.column[v.start], r)
        if self.argmax is None:
            top = z.amax(1)
        else:
            top, argmax = z.max(1)
            self.argmax[at] = argmax + v.start
        self.tops[at] = top
        z.sub_(top[:, None])
        e = z.exp_() if self.dots is None else torch.exp(z, out=self.tiles.buffer(1, z))
        self.sums[at] = e.sum(1)
        if self.dots is not None:
            self.dots[at] = z.mul_(e).sum(1)
        if self.squares is not None:
            self.squares[at] = e.square_().sum(1)

    def normaliser(self) -> tuple[Tensor, Tensor]:
        """(max z, sum exp(z - max z)) over the whole vocabulary, [Q] each."""
        top = self.tops.amax(0)
        return top, ((self.tops - top).exp_() * self.sums).sum(0)

    def moments(
        self, top: Tensor, total: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(entropy, argmax, log_sum_sq) over the whole vocabulary, [Q] each, None if not wanted."""
        shift = self.tops - top
        share = shift.exp()
        entropy = argmax = log_sum_sq = None
        if self.dots is not None:
            mean = (share * (self.dots + shift * self.sums)).sum(0) / total  # of z - top
            entropy = total.log() - mean
        if self.argmax is not None:
            # The first slice that holds the maximum, as max() took the first column in it.
            argmax = self.argmax.gather(0, self.tops.argmax(0, keepdim=True))[0]
        if self.squares is not None:
            log_sum_sq = (share.square() * self.squares).sum(0).log() - 2 * total.log()
        return entropy, argmax, log_sum_sq


class _LogitsGrad:
    """Recomputes a tile and turns it into the gradient of the activations.

    With e = exp(z - top):  dz = 1_y g - p (g_row + g_H (log p + H))
                               = 1_y g + e (offset + coefficient (z - top))
    """

    def __init__(
        self,
        tiles: _Tiles,
        g: Tensor | None,
        g_entropy: Tensor | None,
        top: Tensor,
        total: Tensor,
        entropy: Tensor | None,
    ) -> None:
        head = tiles.head
        g_row = torch.zeros_like(total)
        if g is not None:
            g_row = g if head.index is None else g_row.index_add_(0, head.index, g)
        self.coefficient = None
        if g_entropy is not None:
            assert entropy is not None
            g_row = g_row + g_entropy * (entropy - total.log())
            self.coefficient = -(g_entropy / total)[:, None]
        self.offset = -(g_row / total)[:, None]
        self.g = g
        if (
            head.cap is not None
        ):  # z = cap * tanh: the factor goes into the row and unit coefficients
            self.offset = self.offset * head.cap
            if self.coefficient is not None:
                self.coefficient = self.coefficient * head.cap
            if g is not None:
                cap = head.cap
                self.g = g * (_per_unit(cap[:, 0], head) if isinstance(cap, Tensor) else cap)
        self.tiles, self.top = tiles, top[:, None]

    def tile(self, r: slice, v: slice, w: Tensor) -> Tensor:
        """d loss / d (slope * (x w + bias)) of a tile; valid until the next call."""
        tiles, cap = self.tiles, self.tiles.head.cap
        tanh = z = tiles.activations(r, v, w)
        if cap is not None:
            z = torch.mul(tanh.tanh_(), _part(cap, r), out=tiles.buffer(1, tanh))
        z.sub_(self.top[r])
        if self.coefficient is None:
            dz = z.exp_().mul_(self.offset[r])
        else:
            e = torch.exp(z, out=tiles.buffer(1 if cap is None else 2, z))
            dz = torch.addcmul(self.offset[r], z, self.coefficient[r], out=z).mul_(e)
        if self.g is not None:
            units, place, inside = tiles.locate(r, v)
            dz.view(-1).scatter_add_(0, place, self.g[units].masked_fill(~inside, 0))
        if cap is not None:
            torch.ops.aten.tanh_backward.grad_input(dz, tanh, grad_input=dz)  # dz *= 1 - tanh^2
        return dz


class _WeightGrad:
    """Adds up the weight's gradient in the buffer that was asked for, slice by slice.

    A buffer of lower precision receives each finished slice once, rounded once.
    """

    def __init__(self, tiles: _Tiles, weight: Tensor, grad_into: Tensor | None) -> None:
        self.tiles = tiles
        self.fresh = grad_into is None
        if grad_into is None:
            self.buffer = torch.empty_like(weight) if tiles.rows else torch.zeros_like(weight)
        else:
            self.buffer = grad_into
        self.result = self.buffer if self.fresh else None

    def add(self, da: Tensor, r: slice, v: slice) -> None:
        target = self.buffer[v]
        direct = target.dtype == self.tiles.dtype
        if direct:
            self.sum = target
        elif r.start == 0:
            self.sum = target.new_empty(target.shape, dtype=self.tiles.dtype)
        if r.start == 0 and (self.fresh or not direct):
            _mm(self.sum, da.t(), self.tiles.x[r])
        else:
            _addmm(self.sum, da.t(), self.tiles.x[r])
        if not direct and r is self.tiles.rows[-1]:
            target.copy_(self.sum) if self.fresh else target.add_(self.sum)


class _AdapterGrad:
    """Gradients of the two factors of an adapter, of those that need one."""

    def __init__(self, tiles: _Tiles, low: Tensor, up: Tensor, needed: Sequence[bool]) -> None:
        assert tiles.low is not None and tiles.up is not None
        self.tiles, self.low, self.up = tiles, low, up
        self.low_rows, self.up_rows = tiles.low, tiles.up
        self.grad_low = torch.zeros_like(self.low_rows, dtype=tiles.dtype) if needed[0] else None
        self.grad_up = torch.zeros_like(self.up_rows, dtype=tiles.dtype) if needed[1] else None

    def add(self, da: Tensor, r: slice, v: slice) -> None:
        if self.grad_low is not None:
            _addmm(self.grad_low[r], da, self.up_rows[v])
        if self.grad_up is not None:
            _addmm(self.grad_up[v], da.t(), self.low_rows[r])

    @property
    def result(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            None if self.grad_low is None else self.tiles.grad_rows(self.grad_low, self.low),
            None if self.grad_up is None else self.grad_up.to(self.up.dtype),
        )


def _mm(out: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _addmm(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)  # not addmm_: FLOP counters do not see it
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))


def _per_unit(values: Tensor, head: Head) -> Tensor:
    return values if head.index is None else values[head.index]


def _part(factor: float | Tensor, r: slice) -> float | Tensor:
    return factor[r] if isinstance(factor, Tensor) else factor


def _even(total: int, most: int) -> int:
    """The size that cuts `total` into as few pieces as `most` allows, about equal ones."""
    pieces = max(1, -(-total // most))
    return max(1, -(-total // pieces))


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
