"""Tokens a second of the native engine beside transformers' generate: same prompts, same tokens.

    python benchmarks/generation.py MODEL prompts.jsonl [--prompts 16] [--completions 4]
        [--tokens 64] [--repeats 3]

prompts.jsonl has a column `question` or `prompt`. Greedy, no stop: every completion has all its
tokens, so both do the same work, and every token is compared. Each run is a process of its own, the
arms take turns, one prompt warms up.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness import Arm, facts, interleave

HERE = Path(__file__).resolve()


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1].endswith("job.json"):
        job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        result = {"native": native, "transformers": transformers}[job["arm"]](job)
        Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
        return
    args = parse()
    lines = Path(args.rows).read_text(encoding="utf-8").splitlines()[: args.prompts]
    texts = [row.get("prompt") or row["question"] for row in map(json.loads, lines)]
    job = {"model": args.model, "texts": texts, "n": args.completions, "tokens": args.tokens}
    arms = [
        Arm(name, {**job, "arm": name}, command=(sys.executable, str(HERE)))
        for name in ("native", "transformers")
    ]
    runs = interleave(arms, args.repeats)
    for name, mine in runs.items():
        if mine.failure:
            print(f"{name}: {mine.failure}")
            continue
        rate, spread = mine.median("tokens_per_second"), mine.spread("tokens_per_second")
        cpu = mine.median("tokens_per_cpu_second")
        print(f"{name}: {rate:.1f} tokens/s {spread}, {cpu:.1f} a CPU second")
    ours, theirs = (runs[arm.name].results for arm in arms)
    if ours and theirs:
        same = [a == b for a, b in zip(ours[0]["ids"], theirs[0]["ids"], strict=True)]
        first = runs["native"].median("tokens_per_second") or 0.0
        second = runs["transformers"].median("tokens_per_second") or 1.0
        print(
            f"{first / second:.2f} times as fast; same tokens: {sum(same)} of {len(same)} prompts"
        )
    print(json.dumps(facts()))


def native(job: dict[str, Any]) -> dict[str, Any]:
    from lean_trl.data.tokenizer import load_tokenizer
    from lean_trl.model.loader import load_model
    from lean_trl.rollout.engine import Request, Sampling, generate
    from lean_trl.rollout.native import NativeEngine

    tokenizer = load_tokenizer(job["model"])
    engine = NativeEngine(load_model(job["model"]).eval())
    prompts = [tuple(ids) for ids in tokenizer.encode_batch(job["texts"])]
    greedy = Sampling(temperature=0.0)

    def run(asked: list[tuple[int, ...]], n: int, tokens: int) -> list[list[int]]:
        requests = [
            Request(i, ids, n=n, sampling=greedy, max_tokens=tokens) for i, ids in enumerate(asked)
        ]
        return [list(completion.ids) for completion in generate(engine, requests)]

    run(prompts[:1], 1, 4)
    return timed(lambda: run(prompts, job["n"], job["tokens"]), job)


def transformers(job: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def run(texts: list[str], n: int, tokens: int) -> list[list[int]]:
        inputs = tokenizer(
            [text for text in texts for _ in range(n)], return_tensors="pt", padding=True
        )
        out = model.generate(
            **inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=tokenizer.pad_token_id
        )
        return out[:, inputs["input_ids"].shape[1] :].tolist()

    run(job["texts"][:1], 1, 4)
    return timed(lambda: run(job["texts"], job["n"], job["tokens"]), job)


def timed(run: Any, job: dict[str, Any]) -> dict[str, Any]:
    """ids of the first completion of each prompt: greedy ones are all the same."""
    with torch.no_grad():
        start, cpu = time.perf_counter(), time.process_time()
        ids = run()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    tokens = sum(map(len, ids))
    assert tokens == len(job["texts"]) * job["n"] * job["tokens"]
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu_seconds,
        "ids": ids[:: job["n"]],
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--completions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
