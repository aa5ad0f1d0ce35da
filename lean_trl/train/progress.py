"""A progress bar on stderr: loss, tokens per second, time left; sparse lines without a terminal.

The bar is tqdm's: huggingface_hub brings it already. The estimate is ours: steps reach the bar in
bursts (logging.every) and an evaluation runs before the first, and both throw tqdm's off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
SECONDS_OF_A_BURST = 0.02  # steps written together are read back within this


class Progress:
    """Shows how far a run is. `enabled` is false on all ranks but the first.

    total: steps that the run will take, or None when nobody knows. stream: stderr unless given.
    """

    def __init__(
        self,
        total: int | None,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.enabled, self.clock = total, enabled, clock
        self.stream = sys.stderr if stream is None else stream
        self._bar: tqdm | None = None
        self._line = ""  # the newest state, and whether it has been printed as a line
        self._line_shown = True
        self._line_time = -SECONDS_BETWEEN_LINES
        self._first_step = 0
        self._first_time: float | None = None

    def update(self, step: int, *, loss: float, tokens_per_second: float) -> None:
        """Show that `step` (from 1) is done."""
        if not self.enabled:
            return
        status = f"loss {loss:.4f}  {_short(tokens_per_second)} tokens/s  ETA {self._left(step)}"
        if self.stream.isatty():
            self._show_bar(step, status)
        else:
            self._show_line(step, status)

    def say(self, message: str) -> None:
        """Print a line on stdout without tearing the bar."""
        if self._bar is None:
            print(message, flush=True)
        else:
            self._bar.write(message, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        """Show the last state and leave it on the screen."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if not self._line_shown:
            self._print_line()

    def _left(self, step: int) -> str:
        """Time left, from the mean over all steps after the first (or the first burst)."""
        now = self.clock()
        if self._first_time is None or now - self._first_time < SECONDS_OF_A_BURST:
            self._first_step = step
            self._first_time = now if self._first_time is None else self._first_time
        if self.total is None or step == self._first_step:
            return "0s" if step == self.total else "?"
        seconds = (now - self._first_time) / (step - self._first_step) * (self.total - step)
        return _duration(seconds)

    def _show_bar(self, step: int, status: str) -> None:
        if self._bar is None:
            layout = (
                "{bar:20} step {n_fmt}/{total_fmt}  {desc}"
                if self.total
                else "step {n_fmt}  {desc}"
            )
            self._bar = tqdm(
                total=self.total, file=self.stream, bar_format=layout, dynamic_ncols=True
            )
        self._bar.set_description_str(status, refresh=False)
        self._bar.update(step - self._bar.n)

    def _show_line(self, step: int, status: str) -> None:
        self._line = f"step {step}/{self.total or '?'}  {status}"
        self._line_shown = False
        if self.clock() - self._line_time >= SECONDS_BETWEEN_LINES or step == self.total:
            self._print_line()

    def _print_line(self) -> None:
        print(self._line, file=self.stream, flush=True)
        self._line_shown = True
        self._line_time = self.clock()


def _short(value: float) -> str:
    """Four digits: 987.4, 12.35k, 4.56M.

    >>> [_short(v) for v in (0.5, 987.4, 12345, 4_560_000)]
    ['0.5', '987.4', '12.35k', '4.56M']
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    """Hours and minutes, or minutes and seconds.

    >>> [_duration(s) for s in (4.4, 75, 7265)]
    ['4s', '1m15s', '2h01m']
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    if hours:
        return f"{hours}h{left:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
