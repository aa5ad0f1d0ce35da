"""What preparing data costs.

python benchmarks/data_prep.py ROWS.jsonl TOKENIZER [--question question --answer answer]
    CPU seconds to prepare the rows as text, prompt-completion and chat, over those of one
    encode_batch of the same texts.
python benchmarks/data_prep.py --stream 4 TOKENIZER
    Trains on nothing, but streams a jsonl of that many GiB (made beside the cache, then removed):
    peak memory, rows a second, and the time to the first window when resuming in its middle.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lean_trl.config import Config, DataConfig, TrainConfig
from lean_trl.data.drafts import Reading
from lean_trl.data.feed import open_feeds
from lean_trl.data.prepare import prepare
from lean_trl.data.sources import Source
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Of all threads of this process."""
    start = time.process_time()
    work()
    return time.process_time() - start


def shapes(question: str, answer: str) -> dict[str, dict[str, Any]]:
    """The same rows as three formats."""
    q, a = "{" + question + "}", "{" + answer + "}"
    turns = [{"role": "user", "content": q}, {"role": "assistant", "content": a}]
    return {
        "text": {"columns": {"text": f"{q}\n{a}"}},
        "prompt-completion": {"columns": {"prompt": f"{q}\n", "completion": a}},
        "chat": {"columns": {"messages": turns}},
        "chat, assistant only": {"columns": {"messages": turns}, "assistant_only_loss": True},
    }


def texts_of(file: Path, options: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    """What prepare() encodes, written by the simplest code."""
    rows = [json.loads(line) for line in open(file, encoding="utf-8")]

    def fill(template: str, row: dict[str, Any]) -> str:
        for name, value in row.items():
            template = template.replace("{" + name + "}", str(value))
        return template

    columns = options["columns"]
    if "messages" in columns:
        chats = [
            [{**m, "content": fill(m["content"], row)} for m in columns["messages"]] for row in rows
        ]
        return [tokenizer.render_chat(chat) for chat in chats]
    return [fill("".join(columns.values()), row) for row in rows]


def compare(file: Path, tokenizer: Tokenizer, question: str, answer: str, repeats: int) -> None:
    """Print the table."""
    print(
        f"{'rows as':22} {'encode_batch':>12} {'prepare':>9} {'ratio':>6}   (CPU s, median of "
        f"{repeats})"
    )
    for name, options in shapes(question, answer).items():
        texts = texts_of(file, options, tokenizer)
        reading = Reading("sft", **options)
        base, ours = [], []
        for _ in range(repeats):  # in turns: other work on the machine disturbs both alike
            base.append(cpu_seconds(partial(tokenizer.backend.encode_batch, texts)))
            with tempfile.TemporaryDirectory() as cache:
                arguments = ([Source("rows", (file,))], reading, tokenizer, Path(cache))
                ours.append(cpu_seconds(partial(prepare, *arguments, progress=False)))
        least, mine = min(base), min(ours)
        print(f"{name:22} {least:12.2f} {mine:9.2f} {mine / least:6.2f}")


def write_rows(file: Path, gib: float) -> None:
    """Rows of about 2 kB of words."""
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 9, 5000)]
    lines = [json.dumps({"text": " ".join(rng.choice(words, 350))}) + "\n" for _ in range(2000)]
    block = "".join(lines).encode()
    with open(file, "wb") as out:
        while out.tell() < gib * 2**30:
            out.write(block)


def stream(file: Path, tokenizer: Tokenizer, state: dict[str, Any] | None, windows: int) -> None:
    """Take some windows and print what it cost; runs in a process of its own."""
    config = Config(
        data=DataConfig(path=str(file), streaming=True),
        train=TrainConfig(batch_size=64, micro_batch_size=8, max_steps=10**9),
    )
    start = time.perf_counter()
    feed, _, _ = open_feeds(config, tokenizer, "sft")
    if state is not None:
        feed.load_state_dict(state)
    taken = iter(feed)
    next(taken)
    first = time.perf_counter() - start
    for _ in range(windows - 1):
        next(taken)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        json.dumps(
            {
                "first_window_s": round(first, 2),
                "rows_per_s": round(64 * windows / seconds),
                "peak_rss_mb": round(peak),
                "state": feed.state_dict(),
            }
        )
    )


def stream_benchmark(gib: float, tokenizer_path: str) -> None:
    """A fresh process from the start, then one that resumes in the middle."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, gib)
        middle = file.stat().st_size // 2
        with open(file, "rb") as lines:
            lines.seek(middle)
            middle += len(lines.readline())
        state = {
            "done": 100,
            "epoch": 0,
            "block": {"file": 0, "byte": middle, "row": 10**6},
            "used": 0,
        }
        for name, given in (("start", None), ("resumed in the middle", state)):
            command = [
                sys.executable,
                __file__,
                "--worker",
                str(file),
                json.dumps(given),
                tokenizer_path,
            ]
            result = subprocess.run(
                command, check=True, capture_output=True, text=True, env=os.environ
            )
            print(f"{gib} GiB, {name}: {result.stdout.strip()}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", nargs="?")
    parser.add_argument("tokenizer")
    parser.add_argument("--question", default="question")
    parser.add_argument("--answer", default="answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stream", type=float, metavar="GIB")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        stream(
            Path(args.worker[0]), load_tokenizer(args.tokenizer), json.loads(args.worker[1]), 200
        )
    elif args.stream:
        stream_benchmark(args.stream, args.tokenizer)
    else:
        compare(
            Path(args.rows),
            load_tokenizer(args.tokenizer),
            args.question,
            args.answer,
            args.repeats,
        )


if __name__ == "__main__":
    main()
