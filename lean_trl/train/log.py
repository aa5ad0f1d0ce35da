"""What a run tells: a line a step in metrics.jsonl, and the progress bar."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lean_trl.train.metrics import MetricsLog
from lean_trl.train.progress import Progress
from lean_trl.types import StepReport


@dataclass(frozen=True)
class _Pending:
    """A step whose numbers are still on the device."""

    step: int
    report: StepReport
    learning_rate: float
    epoch: float
    tokens: int
    known: Mapping[str, float]


class StepLog:
    """Keeps the reports of the last steps on the device and writes them every `every` steps.

    file: None on ranks other than 0, which write nothing. They read the numbers back all the same,
    so that every rank notices a loss that is not finite.
    """

    def __init__(
        self, file: MetricsLog | None, progress: Progress, every: int, device: torch.device
    ) -> None:
        self.file, self.progress, self.every, self.device = file, progress, every, device
        self.num_tokens = 0  # real tokens forwarded over all ranks, all steps
        self.empty_windows = 0  # windows without anything to learn from
        self._pending: list[_Pending] = []
        self._since = time.perf_counter()

    def add(
        self,
        step: int,
        report: StepReport,
        *,
        learning_rate: float,
        epoch: float,
        tokens: int,
        empty: bool,
        known: Mapping[str, float] | None = None,
    ) -> None:
        """Take in one step; tokens: real ones over all ranks; known: more numbers for its line.

        Raises as flush does.
        """
        if empty and not self.empty_windows and self.file is not None:
            print(f"step {step} had nothing to learn from: weights unchanged", file=sys.stderr)
        self.empty_windows += empty
        self._pending.append(_Pending(step, report, learning_rate, epoch, tokens, known or {}))
        if step % self.every == 0:
            self.flush()

    def flush(self) -> None:
        """Write the steps taken in since the last flush; the rate is the mean over them.

        Raises FloatingPointError naming the first step whose loss or gradient norm is not finite:
        the weights are spoilt from there on.
        """
        if not self._pending:
            return
        lines = [(p, _read(p.report)) for p in self._pending]
        now = time.perf_counter()
        rate = sum(p.tokens for p in self._pending) / (now - self._since)
        self._pending, self._since = [], now
        for p, numbers in lines:
            self.num_tokens += p.tokens
            record = {"step": p.step, **numbers, **p.known}
            record |= {"learning_rate": p.learning_rate, "epoch": p.epoch}
            record |= {"num_tokens": self.num_tokens, "tokens_per_second": rate}
            record |= {"peak_memory_bytes": peak_memory_bytes(self.device)}
            record |= allocator_numbers(self.device)
            if self.empty_windows:
                record["windows_without_supervised_tokens"] = self.empty_windows
            if self.file is not None:
                self.file.write(record)
                self.progress.update(p.step, loss=numbers["loss"], tokens_per_second=rate)
        for p, numbers in lines:
            if not (math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])):
                raise FloatingPointError(
                    f"step {p.step}: loss {numbers['loss']}, grad_norm {numbers['grad_norm']}. "
                    f"Lower train.learning_rate (now {p.learning_rate:g}), or look at its rows"
                )

    def state_dict(self) -> dict[str, int]:
        """The counters, after every step that was taken in."""
        self.flush()
        return {"num_tokens": self.num_tokens, "empty_windows": self.empty_windows}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Count on from a checkpoint's counters."""
        self.num_tokens, self.empty_windows = state["num_tokens"], state["empty_windows"]

    def pause(self) -> None:
        """Forget the time since the last flush: something else than training ran."""
        self.flush()
        self._since = time.perf_counter()

    def write_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """A line of its own: {"step": ..., "eval_loss": ...}."""
        if self.file is not None:
            self.file.write({"step": step, **metrics})

    def close(self) -> None:
        self.flush()
        self.progress.close()
        if self.file is not None:
            self.file.close()


def _read(report: StepReport) -> dict[str, float]:
    """One copy from the device for all numbers of a step."""
    names = ["loss", "grad_norm", *sorted(report.metrics)]
    values = torch.stack(
        [report.loss, report.grad_norm, *(report.metrics[name] for name in names[2:])]
    )
    return dict(zip(names, values.tolist(), strict=True))


def allocator_numbers(device: torch.device) -> dict[str, int]:
    """CUDA: bytes that the allocator holds beyond what tensors take, and how often it had to give
    memory back and ask again. Nothing is read from the device.
    """
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    held, taken = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
    retries = stats["num_alloc_retries"]
    return {"fragmentation_bytes": held - taken, "allocator_retries": retries}


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: the most that tensors took (max_memory_allocated). CPU: this process's peak RSS."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
