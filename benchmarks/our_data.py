"""Our side of the data rows of benchmarks/peers.py: python benchmarks/our_data.py job result."""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lean_trl.config import DataConfig, ModelConfig
from lean_trl.data.feed import reading
from lean_trl.data.packing import pack
from lean_trl.data.prepare import prepare
from lean_trl.data.sources import resolve_sources
from lean_trl.data.tokenizer import load_tokenizer


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result = {"prepare": prepare_rows, "pack": pack_lengths}[job["what"]](job)
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def prepare_rows(job: dict) -> dict:
    """Rows to token ids and masks in the store that training reads."""
    tokenizer = load_tokenizer(ModelConfig(path=job["model"]))
    data = DataConfig(path=job["rows"], max_length=job["max_length"])
    with tempfile.TemporaryDirectory() as cache:
        cpu, wall = time.process_time(), time.perf_counter()
        sources = resolve_sources(data.path, data.split, data.revision, "sft")
        prepare(sources, reading(data, "sft"), tokenizer, Path(cache))
        return {
            "cpu_seconds": time.process_time() - cpu,
            "seconds": time.perf_counter() - wall,
        }


def pack_lengths(job: dict) -> dict:
    lengths = np.load(job["lengths"])
    cpu, wall = time.process_time(), time.perf_counter()
    packed = pack(lengths, job["max_length"], "bfd")
    return {
        "cpu_seconds": time.process_time() - cpu,
        "seconds": time.perf_counter() - wall,
        "bins": len(packed.bins),
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
