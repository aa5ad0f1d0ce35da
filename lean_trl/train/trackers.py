"""Dashboards: tensorboard, wandb, trackio, each behind the same two calls.

They are extras (`pip install 'lean_trl[log]'`), off by default, on rank 0 only. What they raise
never stops a run: a dashboard that fails is named once and left out from then on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lean_trl.config import Config


class Tracker(Protocol):
    """Where numbers are shown."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Show the numbers of a step."""

    def close(self) -> None:
        """Send what has not been sent."""


class TensorBoard:
    """Event files in <output_dir>/tensorboard."""

    def __init__(self, config: Config) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(Path(config.output_dir) / "tensorboard"))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run in the project `logging.wandb`; its account comes from wandb's own settings."""

    def __init__(self, config: Config) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=config.logging.wandb, dir=config.output_dir, config=asdict(config)
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in the project `logging.trackio`, kept on this machine."""

    def __init__(self, config: Config) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(project=config.logging.trackio, config=asdict(config))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Trackers:
    """The dashboards that the settings ask for.

    Raises ValueError when the package of one is not installed: that is known before the first step.
    """

    def __init__(self, config: Config) -> None:
        self._open: dict[str, Tracker] = {}
        for name, make in TRACKERS.items():
            if not asdict(config.logging)[name]:
                continue
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ValueError(
                    f"logging.{name} needs a package that is missing ({error}): "
                    "pip install 'lean_trl[log]', or leave it out"
                ) from None
            self._guard(name, partial(self._start, name, make, config))

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        """Show the record's numbers; what is no number stays in metrics.jsonl."""
        numbers = {k: float(v) for k, v in record.items() if isinstance(v, int | float)}
        for name, tracker in list(self._open.items()):
            self._guard(name, partial(tracker.write, step, numbers))

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guard(name, tracker.close)

    def _start(self, name: str, make: Callable[[Config], Tracker], config: Config) -> None:
        self._open[name] = make(config)

    def _guard(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        # Whatever a dashboard or its network does is no reason to lose a run.
        except Exception as error:
            self._open.pop(name, None)
            print(f"logging.{name} failed and is off: {error!r}", file=sys.stderr, flush=True)
