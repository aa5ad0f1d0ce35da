"""Arms that take turns, each in a fresh process, and what is made of their figures.

Protocol: every arm is a process of its own; the arms are interleaved (A B C A B C ...), so that the
machine's mood is shared by all; each run warms up before it measures; a figure is the median of the
repeats, with the least and the most beside it; all arms must show the same losses.

Children wait passively (OMP_WAIT_POLICY=passive): on shared cores, spinning threads would take from
each other what they measure.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


@dataclass(frozen=True)
class Arm:
    """command is run with the paths of a job (JSON) and of the result to write, also JSON."""

    name: str
    job: Mapping[str, Any]
    command: Sequence[str] = (sys.executable, str(ROOT / "benchmarks" / "arm.py"))
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Runs:
    """The results of an arm's repeats, or why there are none."""

    name: str
    results: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None

    def values(self, key: str) -> list[float]:
        return [result[key] for result in self.results if key in result]

    def median(self, key: str) -> float | None:
        values = self.values(key)
        return statistics.median(values) if values else None

    def spread(self, key: str) -> tuple[float, float] | None:
        """(least, most)."""
        values = self.values(key)
        return (min(values), max(values)) if values else None


def interleave(
    arms: Sequence[Arm],
    repeats: int,
    *,
    timeout_s: float = 3600,
    deadline_s: float = math.inf,
    say: Any = None,
) -> dict[str, Runs]:
    """Run every arm once, then again, `repeats` times; an arm that fails is not tried again.

    timeout_s: of one run. deadline_s: of all; nothing is started after it and no run outlasts it.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    runs = {arm.name: Runs(arm.name) for arm in arms}
    assert len(runs) == len(arms), "two arms of one name"
    end = time.monotonic() + deadline_s
    for repeat in range(repeats):
        for arm in arms:
            mine = runs[arm.name]
            if mine.failure is not None:
                continue
            left = min(timeout_s, end - time.monotonic())
            if left <= 0:
                mine.failure = None if mine.results else "not run: no time was left"
                continue
            try:
                mine.results.append(run_once(arm, left))
            except ArmError as error:
                mine.failure = str(error)
            rate, failed = mine.median("tokens_per_second"), mine.failure
            note = failed or ("" if rate is None else f"{rate:.1f} tokens/s")
            say(
                f"repeat {repeat + 1}/{repeats}, {arm.name}: {note} (load {os.getloadavg()[0]:.1f})"
            )
    return runs


class ArmError(RuntimeError):
    """An arm's process failed: the last line that it wrote."""


def run_once(arm: Arm, timeout_s: float) -> dict[str, Any]:
    """One fresh process of the arm. Raises ArmError."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        job.write_text(json.dumps(arm.job), encoding="utf-8")
        command = [*arm.command, str(job), str(result)]
        try:
            done = subprocess.run(
                command,
                env=child_environment(arm.environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise ArmError(f"no result after {timeout_s:.3g} s") from None
        if done.returncode or not result.exists():
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            errors = [line for line in lines if re.search(r"(Error|Exception): ", line)]
            last = [*lines[-1:], *errors[-1:]]  # torchrun says more after the error
            text = last[-1].strip() if last else "no output"
            raise ArmError(f"exit {done.returncode}: {text}")
        return json.loads(result.read_text(encoding="utf-8"))


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This checkout, installed or not; no network; passive waiting."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_WAIT_POLICY": "passive",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }


def loss_difference(runs: Runs, base: Runs) -> float | None:
    """The largest difference of a loss to the base arm's at the same step, relative to it."""
    if not runs.results or not base.results:
        return None
    pairs = zip(runs.results[0]["losses"], base.results[0]["losses"], strict=True)
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)


# -- what it was measured on -----------------------------------------------------------------------


def facts() -> dict[str, str]:
    """Hardware, versions and commit, as a row of RESULTS.md needs them."""
    import torch

    hardware = f"{os.cpu_count()} x {_cpu_name()}, {_memory_gib():.0f} GiB"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}; {hardware}"
    return {
        "hardware": hardware,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "threads": str(torch.get_num_threads()),
        "commit": commit(),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def commit() -> str:
    """The commit of the checkout, with a + when files that it holds were changed since."""
    try:
        head, changed = (
            subprocess.run(
                ["git", "-C", str(ROOT), *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
            ).stdout.strip()
            for command in (
                ("rev-parse", "--short=10", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "lean_trl", "kernels"),
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gib() -> float:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal"):
            return int(line.split()[1]) / 2**20
    return math.nan


def _lines(path: str) -> Iterator[str]:
    try:
        yield from Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return


# -- words -----------------------------------------------------------------------------------------


def size(value: float | None) -> str:
    """Bytes in GiB or MiB.

    >>> size(3 * 2**30), size(5 * 2**19), size(None)
    ('3.00 GiB', '2.5 MiB', '')
    """
    if value is None:
        return ""
    return f"{value / GIB:.2f} GiB" if abs(value) >= GIB else f"{value / 2**20:.1f} MiB"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
