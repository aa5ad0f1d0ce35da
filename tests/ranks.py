"""Several ranks in one process: a thread each, over torch's threaded process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from lean_trl.train.distributed import World


def on_ranks(size: int, work: Callable[[World], Any], timeout_s: float = 60.0) -> list[Any]:
    """[work(world) of each rank]; raises what a rank raised.

    The random generator of torch is shared by the threads: seed with generators of your own.
    """
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int, store: dist.Store) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            group = dist.group.WORLD if size > 1 else None
            results[rank] = work(World(rank, size, torch.device("cpu"), group, store))
        except BaseException as error:  # handed to the caller below
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for this one
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        store = dist.HashStore()
        threads = [threading.Thread(target=run, args=(r, store), daemon=True) for r in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), f"a rank did not end within {timeout_s} s"
    finally:
        _uninstall_threaded_pg()
        ProcessLocalGroup.reset()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
    return results
