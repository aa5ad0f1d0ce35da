"""One arm of TRL, run by the Python of the peers' environment. benchmarks/peers.py starts it.

    python benchmarks/peer_trl.py job.json result.json

job["what"] says which: train, prepare or pack. Losses, rates and memory are measured where
benchmarks/arm.py measures them: after a warm-up, data included, and the peak of live tensors in one
more step over the window with the most tokens.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
from peak import PeakTracker

del sys.path[0]  # this folder's modules are not the peers'


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result = {"train": train, "prepare": prepare, "pack": pack}[job["what"]](job)
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def read_rows(path):
    from datasets import Dataset

    with open(path, encoding="utf-8") as lines:
        return Dataset.from_list([json.loads(line) for line in lines])


def make_trainer(job, rows, **more):
    """The trainer of the method with the settings that our arm has, everything else by default."""
    import trl
    from transformers import AutoTokenizer

    name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward"}[job["method"]]
    steps = job["warm_up"] + job["steps"] + 1
    settings = {
        "output_dir": job["folder"],
        "max_steps": steps,
        "per_device_train_batch_size": job["micro_batch_size"],
        "gradient_accumulation_steps": 1,
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "max_length": job["max_length"],
        "gradient_checkpointing": job["checkpointing"],
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "disable_tqdm": True,
        "seed": 0,
    }
    config = getattr(trl, f"{name}Config")
    if job["method"] != "reward":
        # fp32 weights, as ours. A reward model is loaded by the trainer in its own default, fp32.
        settings["model_init_kwargs"] = {"dtype": "float32"}
    trainer = getattr(trl, f"{name}Trainer")
    return trainer(
        model=job["model"],
        args=config(**settings),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        **more,
    )


def train(job):
    """Rates and memory of a run; the tracker watches the last step, which is not timed."""
    from transformers import TrainerCallback

    ends, peaks = [], []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            ends.append((time.perf_counter(), time.process_time()))

        def on_step_begin(self, args, state, control, **_):
            if state.global_step != state.max_steps - 1:
                return
            peaks.append(peak_rss())
            self.tracker = PeakTracker(model)
            self.tracker.hold("parameters", model.named_parameters())
            states = (t for state in optimizer().state.values() for t in state.items())
            self.tracker.hold("optimizer", ((n, t) for n, t in states if torch.is_tensor(t)))
            if reference is not None:
                self.tracker.hold("reference", reference.named_parameters())
            self.tracker.__enter__()

        def on_step_end(self, args, state, control, **_):
            ends.append((time.perf_counter(), time.process_time()))
            if state.global_step == state.max_steps:
                self.tracker.__exit__(None, None, None)

    watch = Watch()
    trainer = make_trainer(job, read_rows(job["rows"]), callbacks=[watch])
    model = trainer.model
    reference = vars(trainer).get("ref_model")

    def optimizer():
        return getattr(trainer.optimizer, "optimizer", trainer.optimizer)

    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    first, last = job["warm_up"], job["warm_up"] + job["steps"]
    seconds, cpu_seconds = (b - a for a, b in zip(ends[first], ends[last], strict=True))
    tokens = [0, *(entry["num_tokens"] for entry in logs)]
    return {
        "losses": [entry["loss"] for entry in logs[:last]],
        "step_seconds": seconds / job["steps"],
        "tokens_per_second": (tokens[last] - tokens[first]) / seconds,
        "tokens_per_cpu_second": (tokens[last] - tokens[first]) / cpu_seconds,
        "processed": tokens[last] - tokens[first],
        "peak_rss": peaks[0],
        "peak_live": watch.tracker.peak,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def prepare(job):
    """Seconds that the trainer's constructor takes for the rows, over those for eight of them."""
    rows = read_rows(job["rows"])
    taken = {}
    for count in (8, len(rows)):
        cpu, wall = time.process_time(), time.perf_counter()
        make_trainer(job, rows.select(range(count)))
        taken[count] = (time.process_time() - cpu, time.perf_counter() - wall)
    few, all_rows = taken[8], taken[len(rows)]
    return {"cpu_seconds": all_rows[0] - few[0], "seconds": all_rows[1] - few[1]}


def pack(job):
    """pack_dataset over rows of the given lengths, as the trainer calls it."""
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset
    from trl import pack_dataset

    lengths = np.load(job["lengths"])
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = pa.LargeListArray.from_arrays(bounds, np.zeros(bounds[-1], np.int32))
    rows = Dataset(pa.table({"input_ids": ids}))
    cpu, wall = time.process_time(), time.perf_counter()
    packed = pack_dataset(rows, job["max_length"], strategy="bfd")
    return {
        "cpu_seconds": time.process_time() - cpu,
        "seconds": time.perf_counter() - wall,
        "bins": len(packed),
        "peak_rss": peak_rss(),
    }


def peak_rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
