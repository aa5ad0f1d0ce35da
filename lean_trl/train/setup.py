"""Everything before the first step: from settings to a Run, what fails cheaply first."""

from __future__ import annotations

import math
import os
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
)
from lean_trl.model.safetensors_io import read_json
from lean_trl.model.value_head import RewardModel
from lean_trl.rollout.feed import RolloutFeed, open_rollouts
from lean_trl.techniques.adapter_reference import adapter_reference, shares_weights
from lean_trl.techniques.apply import Applied, apply_techniques
from lean_trl.techniques.shard import needs_mesh
from lean_trl.techniques.trial import prove, table
from lean_trl.train.checkpoint import Checkpointer
from lean_trl.train.checkpoint_files import read_manifest
from lean_trl.train.distributed import World
from lean_trl.train.log import StepLog
from lean_trl.train.methods import METHODS
from lean_trl.train.metrics import MetricsLog
from lean_trl.train.optim import build_optimizer
from lean_trl.train.progress import Progress
from lean_trl.train.reference import open_reference
from lean_trl.train.resume import (
    dry_run,
    open_checkpoints,
    restore,
    same_window,
)
from lean_trl.train.router import with_router_loss
from lean_trl.train.schedule import check_schedule
from lean_trl.train.trackers import Trackers
from lean_trl.train.watchdog import Place
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


def set_up(config: Config, world: World) -> Run:
    """Everything before the first step, what fails cheaply first."""
    # Dropout differs between ranks; data and new weights have generators of their own.
    torch.manual_seed(config.seed + world.rank)
    make_deterministic(config.train.deterministic)
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
    # Quantised layer by layer on its way to the GPU, which never holds the whole base.
    model = open_model(config, torch.device("cpu") if config.quantization else device)
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
        optimizer=build_optimizer(model, config.train, config.memory.optimizer_in_backward),
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


def make_deterministic(wanted: bool) -> None:
    """The same run gives the same bits, or not: algorithms that are free to differ are faster."""
    if wanted:
        # cuBLAS reads it when it starts; without it torch refuses products on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    # A debugging aid that costs a pass over every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


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
