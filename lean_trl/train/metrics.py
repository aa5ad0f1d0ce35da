"""Metrics of a step: gathered per micro-batch, reduced over ranks with two all-reduces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lean_trl.train.trackers import Trackers
from lean_trl.types import Metric

# A metric is a row of sums or of maxima until the end of the step; minima are maxima of the negated
# value.
_SUMS = ("mean", "sum")
_LESS = "\0less"  # ends the name of what is subtracted in a contrast


class Meter:
    """Adds up a window's metrics on the device.

    Every rank must add the same names (a micro-batch without scored tokens adds them too, with
    empty values).

    >>> meter = Meter(torch.device("cpu"))
    >>> meter.add({"loss": Metric(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]))})
    >>> meter.reduce()["loss"]                   # (1 * 3 + 2 * 1) / 4
    tensor(1.2500)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._how: dict[str, str] = {}
        self._sums: dict[str, Tensor] = {}  # fp64 [2]: (sum of value * weight, sum of weight)
        self._host: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Metric]) -> None:
        """Fold in one micro-batch's metrics."""
        for name, metric in metrics.items():
            assert self._how.setdefault(name, metric.how) == metric.how, f"{name} changed how"
            values = metric.values.detach().reshape(-1)
            weights = (
                torch.ones_like(values) if metric.weights is None else metric.weights.reshape(-1)
            )
            if metric.how in _SUMS:
                self._sum(name, values, weights)
            elif metric.how == "contrast":
                self._sum(name, values, weights.clamp(min=0))
                self._sum(name + _LESS, values, weights.neg().clamp(min=0))
            else:
                self._maxima[name] = self._fold(name, metric.how, values, weights)

    def add_host(self, name: str, value: float, weight: float = 1.0, how: str = "mean") -> None:
        """Fold in a number that the host knows; it reaches the device once, in reduce()."""
        assert how in _SUMS and self._how.setdefault(name, how) == how
        total, weights = self._host.get(name, (0.0, 0.0))
        self._host[name] = (total + value * weight, weights + weight)

    def _sum(self, name: str, values: Tensor, weights: Tensor) -> None:
        # A weight of 0 leaves out what is not finite too. fp64: a sum over 1e6 fp32 tokens would
        # lose digits that the log prints.
        weighted = torch.where(weights == 0, 0.0, values * weights)
        pair = torch.stack([weighted.sum(dtype=torch.float64), weights.sum(dtype=torch.float64)])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def _fold(self, name: str, how: str, values: Tensor, weights: Tensor) -> Tensor:
        if how == "last":  # a state that all ranks share: the newest micro-batch that has it wins
            return (
                values[-1:].double() if values.numel() else self._maxima.get(name, self._nothing())
            )
        signed = -values if how == "min" else values
        masked = torch.where(weights > 0, signed.double(), -math.inf)
        return torch.cat([self._maxima.get(name, self._nothing()), masked]).max().reshape(1)

    def _nothing(self) -> Tensor:
        return torch.full((1,), -math.inf, dtype=torch.float64, device=self.device)

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
        """fp32 scalars on the device, equal on all ranks; NaN where nothing had weight."""
        result: dict[str, Tensor] = {}
        if self._sums or self._host:
            on_device, on_host = sorted(self._sums), sorted(self._host)
            names = on_device + on_host
            host = torch.tensor(
                [self._host[name] for name in on_host], dtype=torch.float64
            ).reshape(-1, 2)
            device = [self._sums[name].unsqueeze(0) for name in on_device]
            sums = torch.cat([*device, host.to(self.device, non_blocking=True)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            for name, (total, weight) in zip(names, sums, strict=True):
                result[name] = total if self._how.get(name) == "sum" else total / weight
            for name in [name for name in names if name.endswith(_LESS)]:
                result[name.removesuffix(_LESS)] -= result.pop(name)
            result = {name: value.float() for name, value in result.items()}
        if self._maxima:
            names = sorted(self._maxima)
            maxima = torch.cat([self._maxima[name] for name in names])
            if group is not None:
                dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
            for name, value in zip(names, maxima, strict=True):
                value = torch.where(value == -math.inf, math.nan, value).float()
                result[name] = -value if self._how[name] == "min" else value
        return result


class MetricsLog:
    """metrics.jsonl: one JSON object a step, flushed at once so that a killed run keeps its lines.

    NaN and infinities are written as null: they are not JSON. steps: how many the run has done; the
    lines of later ones, which a run that ended abruptly left behind, are dropped; inf: all whole
    lines stay. trackers show the numbers elsewhere too.
    """

    def __init__(self, path: Path, steps: float = 0, trackers: Trackers | None = None) -> None:
        self._trackers = trackers
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if steps and _step_of(line) <= steps]
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in record.items()
        }
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        if self._trackers is not None:
            self._trackers.write(record["step"], {k: v for k, v in clean.items() if k != "step"})

    def close(self) -> None:
        self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def _step_of(line: str) -> float:
    """NaN, which comes before no step, for a line that was cut off or is none of ours."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.nan
