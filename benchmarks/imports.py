"""What importing costs, over importing torch alone; and how long `scripts/train.py --help` takes.

    python benchmarks/imports.py

Each number is the least of several fresh interpreters, start of Python included: other work on the
machine only ever adds. Statements take turns, so that it disturbs them all alike.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STATEMENTS = ("import torch", "import lean_trl", "import lean_trl.losses", "import lean_trl.ops")
REPEATS = 9
# This checkout, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}


def seconds(statement: str, repeats: int = REPEATS) -> float:
    """Least wall time of a fresh interpreter that runs the statement."""
    return min(_once([sys.executable, "-c", statement]) for _ in range(repeats))


def _once(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return time.perf_counter() - start


def main() -> None:
    commands = {text: [sys.executable, "-c", text] for text in STATEMENTS}
    commands["scripts/train.py --help"] = [sys.executable, str(ROOT / "scripts/train.py"), "--help"]
    for command in commands.values():  # the first run reads the disk
        _once(command)
    runs = [{name: _once(command) for name, command in commands.items()} for _ in range(REPEATS)]
    print(f"python {platform.python_version()}, {platform.machine()}, least of {REPEATS}")
    base = min(run["import torch"] for run in runs)
    for name in commands:
        taken = min(run[name] for run in runs)
        print(f"{name:28} {taken:6.2f} s   {taken / base:5.2f}x import torch")


if __name__ == "__main__":
    main()
