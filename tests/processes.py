"""Several ranks, a forked process each: what they print, how they end and when."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class End:
    """How a rank ended."""

    code: int | None  # None: it had to be killed
    stderr: str
    seconds: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_processes(
    size: int, work: Callable[[], None], folder: Path, timeout_s: float = 60.0
) -> list[End]:
    """Run `work` on each rank, with torchrun's variables set; kill what outlives the time limit.

    The forked ranks may not use autograd if the parent has.
    """
    port = free_port()

    def run(rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(folder / f"stderr.{rank}", "w", buffering=1) as stderr:
            os.dup2(stderr.fileno(), 2)
            sys.stderr = stderr
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            try:
                work()
            except BaseException:
                traceback.print_exc(file=stderr)
                os._exit(3)
            os._exit(0)

    start = time.monotonic()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    ends: dict[int, tuple[int | None, float]] = {}
    while len(ends) < size:
        for rank, process in enumerate(processes):
            late = time.monotonic() - start > timeout_s
            if late:
                process.kill()
            if rank not in ends and (late or process.exitcode is not None):
                ends[rank] = (None if late else process.exitcode, time.monotonic() - start)
        time.sleep(0.05)
    for process in processes:
        process.join()
    return [
        End(ends[rank][0], (folder / f"stderr.{rank}").read_text(), ends[rank][1])
        for rank in range(size)
    ]
