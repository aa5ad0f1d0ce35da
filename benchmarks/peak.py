"""The peak of live tensor bytes on a device, and who holds them at that moment.

A dispatch mode sees the storage of every tensor that an operation returns; a finaliser sees it go.
So each byte is counted from the operation that made it to the last reference, as an allocator
counts it, without an allocator: on the CPU, and on tensors that have no memory at all. What a
kernel allocates and frees inside itself is not seen.

    tracker = PeakTracker(model)
    tracker.hold("optimizer", tensors)          # what exists already, by category
    with tracker, tracker.gradients_of(optimizer):
        train_step(...)
    tracker.peak, tracker.breakdown(), tracker.largest()
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

# activations: made by a forward (or its recomputation) and alive when the backward that needs them
# begins. head: everything that scoring against the vocabulary makes. temporaries: the rest, such as
# gradients of activations and scratch space.
CATEGORIES = (
    "parameters",
    "reference",
    "optimizer",
    "gradients",
    "activations",
    "head",
    "temporaries",
)
HEAD_FILE = re.compile(r"/ops/linear_logprobs\w*\.py$")
# Operations that are kernels of torch. Others are Python inside, and their parts are seen too.
KERNELS = ("aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp")


@dataclass(slots=True)
class Allocation:
    """One storage. `place` is the module that made it, or else the backward node or function."""

    nbytes: int
    category: str
    place: str
    shape: tuple[int, ...]
    dtype: str
    alive: bool = True


@dataclass(frozen=True)
class Holder:
    """Storages of one kind that are alive at the peak; layers of a model count as one kind."""

    category: str
    place: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int  # all together


class PeakTracker(TorchDispatchMode):
    """Counts storages on devices of one type while it is active; `hold` adds those from before."""

    def __init__(self, model: nn.Module, device_type: str = "cpu") -> None:
        super().__init__()
        self.device_type = device_type
        self.names = {id(module): name for name, module in model.named_modules()}
        self.allocations: list[Allocation] = []
        self.events: list[tuple[int, int]] = []  # (allocation, bytes more or, negative, less)
        self._live: dict[int, int] = {}  # address of a storage -> allocation
        self._fresh: list[Allocation] = []  # made by a forward whose backward has not begun

    # -- what is counted --

    def hold(self, category: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Put (name, tensor) under a category, whether or not they are counted already."""
        for name, tensor in tensors:
            allocation = self._add(tensor, category, name)
            if allocation is not None:
                allocation.category, allocation.place = category, name

    @contextmanager
    def gradients_of(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[None]:
        """Where the update begins, what parameters have in .grad is `gradients`."""

        def mark(*_: Any) -> None:
            grads = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
            self.hold("gradients", grads)

        handle = optimizer.register_step_pre_hook(mark)
        yield
        handle.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come here one by one
        kwargs = kwargs or {}
        if func.namespace in KERNELS or detect_fake_mode((args, kwargs)) is not None:
            out = func(*args, **kwargs)
        else:
            key = torch._C._dispatch_key_parse(self.device_type.upper())
            with self:
                out = func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        in_backward = torch._C._current_graph_task_id() != -1
        module, in_head = self._caller()
        if in_backward and module is None:
            # Whatever the forward made and is still there now was kept for this.
            for allocation in self._fresh:
                if allocation.alive and allocation.category == "temporaries":
                    allocation.category = "activations"
            self._fresh.clear()
        place = f"{module}: {func.__name__.partition('.')[0]}"
        if module is None:
            node = torch._C._current_autograd_node() if in_backward else None
            place = node.name() if node is not None else func.__name__.partition(".")[0]
        for item in tree_iter(out):
            if isinstance(item, Tensor):
                known = len(self.allocations)
                made = self._add(item, "head" if in_head else "temporaries", place)
                if made is not None and len(self.allocations) > known and not in_head:
                    if module is not None or not in_backward:
                        self._fresh.append(made)
        return out

    def __enter__(self):
        if not self._entered:
            self._resize = torch.UntypedStorage.resize_
            # FSDP2 frees and refills gathered parameters this way, which no operation shows.
            torch.UntypedStorage.resize_ = self._resized(self._resize)
        self._entered += 1
        return super().__enter__()

    def __exit__(self, *error):
        self._entered -= 1
        if not self._entered:
            torch.UntypedStorage.resize_ = self._resize
        return super().__exit__(*error)

    _entered = 0

    def _resized(self, original: Any) -> Any:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = original(storage, size)
            index = self._live.get(storage._cdata)
            if index is not None:
                self.events.append((index, size - before))
                self.allocations[index].nbytes = size
            return result

        return resize

    def _add(self, tensor: Tensor, category: str, place: str) -> Allocation | None:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type != self.device_type or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        index = self._live.get(storage._cdata)
        if index is not None:
            return self.allocations[index]
        index = len(self.allocations)
        dtype = str(tensor.dtype).removeprefix("torch.")
        made = Allocation(storage.nbytes(), category, place, tuple(tensor.shape), dtype)
        self.allocations.append(made)
        self.events.append((index, made.nbytes))
        self._live[storage._cdata] = index
        weakref.finalize(storage, self._free, storage._cdata, index)
        return made

    def _free(self, address: int, index: int) -> None:
        allocation = self.allocations[index]
        allocation.alive = False
        self.events.append((index, -allocation.nbytes))
        del self._live[address]

    def _caller(self) -> tuple[str | None, bool]:
        """(name of the innermost module whose forward runs, whether the head's op does)."""
        # On a GPU backward runs in a thread of its own, with nothing above __torch_dispatch__.
        frame: FrameType | None = sys._getframe(1)
        in_head = False
        while frame is not None:
            code = frame.f_code
            in_head = in_head or HEAD_FILE.search(code.co_filename) is not None
            if code.co_name == "forward":
                name = self.names.get(id(frame.f_locals.get("self")))
                if name is not None:
                    return name or "model", in_head
            frame = frame.f_back
        return None, in_head

    # -- what is known in the end --

    @property
    def peak(self) -> int:
        """Most bytes alive at one time."""
        return int(self._curve().max(initial=0))

    def breakdown(self) -> dict[str, int]:
        """Bytes of each category at the peak; they add up to it."""
        sizes: Counter[str] = Counter()
        for index, nbytes in self._at_peak().items():
            sizes[self.allocations[index].category] += nbytes
        return {category: sizes[category] for category in CATEGORIES}

    def largest(self, count: int = 12) -> list[Holder]:
        """The largest holders at the peak; layers differ only in a number and are one holder."""
        sizes: Counter[tuple] = Counter()
        counts: Counter[tuple] = Counter()
        for index, nbytes in self._at_peak().items():
            a = self.allocations[index]
            kind = (a.category, re.sub(r"\.\d+\b", ".*", a.place), a.shape, a.dtype)
            sizes[kind] += nbytes
            counts[kind] += 1
        return [Holder(*kind, counts[kind], n) for kind, n in sizes.most_common(count)]

    def _curve(self) -> np.ndarray:
        return np.cumsum([change for _, change in self.events])

    def _at_peak(self) -> dict[int, int]:
        """{allocation: bytes} at the first moment of the peak."""
        if not self.events:
            return {}
        last = int(self._curve().argmax())
        sizes: Counter[int] = Counter()
        for index, change in self.events[: last + 1]:
            sizes[index] += change
        return {index: nbytes for index, nbytes in sizes.items() if nbytes > 0}


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """A list that grows by the bytes of each storage that the graph keeps for backward.

    Parameters are not counted. Under activation checkpointing these are the kept inputs; what a
    recomputation saves for a moment is not among them.
    """
    seen: dict[int, Any] = {}
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        counted = seen.get(storage._cdata)
        if not isinstance(tensor, nn.Parameter) and (counted is None or counted() is None):
            seen[storage._cdata] = weakref.ref(storage)
            sizes.append(storage.nbytes())
        # A view, because a tensor that its own graph keeps would never be freed.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
