"""When a rank fails, the others end soon, and all say which rank, step and row it was.

A thread of each rank writes a sign of life to the store that all share, and reads that of the next
rank. Collectives play no part: they are what hangs when a rank is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist

from lean_trl.train.distributed import World
from lean_trl.types import Batch

BEAT_S = 1.0
SILENCE_S = 15.0  # a thread that waits for the interpreter's lock misses a few beats
PATIENCE_S = 5.0  # for the others to read why this rank ends
Rows = Sequence[tuple[str, int]]
# What a collective says when a rank at its other end is gone.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out")


@dataclass
class Place:
    """What this rank is at, for messages."""

    step: int = 0  # from 1; 0: before the first
    rows: Rows = ()  # (file, row) of the micro-batch that is being worked on
    reading: Callable[[], Rows] = tuple  # rows that are being read while `rows` is empty

    def follow(
        self, batches: Sequence[Batch], around: Callable[[], AbstractContextManager]
    ) -> Callable[[], AbstractContextManager]:
        """train_step's `around` that also notes whose micro-batch it is."""
        self.rows = [row for batch in batches for row in batch.sources]
        rest = iter(batches)

        def noted() -> AbstractContextManager:
            self.rows = next(rest).sources
            return around()

        return noted

    def __str__(self) -> str:
        rows = [f"{file} row {row}" for file, row in (self.rows or self.reading())]
        shown = rows[:4] + ([f"{len(rows) - 4} more"] if len(rows) > 4 else [])
        return ", ".join([f"step {self.step}" if self.step else "the start", *shown])


class Watchdog:
    """Watches the other ranks while it is entered; with one rank it does nothing.

    An exception that passes through is told to the others, which print it and end with code 1. A
    rank that gives no sign of life for silence_s, or the loss of the store, ends all. timeout_s:
    how long a rank that is done waits for the others.
    """

    def __init__(
        self, world: World, timeout_s: float = 600.0, silence_s: float = SILENCE_S
    ) -> None:
        self.rank, self.size = world.rank, world.size
        self.timeout_s, self.silence_s = timeout_s, silence_s
        self.place = Place()
        self._beat = 0
        self._heard, self._heard_at = b"", 0.0  # of the next rank
        self._failed = False
        self._leaving, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if world.store is not None and world.size > 1:
            # A connection of its own: the main thread's may wait in the set-up of a collective.
            store: Any = world.store  # torch's stubs do not know clone
            self._store = dist.PrefixStore("watchdog", store.clone())

    def __enter__(self) -> Watchdog:
        if self.size > 1:
            self._heard_at = time.monotonic()
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.size == 1:
            return
        if error is None or isinstance(error, SystemExit):
            self._leaving.set()
            self._over.wait(self.timeout_s)
            return
        cause = f"{type(error).__name__}: {error}"
        try:
            if isinstance(error, RuntimeError) and any(echo in cause for echo in ECHOES):
                # Another rank is gone; when the thread finds out which, it ends this process.
                self._over.wait(self.silence_s + 2 * BEAT_S)
                cause += self._places()  # none is: one of them hangs
            self._failed = True
            self._post(self.rank, str(self.place), cause)
            self._over.wait(PATIENCE_S)
        except dist.DistError:  # nobody is left to be told
            self._failed = True

    def _watch(self) -> None:
        try:
            while not self._look():
                time.sleep(BEAT_S)
        except dist.DistError as error:
            if not (self._leaving.is_set() or self._failed):
                # At once: the main thread may be in a collective that never returns.
                self._say(f"the store of the ranks is gone, its host must have failed: {error}")
                os._exit(1)
        self._over.set()

    def _look(self) -> bool:
        """One sign of life, and a look at the others. True when this rank may go."""
        self._beat += 1
        self._store.set(f"life.{self.rank}", f"{self._beat} {self.place}")
        if self._store.check(["failure"]):
            if not self._failed:
                self._end_because(json.loads(self._store.get("failure")))
            return self._store.add("told", 0) >= self.size - 1
        self._check_next()
        if not self._leaving.is_set():
            return False
        self._store.set(f"left.{self.rank}", "")
        return self._store.check([f"left.{rank}" for rank in range(self.size)])

    def _check_next(self) -> None:
        rank = (self.rank + 1) % self.size
        heard = self._store.get(f"life.{rank}") if self._store.check([f"life.{rank}"]) else b""
        now = time.monotonic()
        if heard != self._heard:
            self._heard, self._heard_at = heard, now
        elif now - self._heard_at > self.silence_s:
            place = heard.decode().partition(" ")[2] or "the start"
            silence = f"no sign of life for {now - self._heard_at:.0f} s"
            self._post(rank, place, f"{silence}: killed, out of memory, or its host is gone")

    def _places(self, most: int = 8) -> str:
        """Where the other ranks are, as far as they have said."""
        ranks = [rank for rank in range(min(self.size, most)) if rank != self.rank]
        keys = [f"life.{rank}" for rank in ranks if self._store.check([f"life.{rank}"])]
        places = {key[5:]: self._store.get(key).decode().partition(" ")[2] for key in keys}
        return "".join(f"; rank {rank} was at {place}" for rank, place in places.items())

    def _post(self, rank: int, place: str, cause: str) -> None:
        """The first failure is the one that is told."""
        message = json.dumps({"rank": rank, "place": place, "cause": cause})
        self._store.compare_set("failure", "", message)

    def _end_because(self, failure: dict[str, Any]) -> NoReturn:
        """End, but keep the store up until the others have read it: rank 0 may be its host."""
        self._say("rank {rank} failed at {place}: {cause}".format(**failure))
        patience = time.monotonic() + (PATIENCE_S if self.rank == 0 else 0.0)
        told = self._store.add("told", 1)
        while told < self.size - 1 and time.monotonic() < patience:
            time.sleep(BEAT_S / 10)
            told = self._store.add("told", 0)
        os._exit(1)

    def _say(self, why: str) -> None:
        print(f"rank {self.rank} ends at {self.place}: {why}", file=sys.stderr, flush=True)
