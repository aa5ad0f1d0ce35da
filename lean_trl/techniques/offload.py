"""Activation offloading: what blocks keep for backward waits in host memory.

A tensor that a block saves is copied to the host and its device copy dropped; when backward reaches
the block after it, the copy back begins. Views of one storage, and a tensor that several operations
save, move once. Parameters stay; so does the last block, which backward needs at once; the head is
no block. With activation checkpointing a block saves its input only, so only that moves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lean_trl.config import Config
from lean_trl.model.attention import Context
from lean_trl.model.decoder import CausalLM
from lean_trl.techniques.technique import Evidence, Technique, Trial
from lean_trl.techniques.transfer import Arriving, HostMemory, StreamTransport, Transport

# Wrappers around several tensors (of sharding, of quantisation) have no memory of their own.
MOVABLE = (Tensor, FakeTensor)


@dataclass
class Moved:
    """A flat piece of memory that was copied to the host."""

    host: Tensor
    source: StorageWeakRef  # keeps the storage's address from being used for another one
    waiting: int = 0  # saved tensors that lie in it and were not asked for yet
    device: Arriving | None = None


class Saved(NamedTuple):
    """What the graph holds in place of a tensor."""

    moved: Moved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass
class Store:
    """What is moved out during one micro-batch, and how it comes back.

    min_bytes: smaller tensors stay. transport: made for the device of the first tensor.
    """

    use_streams: bool
    pin_memory: bool
    min_bytes: int
    max_pinned_bytes: int
    transport: Transport | None = None
    moved_bytes: int = 0  # since the run began
    by_block: dict[int, list[Moved]] = field(default_factory=dict)
    known: dict[tuple, Moved] = field(default_factory=dict)

    def pack(self, tensor: Tensor, block: int, staying: set[int]) -> Tensor | Saved:
        """Move a tensor out, unless it stays. staying: addresses of storages that do."""
        storage = tensor.untyped_storage()
        stays = isinstance(tensor, nn.Parameter) or storage._cdata in staying
        if stays or type(tensor) not in MOVABLE or tensor.nbytes < self.min_bytes:
            # Detached: an output that its own graph held would never be freed.
            return tensor if stays else tensor.detach()
        tensor = tensor.detach()
        size, stride, offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        key: tuple = (storage._cdata, tensor._version)
        if 2 * tensor.nbytes < storage.nbytes():  # a small part of something large moves alone
            key += (offset, size, stride, tensor.dtype)
            flat = tensor.contiguous().view(-1)
            stride, offset = torch.empty(size, device="meta").stride(), 0
        else:
            numel = storage.nbytes() // tensor.element_size()
            flat = tensor.as_strided((numel,), (1,), 0)
        moved = self.known.get(key)
        if moved is None or moved.source.expired():
            moved = Moved(self._transport(tensor.device).store(flat), StorageWeakRef(storage))
            self.known[key] = moved
            self.by_block.setdefault(block, []).append(moved)
            self.moved_bytes += flat.nbytes
        moved.waiting += 1
        return Saved(moved, tensor.dtype, size, stride, offset)

    def unpack(self, saved: Tensor | Saved) -> Tensor:
        """The tensor again. After the last one of a piece the device copy is the graph's alone."""
        if isinstance(saved, Tensor):
            return saved
        moved = saved.moved
        assert self.transport is not None
        if moved.device is None:
            moved.device = self.transport.fetch(moved.host)
        flat = self.transport.wait(moved.device)
        moved.waiting -= 1
        if moved.waiting <= 0:
            moved.device = None
        return flat.view(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)

    def prefetch(self, block: int) -> None:
        """Start to copy back what a block saved."""
        for moved in self.by_block.pop(block, ()):
            if moved.device is None and moved.waiting > 0:
                assert self.transport is not None
                moved.device = self.transport.fetch(moved.host)

    def reset(self) -> None:
        """The micro-batch is over, well or badly."""
        for moved in self.known.values():
            moved.device = None
        self.known.clear()
        self.by_block.clear()
        if self.transport is not None:
            self.transport.reset()

    def _transport(self, device: torch.device) -> Transport:
        if self.transport is None:
            on_gpu = device.type == "cuda"
            memory = HostMemory(self.pin_memory and on_gpu, self.max_pinned_bytes)
            kind = StreamTransport if on_gpu and self.use_streams else Transport
            self.transport = kind(memory, device)
        return self.transport


class ActivationOffloading(Technique):
    """Wraps the forward of every block but the last."""

    name = "activation_offloading"
    settings = ("memory.activation_offloading",)

    def __init__(self, config: Config) -> None:
        options = config.memory.activation_offloading_kwargs
        self.enabled = config.memory.activation_offloading
        limit = options.max_pinned_gib
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        self.store = Store(
            options.use_streams,
            options.pin_memory,
            options.min_bytes,
            half if limit is None else int(limit * 2**30),
        )
        self.active = False

    def on_model(self, model: CausalLM) -> None:
        for index, block in enumerate(model.blocks):
            block.forward = _Offloaded(self, block, index, is_last=index == len(model.blocks) - 1)

    def around_micro_batch(self) -> AbstractContextManager:
        return self._micro_batch()

    @contextmanager
    def _micro_batch(self) -> Iterator[None]:
        self.active = True
        try:
            yield
        finally:
            self.active = False
            self.store.reset()

    def evidence(self, trial: Trial) -> Evidence:
        moved = self.store.moved_bytes
        return Evidence(moved, f"{moved:,} bytes moved to host memory and back")


class _Offloaded:
    """A block's forward whose saved tensors move out."""

    def __init__(
        self, technique: ActivationOffloading, block: nn.Module, index: int, is_last: bool
    ) -> None:
        self.technique, self.block, self.index, self.is_last = technique, block, index, is_last
        self.forward = block.forward

    def _staying(self, ctx: Context) -> set[int]:
        """Storages of parameters, read at every call because sharding gathers them anew, and of the
        rotary tables, which all blocks share.
        """
        tables = (table for pair in ctx.rope.values() for table in pair)
        tensors = (*self.block.parameters(), *tables)
        return {tensor.untyped_storage()._cdata for tensor in tensors}

    def __call__(self, *args: Any) -> Any:
        if not (self.technique.active and torch.is_grad_enabled()):
            return self.forward(*args)
        store = self.technique.store
        if store.transport is not None:
            store.transport.next_block()
        if self.is_last:
            out = self.forward(*args)
        else:
            staying = self._staying(args[1])
            with saved_tensors_hooks(lambda t: store.pack(t, self.index, staying), store.unpack):
                out = self.forward(*args)
        first = out[0] if isinstance(out, tuple) else out
        if self.index > 0 and first.requires_grad:
            # The gradient of this output is there: backward of this block begins, and the one
            # before it will be next.
            first.register_hook(lambda grad: store.prefetch(self.index - 1))
        return out
