"""From settings to a trained model on disk: the one loop that every method runs through.

    set_up   everything that can fail cheaply (settings, tokenizer, rows) first, then the model
    fit      windows -> train_step -> metrics.jsonl, evaluation
    export   model/ in the layout that transformers and vLLM load

Run it with `torchrun scripts/train.py recipe.yaml`.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lean_trl import builtin
from lean_trl.config import Config, save_config
from lean_trl.data.feed import Feed, open_feeds
from lean_trl.data.hub import resolve_model
from lean_trl.data.stream import StreamFeed
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer
from lean_trl.model.config import read_config
from lean_trl.model.decoder import CausalLM
from lean_trl.model.loader import (
    fill_model,
    load_model,
    new_model,
    randomise_model,
    save_model,
)
from lean_trl.model.safetensors_io import read_json
from lean_trl.model.value_head import RewardModel
from lean_trl.rollout.feed import RolloutFeed, open_rollouts
from lean_trl.techniques.adapter_files import adapter_weights, save_adapter
from lean_trl.techniques.adapter_reference import adapter_reference, shares_weights
from lean_trl.techniques.adapters import Adapters
from lean_trl.techniques.apply import Applied, apply_techniques
from lean_trl.techniques.shard import kept_whole, needs_mesh
from lean_trl.techniques.trial import prove, table
from lean_trl.train.checkpoint import Checkpointer
from lean_trl.train.checkpoint_files import read_manifest
from lean_trl.train.distributed import World, join_world
from lean_trl.train.evaluate import evaluate
from lean_trl.train.log import StepLog
from lean_trl.train.methods import METHODS
from lean_trl.train.metrics import MetricsLog
from lean_trl.train.optim import build_optimizer, set_learning_rate
from lean_trl.train.progress import Progress
from lean_trl.train.reference import open_reference
from lean_trl.train.resume import (
    dry_run,
    export_weights,
    open_checkpoints,
    restore,
    same_window,
    save,
)
from lean_trl.train.router import with_router_loss
from lean_trl.train.schedule import check_schedule, lr_factor
from lean_trl.train.score import move_reference, referenced
from lean_trl.train.showcase import is_builtin_task, show
from lean_trl.train.signals import STOP, Signals
from lean_trl.train.step import train_step
from lean_trl.train.trackers import Trackers
from lean_trl.train.watchdog import Place, Watchdog
from lean_trl.types import Method

TrainFeed = Feed | StreamFeed | RolloutFeed


@dataclass
class Run:
    """What a run is made of, and how far it is."""

    config: Config
    world: World
    tokenizer: Tokenizer
    model: CausalLM
    method: Method
    optimizer: Optimizer
    around: Applied
    train_feed: TrainFeed
    eval_feed: Feed | None
    log: StepLog
    checkpoints: Checkpointer
    reference: nn.Module | None = None  # frozen; None: not needed, or its log-probs are on disk
    step: int = 0  # optimizer steps done
    saved_step: int = 0  # of the newest checkpoint
    place: Place = field(default_factory=Place)

    def say(self, message: str) -> None:
        """Print on rank 0."""
        if self.world.is_main:
            print(message, flush=True)


def train(config: Config) -> None:
    """Run the settings from start to end: train (or only evaluate) and write `output_dir`."""
    timeout_s = config.distributed.timeout_s
    with join_world(timeout_s) as world, Watchdog(world, timeout_s) as watchdog:
        train_as(world, config, watchdog.place)


def train_as(world: World, config: Config, place: Place | None = None) -> None:
    """What one rank does of `train`; it notes in `place` what it is at."""
    run = set_up(config, world)
    run.place = place or run.place
    run.place.reading = run.train_feed.reading
    if run.step == 0 or config.eval_only:
        report_evaluation(run)
        report_showcase(run)
    if not config.eval_only:
        with Signals(world.group) as signals:
            stopped = fit(run, signals)
        if stopped:
            run.say(f"stopped by SIGTERM after step {run.step}; the same command goes on")
            raise SystemExit(128 + signal.SIGTERM)
        report_evaluation(run)
        report_showcase(run, samples=3)
        export(run)
    run.log.close()


def set_up(config: Config, world: World) -> Run:
    """Everything before the first step, what fails cheaply first."""
    # Dropout differs between ranks; data and new weights have generators of their own.
    torch.manual_seed(config.seed + world.rank)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = (
            False  # a debugging aid that costs a pass per tensor
        )
    folder = Path(config.output_dir)
    if world.is_main:
        make_writable(folder)
    checkpoints, newest = open_checkpoints(config, world)
    if newest is not None:
        config = same_window(config, newest, world)
    if world.is_main and not (config.eval_only and (folder / "config.yaml").exists()):
        save_config(config, folder / "config.yaml")
    tokenizer = load_tokenizer(config.model)
    method = METHODS[config.method].bind(config.loss)
    train_feed, eval_feed = open_rows(config, tokenizer, method, world)
    # What is cut into shards gets its weights afterwards: each rank reads its own.
    reference: nn.Module | None = None
    if method.reference and not shares_weights(config):
        feeds = (None if isinstance(train_feed, RolloutFeed) else train_feed, eval_feed)
        reference = open_reference(config, feeds, tokenizer, world)
    # peft makes adapters from the weights, so those come first, whole.
    device = world.device if config.peft or not needs_mesh(config) else torch.device("meta")
    model = open_model(config, device)
    around = apply_techniques(model, config)
    if device.type == "meta":
        fill(model, config, torch.device("cpu") if config.memory.cpu_offload else world.device)
    if method.reference and shares_weights(config):
        reference = adapter_reference(model)
    steps = 0 if newest is None else read_manifest(newest)["step"]
    run = Run(
        config=config,
        world=world,
        tokenizer=tokenizer,
        model=model,
        method=with_router_loss(method, config.loss, model.config),
        optimizer=build_optimizer(model, config.train),
        around=around,
        train_feed=train_feed,
        eval_feed=eval_feed,
        log=open_log(config, world, done=steps, total=train_feed.steps),
        checkpoints=checkpoints,
        reference=reference,
    )
    if isinstance(train_feed, RolloutFeed):
        train_feed.connect(model, reference)
    if not config.eval_only:
        run.say(table(prove(around, model, run.optimizer, config)))
    if newest is not None:
        restore(run, newest)
    elif not config.eval_only:
        dry_run(run)
    return run


def make_writable(folder: Path) -> None:
    """Make `output_dir`; a ValueError when that, or a file in it, is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"output_dir {str(folder)!r} cannot be made ({error.strerror}): set another one"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"output_dir {str(folder)!r} cannot be written to: set another one")


def open_rows(
    config: Config, tokenizer: Tokenizer, method: Method, world: World
) -> tuple[TrainFeed, Feed | None]:
    """What is trained on and what is held out; rank 0 prints the data report."""
    train_feed: TrainFeed
    eval_feed = None
    if method.rollout:
        train_feed, report = open_rollouts(config, tokenizer, world)
    else:
        train_feed, eval_feed, report = open_feeds(
            config, tokenizer, method.examples, world.rank, world.size
        )
    if world.is_main:
        print(report, flush=True)
    if not config.eval_only:
        train = config.train
        check_schedule(train.lr_scheduler, train_feed.steps, train.warmup_steps)
    return train_feed, eval_feed


def open_log(config: Config, world: World, *, done: int, total: int | None) -> StepLog:
    """The log after `done` steps of `total`; an evaluation only adds to what is there."""
    file = None
    if world.is_main:
        steps = math.inf if config.eval_only else done
        path = Path(config.output_dir) / "metrics.jsonl"
        file = MetricsLog(path, steps, Trackers(config))
    progress = Progress(total, enabled=world.is_main and config.logging.progress)
    return StepLog(file, progress, config.logging.every, world.device)


def open_model(config: Config, device: torch.device) -> CausalLM:
    """The model of the settings: a folder's or hub id's weights, or the built-in one's."""
    settings = config.model
    # What is frozen is stored in the dtype that it computes in.
    dtype = config.train.param_dtype if config.peft is None else settings.dtype
    options: dict[str, Any] = {"dtype": dtype, "attention": settings.attention}
    options |= {"device": device}
    if config.method == "reward":
        options |= {"kind": partial(RewardModel, seed=config.seed)}
    if settings.path is None:
        raw = read_json(builtin.model_folder() / "config.json")
        return new_model(raw, config.seed, **options)
    folder = resolve_model(settings.path, settings.revision)
    dropout = read_config(read_json(folder / "config.json")).attention_dropout
    if dropout and not config.loss.disable_dropout:
        raise ValueError(
            f"{settings.path} asks for attention_dropout {dropout}, which is not supported: "
            "set loss.disable_dropout true to train without it"
        )
    return load_model(folder, **options)


def fill(model: CausalLM, config: Config, device: torch.device) -> None:
    """Weights for a model that open_model left on meta."""
    if config.model.path is None:
        randomise_model(model, config.seed, device)
    else:
        fill_model(model, resolve_model(config.model.path, config.model.revision), device)


def fit(run: Run, signals: Signals) -> bool:
    """One optimizer step for each window of the feed; True when a signal ended it early.

    The last step is saved in any case.
    """
    settings, steps, every = run.config.train, run.train_feed.steps, run.config.checkpoint.every
    run.model.train()
    run.log.pause()
    run.place.step = run.step + 1
    feed = run.train_feed
    online = isinstance(feed, RolloutFeed)  # it asks the reference once for each generation
    for window in referenced(feed, None if online else run.reference):
        factor = lr_factor(settings.lr_scheduler, run.step, steps, settings.warmup_steps)
        learning_rate = settings.learning_rate * factor
        set_learning_rate(run.optimizer, learning_rate)
        report = train_step(
            run.model,
            window.batches,
            run.method,
            run.optimizer,
            totals=window.totals,
            max_grad_norm=settings.max_grad_norm,
            around=run.place.follow(window.batches, run.around),
            group=run.world.group,
        )
        run.step += 1
        run.place.step, run.place.rows = run.step + 1, ()
        if isinstance(feed, RolloutFeed):
            feed.after_step(report)
        sync_reference(run)
        run.log.add(
            run.step,
            report,
            learning_rate=learning_rate,
            epoch=window.epoch,
            tokens=window.totals["processed"],
            empty=window.totals[run.method.unit] == 0,
            known=window.metrics,
        )
        if settings.eval_every and run.step % settings.eval_every == 0 and run.step != steps:
            report_evaluation(run)
        asked = signals.agreed()
        if asked or (every and run.step % every == 0):
            save(run)
        if asked == STOP and run.step != steps:
            run.checkpoints.wait()
            return True
    save(run)
    run.checkpoints.wait()
    run.log.flush()
    return False


def sync_reference(run: Run) -> None:
    """Move the reference towards the policy, every so many steps."""
    loss = run.config.loss
    if loss.sync_ref_model and run.step % loss.ref_model_sync_steps == 0:
        assert run.reference is not None
        move_reference(run.reference, run.model, loss.ref_model_mixup_alpha)


def report_evaluation(run: Run) -> None:
    """Held-out loss, printed and written to metrics.jsonl, when there are held-out rows."""
    if run.eval_feed is None:
        return
    windows = referenced(run.eval_feed, run.reference)
    metrics = evaluate(run.model, windows, run.method, group=run.world.group)
    run.log.write_evaluation(run.step, metrics)
    run.say(
        f"step {run.step}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    )
    run.log.pause()


def report_showcase(run: Run, *, samples: int = 0) -> None:
    """Right answers to held-out questions, and some of them, when the task is the built-in one."""
    if not is_builtin_task(run.config):
        return
    with kept_whole(run.model, run.config):
        showcase = show(run.model, run.tokenizer)
    run.log.write_evaluation(run.step, showcase.metrics())
    run.say(f"step {run.step}: exact match {showcase}")
    if samples:
        run.say(showcase.samples(samples))
    run.log.pause()


def export(run: Run) -> None:
    """Write `output_dir`/model: configs, safetensors, tokenizer and chat template."""
    if not run.config.checkpoint.export_hf:
        return
    adapters = run.around.find(Adapters)
    if adapters is not None:
        folder = Path(run.config.output_dir) / "adapter"
        added = adapter_weights(run.model, adapters)
        if run.world.is_main:
            save_adapter(run.model, adapters, added, folder)
            run.tokenizer.save(folder)
        run.say(f"adapter written to {folder}; scripts/export.py makes a whole model of it")
        return
    folder = Path(run.config.output_dir) / "model"
    weights = export_weights(run)
    if isinstance(run.model, RewardModel):
        run.model.set_pad_id(run.tokenizer.pad_id)
    if run.world.is_main:
        save_model(run.model, folder, weights=weights)
        run.tokenizer.save(folder)
    run.say(f"model written to {folder}")
