"""Copies between a device and host memory, in order or on streams of their own.

Sources and targets are flat tensors. Host memory comes from slabs that are kept from one
micro-batch to the next, because pinning memory takes longer than copying into it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

SLAB_BYTES = 64 * 2**20
ALIGNMENT = 64  # of every piece, so that it can be viewed as any dtype


class HostMemory:
    """Slabs that are handed out piece after piece and taken back all at once.

    pin: page-locked, so that a GPU copies without the CPU. max_bytes: of slabs; what does not fit
    comes from ordinary memory, which is slower, and is freed after use.
    """

    def __init__(self, pin: bool, max_bytes: int) -> None:
        self.pin, self.max_bytes = pin, max_bytes
        self.slabs: list[Tensor] = []
        self.slab = self.offset = 0  # where the next piece starts

    def take(self, nbytes: int) -> Tensor:
        """uint8 [nbytes], uninitialised."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        while self.slab < len(self.slabs):
            slab = self.slabs[self.slab]
            if self.offset + size <= slab.shape[0]:
                piece = slab[self.offset : self.offset + nbytes]
                self.offset += size
                return piece
            self.slab, self.offset = self.slab + 1, 0
        room = self.max_bytes - sum(slab.shape[0] for slab in self.slabs)
        if size > room:
            return torch.empty(nbytes, dtype=torch.uint8)
        new = min(max(SLAB_BYTES, size), room)
        self.slabs.append(torch.empty(new, dtype=torch.uint8, pin_memory=self.pin))
        return self.take(nbytes)

    def take_back(self) -> None:
        """Every piece is free again."""
        self.slab = self.offset = 0


@dataclass
class Arriving:
    """A tensor on the device that a copy fills; `event` None: it is there."""

    data: Tensor
    event: torch.cuda.Event | None = None


class Transport:
    """Copies in the order of all other work. On the CPU a copy is a copy."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self.memory, self.device = memory, device

    def store(self, data: Tensor) -> Tensor:
        """Start to copy a flat tensor out; returns its host memory in the same dtype."""
        host = self.memory.take(data.nbytes).view(data.dtype)
        host.copy_(data, non_blocking=True)
        return host

    def fetch(self, host: Tensor) -> Arriving:
        """Start to copy host memory in."""
        data = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        data.copy_(host, non_blocking=True)
        return Arriving(data)

    def wait(self, arriving: Arriving) -> Tensor:
        """The data, which whatever is launched next may read."""
        return arriving.data

    def next_block(self) -> None:
        """A block's forward begins: what the block before the last one stored is gone by now."""

    def reset(self) -> None:
        """Nothing stored is needed any more."""
        self.memory.take_back()


class StreamTransport(Transport):
    """Copies on a stream for each direction, while the GPU computes."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        super().__init__(memory, device)
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # Sources live until they are copied: (event, source) of each block, oldest first.
        self.leaving: deque[list[tuple[torch.cuda.Event, Tensor]]] = deque([[]])

    def store(self, data: Tensor) -> Tensor:
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            host = super().store(data)
        self.leaving[-1].append((self.out.record_event(), data))
        return host

    def fetch(self, host: Tensor) -> Arriving:
        # Taken on the compute stream, which also frees it: no memory changes hands between streams.
        data = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self.back.wait_stream(torch.cuda.current_stream(self.device))
        self.back.wait_stream(self.out)
        with torch.cuda.stream(self.back):
            data.copy_(host, non_blocking=True)
        return Arriving(data, self.back.record_event())

    def wait(self, arriving: Arriving) -> Tensor:
        if arriving.event is not None:
            torch.cuda.current_stream(self.device).wait_event(arriving.event)
            arriving.event = None
        return arriving.data

    def next_block(self) -> None:
        self.leaving.append([])
        while len(self.leaving) > 2:
            self._let_go(self.leaving.popleft())

    def reset(self) -> None:
        while self.leaving:
            self._let_go(self.leaving.popleft())
        self.leaving.append([])
        # The next micro-batch writes over the host memory that these copies may still read.
        self.out.wait_stream(self.back)
        super().reset()

    def _let_go(self, sources: list[tuple[torch.cuda.Event, Tensor]]) -> None:
        """Free sources once the compute stream, which may use their memory next, has waited."""
        if sources:
            torch.cuda.current_stream(self.device).wait_event(sources[-1][0])
            sources.clear()
