"""lean_trl against TRL: same rows, same weights, same optimizer, same losses.

    python benchmarks/peers.py --model FOLDER --rows gsm8k.jsonl --what sft,import,prepare,pack
    python benchmarks/peers.py --model FOLDER --rows preference.jsonl --what dpo,reward

TRL lives in an environment of its own, made by `--make` (needs the package index) or given by
--python. Every arm is a fresh process, arms are interleaved; both sides run AdamW (torch's fused
one) at a constant rate, fp32, clipped to a norm of 1, rows in file order, everything else at its
default. Rows where we lose stay in.

--rows: GSM8K's columns question and answer, asked and answered as a conversation; or prompt,
chosen, rejected.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    ROOT,
    Arm,
    Runs,
    child_environment,
    facts,
    interleave,
    loss_difference,
    markdown,
    size,
)
from results import Row, save_rows

PEERS = ["trl==1.16.0", "transformers==5.24.0", "datasets", "accelerate", "peft"]
VENV = ROOT / ".venv-peers"
OURS = (sys.executable, str(ROOT / "benchmarks" / "arm.py"))
OURS_OTHER = (sys.executable, str(ROOT / "benchmarks" / "our_data.py"))
THEIRS_SCRIPT = str(ROOT / "benchmarks" / "peer_trl.py")
RATES = {"sft": 2e-5, "dpo": 1e-6, "reward": 1e-5}
LOSS_TOLERANCE = 1e-3


def main() -> None:
    options = arguments()
    if options.make:
        make_environment()
    peer = options.python or str(VENV / "bin" / "python")
    if not Path(peer).exists():
        raise SystemExit(f"{peer} does not exist: make the environment with --make")
    about = facts() | {"command": command_in_words(sys.argv[1:])}
    about["peer"] = peer_versions(peer)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for what in options.what.split(","):
            print(f"## {what}\n", file=sys.stderr)
            rows += WHAT[what](options, peer, Path(folder))
    print(markdown(["figure", "lean_trl", "TRL", "ratio"], [row[:4] for row in rows]))
    out = ROOT / "benchmarks" / "out" / "peers"
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"{options.what.replace(',', '_')}.json"
    save_rows(rows, about, file)
    print(f"python benchmarks/results.py {file.relative_to(ROOT)}   # puts them into RESULTS.md")


def command_in_words(arguments: list[str]) -> str:
    """The command without the folders of this machine; an environment of TRL is made by --make."""
    words = [Path(word).name if "/" in word else word for word in arguments]
    if "--python" in words:
        at = words.index("--python")
        words[at : at + 2] = ["--make"]
    return shlex.join(["python", "benchmarks/peers.py", *words])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", default="sft,import,prepare,pack", help=", ".join(WHAT))
    parser.add_argument("--model", help="folder of the weights")
    parser.add_argument("--rows", help="rows as jsonl")
    parser.add_argument("--python", help="a Python that has TRL [.venv-peers/bin/python]")
    parser.add_argument("--make", action="store_true", help="make .venv-peers first")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds of each what")
    return parser.parse_args()


def make_environment() -> None:
    """.venv-peers with TRL and the torch that we run on."""
    import torch

    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={torch.__version__.partition('+')[0]}", *PEERS], check=True)


def peer_versions(peer: str) -> str:
    """TRL's version and those of what it runs on."""
    code = (
        "from importlib.metadata import version as v;"
        "print(', '.join(f'{n} {v(n)}' for n in ('trl', 'transformers', 'torch')))"
    )
    return subprocess.run(
        [peer, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


# -- training --------------------------------------------------------------------------------------


def conversations(path: str, count: int | None, out: Path) -> Path:
    """The first rows as both sides read them."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:count]
    if "question" in rows[0]:
        rows = [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["answer"]}],
            }
            for row in rows
        ]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return out


def repeat_longest(rows: Path, window: int) -> None:
    """One more window with the rows of the longest: TRL's peak of live tensors is measured there,
    ours in the longest itself."""
    lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
    windows = ["".join(lines[i : i + window]) for i in range(0, len(lines), window)]
    rows.write_text("".join([*lines, max(windows, key=len)]), encoding="utf-8")


def training(method: str) -> Callable[[argparse.Namespace, str, Path], list[Row]]:
    def run(options: argparse.Namespace, peer: str, folder: Path) -> list[Row]:
        if not (options.model and options.rows):
            raise SystemExit(f"{method} needs --model and --rows")
        windows = options.steps + options.warm_up
        rows = conversations(
            options.rows, options.micro_batch_size * windows, folder / f"{method}.jsonl"
        )
        repeat_longest(rows, options.micro_batch_size)
        arms = list(training_arms(method, options, peer, folder, rows))
        runs = interleave(arms, options.repeats, deadline_s=options.deadline)
        for arm in runs.values():
            if arm.failure:
                print(f"{arm.name} failed: {arm.failure}", file=sys.stderr)
        return training_rows(method, options, runs)

    return run


def training_arms(method, options, peer, folder, rows):
    """With and without checkpointing on both sides, and ours with one row a micro-batch."""
    window = options.micro_batch_size
    for checkpointing in (True, False):
        name = "checkpointing" if checkpointing else "plain"
        shared = {"warm_up": options.warm_up, "steps": options.steps}
        tree: dict[str, Any] = {
            "method": method,
            "model": {"path": options.model},
            "data": {
                "path": str(rows),
                "shuffle": False,
                "max_length": options.max_length,
                "cache_dir": str(folder),
            },
            "train": {
                "batch_size": window,
                "micro_batch_size": window,
                "learning_rate": RATES[method],
                "lr_scheduler": "constant",
            },
            "memory": {"activation_checkpointing": checkpointing},
        }
        yield Arm(f"ours, {name}", {"config": tree, **shared}, OURS)
        theirs = {
            "what": "train",
            "method": method,
            "model": options.model,
            "rows": str(rows),
            "folder": str(folder),
            "micro_batch_size": window,
            "max_length": options.max_length,
            "learning_rate": RATES[method],
            "checkpointing": checkpointing,
        }
        yield Arm(f"TRL, {name}", theirs | shared, (peer, THEIRS_SCRIPT))
    small = {**tree, "train": {**tree["train"], "micro_batch_size": 1}}
    yield Arm("ours, plain, one row a micro-batch", {"config": small, **shared}, OURS)


def training_rows(method: str, options: argparse.Namespace, runs: dict[str, Runs]) -> list[Row]:
    """Speed and memory of each pair of arms, and how far the losses are apart."""
    rows = []
    where = f"{method.upper()}, {options.micro_batch_size} rows a step"
    pairs = [(f"ours, {name}", f"TRL, {name}", name) for name in ("checkpointing", "plain")]
    pairs.append(("ours, plain, one row a micro-batch", "TRL, plain", "plain, ours row by row"))
    for ours, theirs, name in pairs:
        a, b = runs[ours], runs[theirs]
        if not a.results or not b.results:
            rows.append(Row(f"{where}, {name}", a.failure or "ran", b.failure or "ran", ""))
            continue
        for key, label, words in FIGURES:
            rows.append(compared(f"{where}, {name}: {label}", a, b, key, words))
        rows.append(Row(f"{where}, {name}: first loss", *first_losses(a, b), same_work(a, b)))
        low, high = a.spread("share_of_ceiling_cpu") or (0, 0)
        share = f"{a.median('share_of_ceiling_cpu'):.0%} ({low:.0%} to {high:.0%})"
        rows.append(Row(f"{where}, {name}: share of our matmul ceiling, CPU time", share, ""))
    return rows


def first_losses(*arms: Runs) -> list[str]:
    return [f"{arm.results[0]['losses'][0]:.5f}" for arm in arms]


def same_work(ours: Runs, theirs: Runs) -> str:
    """Whether both saw the same tokens and showed the same losses, with the largest difference."""
    difference = loss_difference(ours, theirs)
    assert difference is not None
    tokens = [arm.results[0]["processed"] for arm in (ours, theirs)]
    same = difference <= LOSS_TOLERANCE and tokens[0] == tokens[1]
    verdict = "same work" if same else f"NOT THE SAME WORK, {tokens[0]} and {tokens[1]} tokens"
    return f"{verdict}, losses within {difference:.0e}"


def compared(figure: str, ours: Runs, theirs: Runs, key: str, words: Callable) -> Row:
    """Medians with their spread, and the ratio of the medians."""
    a, b = ours.median(key), theirs.median(key)
    assert a is not None and b is not None

    def shown(runs: Runs) -> str:
        low, high = runs.spread(key) or (0, 0)
        return f"{words(runs.median(key))} ({words(low)} to {words(high)})"

    return Row(figure, shown(ours), shown(theirs), ratio(a / b))


def ratio(value: float) -> str:
    """Two digits behind the point, or two that count: 1.74x, 0.013x."""
    return f"{value:.2f}x" if value >= 0.1 else f"{value:.2g}x"


def seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def rate(value: float) -> str:
    return f"{value:.1f}"


# -- importing, preparing, packing -----------------------------------------------------------------


def importing(options: argparse.Namespace, peer: str, folder: Path) -> list[Row]:
    """From a fresh interpreter to a trainer that could be called."""
    statements = {
        "ours": [sys.executable, "-c", "from lean_trl.train.loop import train"],
        "TRL": [peer, "-c", "from trl import SFTTrainer"],
        "torch": [sys.executable, "-c", "import torch"],
    }
    runs = {name: Runs(name) for name in statements}
    for repeat in range(options.repeats + 1):
        for name, command in statements.items():
            start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, env=child_environment(), stdout=subprocess.DEVNULL)
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
            if repeat:  # the first reads the disk
                taken = {"seconds": time.perf_counter() - start, "cpu_seconds": cpu}
                runs[name].results.append(taken)
    rows = []
    for key, kind in (("cpu_seconds", "CPU"), ("seconds", "wall")):
        row = compared(f"import of the trainer, {kind}", runs["ours"], runs["TRL"], key, seconds)
        rows += [row, Row(f"import of torch alone, {kind}", seconds(runs["torch"].median(key)), "")]
    return rows


def preparing(options: argparse.Namespace, peer: str, folder: Path) -> list[Row]:
    """All rows of the file, tokenised and masked."""
    rows = conversations(options.rows, None, folder / "all.jsonl")
    shared = {"what": "prepare", "method": "sft", "model": options.model, "rows": str(rows)}
    shared |= {"folder": str(folder), "max_length": options.max_length, "warm_up": 0, "steps": 1}
    shared |= {"micro_batch_size": 4, "learning_rate": 1e-5, "checkpointing": False}
    return data_rows("preparing the rows", shared, options, peer)


def packing(options: argparse.Namespace, peer: str, folder: Path) -> list[Row]:
    """1 M lengths, mean 100 (gamma), into bins of 2048."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.gamma(2.0, 50.0, 1_000_000), 1, 2048).astype(np.int64)
    np.save(folder / "lengths.npy", lengths)
    job = {"what": "pack", "lengths": str(folder / "lengths.npy"), "max_length": 2048}
    return data_rows("packing 1 M lengths (bfd)", job, options, peer)


def data_rows(figure: str, job: dict, options: argparse.Namespace, peer: str) -> list[Row]:
    """CPU and wall seconds of a piece of work that both sides do."""
    arms = [Arm("ours", job, OURS_OTHER), Arm("TRL", job, (peer, THEIRS_SCRIPT))]
    runs = interleave(arms, options.repeats, deadline_s=options.deadline)
    ours, theirs = runs["ours"], runs["TRL"]
    if not ours.results or not theirs.results:
        return [Row(figure, ours.failure or "ran", theirs.failure or "ran", "")]
    rows = [compared(f"{figure}, CPU", ours, theirs, "cpu_seconds", seconds)]
    rows.append(compared(f"{figure}, wall", ours, theirs, "seconds", seconds))
    if "bins" in ours.results[0]:
        rows.append(compared(f"{figure}, bins", ours, theirs, "bins", lambda n: f"{n:.0f}"))
    return rows


FIGURES = (
    ("tokens_per_second", "tokens/s", rate),
    ("tokens_per_cpu_second", "tokens per CPU second", rate),
    ("peak_rss", "peak RSS", size),
    ("peak_live", "peak of live tensors", size),
)
WHAT: dict[str, Callable[[argparse.Namespace, str, Path], list[Row]]] = {
    "sft": training("sft"),
    "dpo": training("dpo"),
    "reward": training("reward"),
    "import": importing,
    "prepare": preparing,
    "pack": packing,
}

if __name__ == "__main__":
    main()
