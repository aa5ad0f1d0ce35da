"""Bytes of tensors that are alive, seen from outside: every storage that an operation made."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """`alive()` is the sum over storages made inside the mode and not freed yet."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            item.untyped_storage()._cdata
            for item in tree_iter((args, kwargs))
            if isinstance(item, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for item in tree_iter(out):
            if isinstance(item, Tensor):
                storage = item.untyped_storage()
                if storage._cdata not in self.storages and storage._cdata not in given:
                    # The weak reference keeps the address from being used again.
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self) -> int:
        return sum(nbytes for storage, nbytes in self.storages.values() if not storage.expired())
