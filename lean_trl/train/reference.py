"""Where a run's reference comes from: a frozen model in memory, or its log-probs on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lean_trl.config import Config
from lean_trl.data.feed import Feed, open_feeds
from lean_trl.data.hub import resolve_model
from lean_trl.data.stream import StreamFeed
from lean_trl.data.tokenizer import Tokenizer, load_tokenizer
from lean_trl.model.config import read_config
from lean_trl.model.decoder import CausalLM
from lean_trl.model.loader import fill_model, load_model, new_model, randomise_model
from lean_trl.model.safetensors_io import read_json
from lean_trl.techniques.shard import DTYPES, Precision, Sharding, needs_mesh
from lean_trl.train.distributed import World, join_world
from lean_trl.train.methods import METHODS
from lean_trl.train.precompute import fingerprint_model, load_logprobs, write_logprobs
from lean_trl.train.score import freeze


def open_reference(
    config: Config, feeds: Sequence[Feed | StreamFeed | None], tokenizer: Tokenizer, world: World
) -> CausalLM | None:
    """The frozen model that scores each window; None when the feeds bring its log-probs themselves.

    feeds: of training and evaluation. With loss.precompute_ref_log_probs their rows are scored now
    unless that was done before, and no reference stays in memory. Raises ValueError for log-probs
    on disk that no longer fit, and for a reference with another vocabulary.
    """
    if not config.loss.precompute_ref_log_probs:
        return frozen_model(config, world)
    made_from, model = _made_from(config, tokenizer), None
    for name, feed in zip(("train", "eval"), feeds, strict=True):
        if feed is None:
            continue
        items = _known(feed).items
        store = load_logprobs(_folder(config, name), items.store, made_from)
        if store is None:
            model = model or frozen_model(config, world)
            _score(config, _known(feed), _folder(config, name), model, made_from, world)
            store = load_logprobs(_folder(config, name), items.store, made_from)
            assert store is not None
        _known(feed).items = replace(items, store=store)
    return None


def score_rows(config: Config) -> None:
    """Score all rows of the settings with the reference, whatever is on disk.

    Raises ValueError for a method without a reference.
    """
    method = METHODS[config.method].bind(config.loss)
    if not method.reference:
        raise ValueError(f"{config.method} with loss {config.loss.loss_type} has no reference")
    with join_world(config.distributed.timeout_s) as world:
        tokenizer = load_tokenizer(config.model)
        train_feed, eval_feed, report = open_feeds(
            config, tokenizer, method.examples, world.rank, world.size
        )
        if world.is_main:
            print(report, flush=True)
        made_from, model = _made_from(config, tokenizer), frozen_model(config, world)
        for name, feed in (("train", train_feed), ("eval", eval_feed)):
            if feed is not None:
                _score(config, _known(feed), _folder(config, name), model, made_from, world)


def frozen_model(config: Config, world: World) -> CausalLM:
    """The reference: model.ref_path, else the model that training starts from, cut as the policy.

    It is stored in model.dtype; one that moves is stored as the policy is, or it would not.
    """
    settings = config.model
    dtype = config.train.param_dtype if config.loss.sync_ref_model else settings.dtype
    cut = needs_mesh(config)
    device = torch.device("meta") if cut else world.device
    options: dict[str, Any] = {"dtype": dtype, "device": device, "attention": settings.attention}
    folder = _model_folder(config)
    if settings.ref_path:
        _check_vocabulary(config, folder)
    built_in = folder == resolve_model(None)
    if built_in:
        model = new_model(read_json(folder / "config.json"), config.seed, **options)
    else:
        model = load_model(folder, **options)
    if cut:
        sharding = Sharding(config)
        sharding.precision = Precision(DTYPES[dtype], DTYPES[settings.dtype])
        sharding.on_model(model)
        target = torch.device("cpu") if config.memory.cpu_offload else world.device
        if built_in:
            randomise_model(model, config.seed, target)
        else:
            fill_model(model, folder, target)
    freeze(model)
    return model


def _folder(config: Config, name: str) -> Path:
    return Path(config.output_dir) / "ref_logprobs" / name


def _known(feed: Feed | StreamFeed) -> Feed:
    if isinstance(feed, Feed):
        return feed
    raise ValueError(
        "loss.precompute_ref_log_probs needs to know all rows: set data.streaming false"
    )


def _model_folder(config: Config) -> Path:
    settings = config.model
    if settings.ref_path:
        return resolve_model(settings.ref_path)
    return resolve_model(settings.path, settings.revision)


def _check_vocabulary(config: Config, folder: Path) -> None:
    policy = resolve_model(config.model.path, config.model.revision)
    ours, theirs = (read_config(read_json(f / "config.json")).vocab_size for f in (policy, folder))
    if ours != theirs:
        raise ValueError(
            f"model.ref_path {config.model.ref_path} has {theirs} tokens, the model {ours}: a "
            "reference must share the tokenizer"
        )


def _made_from(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """What log-probs depend on, in words and fingerprints; the token ids come with the store."""
    folder = _model_folder(config)
    seed = config.seed if folder == resolve_model(None) else None
    source = "" if tokenizer.chat is None else tokenizer.chat.source
    template = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
    return {
        "model": fingerprint_model(folder),
        "seed": seed,
        "tokenizer": tokenizer.identity,
        "template": template,
        "max_length": config.data.max_length,
        "truncation_mode": config.data.truncation_mode,
        "packing": config.data.packing,  # the order of the log-probs
        "dtype": config.model.dtype,
    }


def _score(
    config: Config,
    feed: Feed,
    folder: Path,
    model: CausalLM,
    made_from: dict[str, Any],
    world: World,
) -> None:
    if world.is_main:
        print(f"scoring {len(feed.items)} items with the reference into {folder}", flush=True)
    store, items = feed.items.store, config.train.micro_batch_size
    write_logprobs(
        folder, store, feed.items.offsets, model, made_from, world, items_per_batch=items
    )
