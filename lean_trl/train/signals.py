"""SIGTERM and SIGUSR1: a step that every rank agrees on is the one after which they save.

A scheduler that takes the machine away sends SIGTERM: save, then end. SIGUSR1: save and go on.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

NOTHING, SAVE, STOP = 0, 1, 2
ASKS = {signal.SIGUSR1: SAVE, signal.SIGTERM: STOP}


class Signals:
    """Listens while it is entered (in the main thread; elsewhere Python hears no signals).

    with Signals(group) as signals:
        ... one step ...
        asked = signals.agreed()            # NOTHING, SAVE or STOP, the same on every rank
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._asked = NOTHING
        self._before: dict[signal.Signals, Any] = {}
        self._sent: tuple[torch.Tensor, dist.Work] | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in ASKS:
            self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            # None is a handler that was not set by Python (faulthandler's), and none to hand back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = max(self._asked, ASKS[signal.Signals(number)])

    def agreed(self) -> int:
        """The most that any rank was asked for before its previous call (with one rank: this call).

        What the ranks heard travels while the next step runs, so nobody waits: a signal takes
        effect after the step in progress or the one after it.
        """
        if self.group is None:
            heard, self._asked = self._asked, NOTHING
            return heard
        agreed = NOTHING
        if self._sent is not None:
            message, work = self._sent
            work.wait()
            agreed = int(message)
        message = torch.tensor(self._asked)
        self._asked = NOTHING
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        self._sent = message, work
        return agreed
