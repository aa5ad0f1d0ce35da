"""Losses of two runs side by side:  python scripts/compare_loss.py A B [options]

A and B are each a commit (of this repository, run as it was then), a recipe (.yaml, run with the
code as it is now), or a finished run (its output_dir or metrics.jsonl). A refactor keeps every loss
and gradient norm to the last bit:

    python scripts/compare_loss.py main HEAD
    python scripts/compare_loss.py a.yaml b.yaml --tolerance 1e-5 -- --train.max_steps 50

Prints a line a step and ends with 0 when they agree, 1 when they differ, 2 when a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("loss", "grad_norm")


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            runs = [
                read(name, Path(scratch) / side, options)
                for side, name in (("a", options.a), ("b", options.b))
            ]
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            print(error, file=sys.stderr)
            return 2
    return report(*runs, tolerance=options.tolerance)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", help="commit, recipe or finished run")
    parser.add_argument("b", help="commit, recipe or finished run")
    parser.add_argument("--recipe", help="for commits; default: the built-in task")
    parser.add_argument("--steps", type=int, default=20, help="steps of each run [20]")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run [1]")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        help="relative difference allowed [0: the same bits]",
    )
    words = [*sys.argv[1:], "--"]
    arguments, settings = words[: words.index("--")], words[words.index("--") + 1 : -1]
    options = parser.parse_args(arguments)
    options.settings = settings
    return options


def read(name: str, folder: Path, options: argparse.Namespace) -> list[dict]:
    """The steps of a finished run, or of one that is run now in `folder`."""
    path = Path(name)
    if path.is_dir() and (path / "metrics.jsonl").is_file():
        path = path / "metrics.jsonl"
    if path.suffix == ".jsonl":
        return steps_of(path)
    if path.suffix == ".yaml":
        return run(ROOT, path, folder, options)
    code = folder / "code"
    check_out(name, code)
    return run(code, Path(options.recipe) if options.recipe else None, folder, options)


def check_out(commit: str, folder: Path) -> None:
    """The files of a commit. Nothing of the repository itself is touched."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False
    )
    if archive.returncode:
        raise ValueError(f"{commit} is no recipe, run or commit: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")


def run(code: Path, recipe: Path | None, folder: Path, options: argparse.Namespace) -> list[dict]:
    """Train with the code in a folder, deterministically and without leaving anything behind."""
    launcher = [sys.executable]
    if options.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={options.ranks}"]
    command = [*launcher, str(code / "scripts" / "train.py")]
    command += [str(recipe.resolve())] if recipe else []
    command += ["--train.max_steps", str(options.steps), "--train.warmup_steps", "0"]
    command += [
        "--train.deterministic",
        "true",
        "--checkpoint.export_hf",
        "false",
        *options.settings,
    ]
    command += ["--output_dir", str(folder / "out")]
    paths = os.pathsep.join([str(code), str(code / "kernels")])
    print(f"running {' '.join(command)}", file=sys.stderr)
    done = subprocess.run(
        command, cwd=code, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.DEVNULL
    )
    if done.returncode:
        raise ValueError(f"the run in {code} ended with {done.returncode}")
    return steps_of(folder / "out" / "metrics.jsonl")


def steps_of(file: Path) -> list[dict]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


def report(a: list[dict], b: list[dict], *, tolerance: float) -> int:
    """Print both, and the verdict; the exit code."""
    print(f"{'step':>6} {'loss A':>14} {'loss B':>14} {'grad A':>14} {'grad B':>14}")
    differing = []
    for ours, theirs in zip(a, b, strict=False):
        same = all(close(ours[key], theirs[key], tolerance) for key in KEYS)
        numbers = [line[key] for key in KEYS for line in (ours, theirs)]
        shown = " ".join("null".rjust(14) if x is None else f"{x:14.9g}" for x in numbers)
        print(f"{ours['step']:>6} {shown}{'' if same else '  differ'}")
        if not same:
            differing.append(ours["step"])
    allowed = f"within {tolerance:g}" if tolerance else "bit for bit"
    if len(a) != len(b) or not a:
        print(f"A has {len(a)} steps, B {len(b)}")
        return 1
    if differing:
        print(f"{len(differing)} of {len(a)} steps differ ({allowed}), the first is {differing[0]}")
        return 1
    print(f"all {len(a)} steps agree {allowed}")
    return 0


def close(a: float | None, b: float | None, tolerance: float) -> bool:
    """null is a number that was not finite."""
    if a is None or b is None:
        return a is b
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


if __name__ == "__main__":
    sys.exit(main())
