"""GRPO on replayed completions in TRL, run by the Python of its environment.

python benchmarks/peer_trl_grpo.py job.json result.json        (benchmarks/grpo.py starts it)
"""

import json
import resource
import sys
import time
from pathlib import Path

del sys.path[0]  # this folder's modules are not the peer's


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    Path(result_file).write_text(json.dumps(train(job)), encoding="utf-8")


def train(job):
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    lines = Path(job["rollouts"]).read_text(encoding="utf-8").splitlines()
    rollouts = [json.loads(line) for line in lines]
    each, count = job["generations"], job["warm_up"] + job["steps"]
    ends, said = [], iter(rollouts)

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            ends.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, args, state, control, **_):
            ends.append((time.perf_counter(), time.process_time()))

    def replay(prompts, *_, **__):
        rows = [next(said) for _ in prompts]
        return {
            "prompt_ids": [row["prompt_ids"] for row in rows],
            "completion_ids": [row["completion_ids"] for row in rows],
            "logprobs": [[0.0] * len(row["completion_ids"]) for row in rows],
            "value": [row["value"] for row in rows],
        }

    def value(value, **_):
        return value

    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=value,
        args=GRPOConfig(
            output_dir=job["folder"],
            max_steps=count,
            per_device_train_batch_size=each,
            gradient_accumulation_steps=1,
            num_generations=each,
            max_completion_length=job["max_completion_length"],
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32"},
        ),
        # The text does not matter: ids come from the file.
        train_dataset=Dataset.from_list([{"prompt": f"prompt {i}"} for i in range(count)]),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        rollout_func=replay,
        callbacks=[Watch()],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    timed = rollouts[job["warm_up"] * each :]
    tokens = sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in timed)
    (wall, cpu) = (b - a for a, b in zip(ends[job["warm_up"]], ends[-1], strict=True))
    return {
        "losses": [entry["loss"] for entry in logs],
        "tokens_per_second": tokens / wall,
        "tokens_per_cpu_second": tokens / cpu,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
