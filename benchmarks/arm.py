"""One arm of a benchmark: a training run in a process of its own. benchmarks/harness.py starts it.

    python benchmarks/arm.py job.json result.json

The run is set up by the loop that trains (settings, rows, model, reference, techniques, optimizer).
After the warm-up each step is timed, data and reference included; then the steps' bare matrix
products are timed alone. Then the largest window is run twice more, with the peak tracker and with
hooks on what the graph saves, which cost time and so have steps of their own.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ceiling import Seconds, flops, seconds_of, step_products, wait
from peak import PeakTracker, saved_bytes

from lean_trl.config import Config, config_from_dict
from lean_trl.data.plan import Window
from lean_trl.rollout.feed import RolloutFeed
from lean_trl.techniques.apply import before_cuda
from lean_trl.techniques.shard import DTYPES
from lean_trl.train.distributed import World, join_world
from lean_trl.train.score import referenced
from lean_trl.train.setup import Run, set_up
from lean_trl.train.step import train_step

# Dense bf16 rate of a device, operations/s, from its data sheet.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}


def main() -> None:
    job_file, result_file = sys.argv[1:]
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    config = config_from_dict(job["config"])
    before_cuda(config)
    with join_world(config.distributed.timeout_s) as world:
        config = replace(
            config,
            output_dir=str(Path(result_file).parent / "run"),  # the same for all ranks
            data=replace(config.data, eval_path=None, eval_split=None),
            train=replace(
                config.train,
                max_steps=job["warm_up"] + job["steps"],
                warmup_steps=0,
                eval_every=None,
            ),
            checkpoint=replace(config.checkpoint, resume="never"),
        )
        result = measure(config, world, job)
        if world.is_main:
            Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def measure(config: Config, world: World, job: dict[str, Any]) -> dict[str, Any]:
    """Everything that is measured of one arm; sizes in bytes, the most of any rank."""
    device = world.device
    free_before = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    run = set_up(config, world)
    run.model.train()
    steps, windows = timed_steps(run, job)
    memory = {"peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device.type == "cuda":
        memory |= cuda_memory(device, free_before)
    if job.get("ceiling", True):
        add_ceiling(run, windows, steps)
    result = speed(steps, device)
    if job.get("instrument", True):
        largest = max(windows, key=_tokens)
        memory |= instrumented(run, largest, job.get("snapshot"), result)
    memory["parameters"] = sum(p.numel() for p in run.model.parameters())
    return result | worst(memory, world)


def worst(sizes: dict[str, Any], world: World) -> dict[str, Any]:
    """The figures of the rank that took most."""
    if world.group is None:
        return sizes
    ranks: list[dict[str, Any]] = [{} for _ in range(world.size)]
    dist.all_gather_object(ranks, sizes, group=world.group)
    return max(ranks, key=lambda sizes: sizes.get("peak_live", sizes["peak_rss"]))


def timed_steps(run: Run, job: dict[str, Any]) -> tuple[list[dict[str, float]], list[Window]]:
    """A record of each step, and its window; totals stand in those after the warm-up."""
    device = run.world.device
    steps: list[dict[str, float]] = []
    windows: list[Window] = []
    online = isinstance(run.train_feed, RolloutFeed)  # it asks the reference by itself
    feed = iter(referenced(run.train_feed, None if online else run.reference))
    for number in range(job["warm_up"] + job["steps"]):
        if number == job["warm_up"] and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        wait(device)
        start = Seconds.now()
        window = next(feed)
        report = step(run, window)
        loss = report.loss.item()
        if isinstance(run.train_feed, RolloutFeed):
            run.train_feed.after_step(report)
        wait(device)
        seconds = Seconds.now().since(start)
        record = {"loss": loss, "seconds": seconds.wall, "cpu_seconds": seconds.cpu}
        if number >= job["warm_up"]:
            for name in ("processed", "tokens"):
                record[name] = window.totals[name]
            record |= flops(run.model, window.batches)
        steps.append(record)
        windows.append(window)
    return steps, windows


def add_ceiling(run: Run, windows: list[Window], steps: list[dict[str, float]]) -> None:
    """Time the bare products of the timed steps, after the steps: their matrices would otherwise
    be in the peak RSS."""
    device, config = run.world.device, run.config
    for record, window in zip(steps, windows, strict=True):
        if "processed" in record:
            products = step_products(
                run.model,
                window.batches,
                forwards=2 if config.memory.activation_checkpointing else 1,
                reference=run.reference is not None,
            )
            bare = seconds_of(products, device, DTYPES[config.model.dtype])
            record |= {"ceiling_seconds": bare.wall, "ceiling_cpu_seconds": bare.cpu}


def step(run: Run, window: Window) -> Any:
    """What the loop does with a window, at the peak learning rate."""
    return train_step(
        run.model,
        window.batches,
        run.method,
        run.optimizer,
        totals=window.totals,
        max_grad_norm=run.config.train.max_grad_norm,
        around=run.around,
        group=run.world.group,
    )


def speed(steps: list[dict[str, float]], device: torch.device) -> dict[str, Any]:
    """Rates over the timed steps, of all ranks together."""
    timed = [record for record in steps if "processed" in record]
    seconds = sum(record["seconds"] for record in timed)
    total = {name: sum(r[name] for r in timed) for name in timed[0]}
    result: dict[str, Any] = {
        "losses": [record["loss"] for record in steps],
        "step_seconds": seconds / len(timed),
        "tokens_per_second": total["processed"] / seconds,
        "supervised_per_second": total["tokens"] / seconds,
        "processed": total["processed"],
        "flops_palm": total["palm"] / seconds,
        "flops_needed": total["needed"] / seconds,
    }
    if "ceiling_seconds" in total:
        result["ceiling"] = total["processed"] / total["ceiling_seconds"]
        result["share_of_ceiling"] = total["ceiling_seconds"] / seconds
    if device.type == "cpu":
        result["tokens_per_cpu_second"] = total["processed"] / total["cpu_seconds"]
        if "ceiling_seconds" in total:
            result["share_of_ceiling_cpu"] = total["ceiling_cpu_seconds"] / total["cpu_seconds"]
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = next((rate for key, rate in PEAK_FLOPS.items() if key in name), None)
        if peak is not None:
            result["mfu_palm"] = result["flops_palm"] / peak
            result["mfu_needed"] = result["flops_needed"] / peak
    return result


def cuda_memory(device: torch.device, free_before: int) -> dict[str, int]:
    """The caching allocator's figures since the warm-up, and what the driver says is gone."""
    stats = torch.cuda.memory_stats(device)
    return {
        "cuda_allocated": torch.cuda.max_memory_allocated(device),
        "cuda_reserved": torch.cuda.max_memory_reserved(device),
        "cuda_driver": free_before - torch.cuda.mem_get_info(device)[0],
        "cuda_alloc_retries": stats["num_alloc_retries"],
        "pinned": torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0),
    }


def instrumented(
    run: Run, window: Window, snapshot: str | None, result: dict[str, Any]
) -> dict[str, Any]:
    """Two more steps over the largest window: what the graph saves, then who holds the peak."""
    with saved_bytes() as saved:
        step(run, window)
    tracker = PeakTracker(run.model, run.world.device.type)
    tracker.hold("parameters", run.model.named_parameters())
    tracker.hold("parameters", run.model.named_buffers())
    if run.reference is not None:
        tracker.hold("reference", run.reference.named_parameters())
    tracker.hold("optimizer", optimizer_state(run))
    if snapshot and run.world.device.type == "cuda":
        torch.cuda.memory._record_memory_history()
    with tracker, tracker.gradients_of(run.optimizer, run.model):
        step(run, window)
    if snapshot and run.world.device.type == "cuda":
        torch.cuda.memory._dump_snapshot(snapshot)
        torch.cuda.memory._record_memory_history(enabled=None)
    result["largest"] = [asdict(holder) for holder in tracker.largest()]
    return {
        "peak_live": tracker.peak,
        "saved_for_backward": sum(saved),
        "breakdown": tracker.breakdown(),
    }


def optimizer_state(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    for state in run.optimizer.state.values():
        yield from ((name, item) for name, item in state.items() if isinstance(item, torch.Tensor))


def _tokens(window: Window) -> int:
    return max(batch.num_tokens for batch in window.batches)


if __name__ == "__main__":
    main()
