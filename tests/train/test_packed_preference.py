"""Bins of pairs and of completions through the step: the loss and gradients of the same rows."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lean_trl.config import Config
from lean_trl.data.feed import Feed, open_feeds
from lean_trl.data.plan import mix
from lean_trl.data.tokenizer import load_tokenizer
from lean_trl.model import load_model
from lean_trl.model.value_head import RewardModel
from lean_trl.train import loop
from lean_trl.train.methods import METHODS
from lean_trl.train.score import with_ref_logprobs
from lean_trl.train.step import train_step
from lean_trl.types import StepReport

from ..data.fixtures import write_jsonl
from ..ranks import on_ranks
from .golden import GOLDEN, lines, recorded_config

ALL = {"gradient_accumulation_steps": 64, "max_steps": 1, "micro_batch_size": 2}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sigmoid": ("dpo", {"loss_type": "sigmoid"}),
    "mpo": ("dpo", {"loss_type": ["sigmoid", "aot_unpaired", "sft"]}),
    "reward": ("reward", {}),
    "apo_zero_unpaired": ("kto", {"loss_type": "apo_zero_unpaired"}),
}


def settings(
    folder: Path, method: str, loss: dict[str, Any], packing: bool, **train: Any
) -> Config:
    """All rows in one window, unless `train` says otherwise."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(20):
        columns = zip(("prompt", "chosen", "rejected"), (8, 12, 12), strict=True)
        ids = {f"{k}_ids": rng.integers(5, 500, rng.integers(1, n)).tolist() for k, n in columns}
        rows.append({**ids, "margin": float(rng.random())} if method == "reward" else ids)
    data = {"path": str(write_jsonl(folder / "rows.jsonl", rows)), "max_length": 18}
    data |= {"packing": packing}
    config = {"method": method, "loss": loss, "data": data, "train": {**ALL, **train}}
    return recorded_config(folder, "preference", **config)


def open_train(config: Config) -> Feed:
    tokenizer = load_tokenizer(GOLDEN / "tokenizer")
    feed, _, _ = open_feeds(config, tokenizer, METHODS[config.method].examples)
    assert isinstance(feed, Feed)
    return feed


def one_step(config: Config, feed: Feed) -> tuple[StepReport, dict[str, torch.Tensor]]:
    """What the first window does to weights that differ from the reference's."""
    kind = {"kind": RewardModel} if config.method == "reward" else {}
    torch.manual_seed(0)
    policy = load_model(GOLDEN / "models" / "qwen3", **kind)
    reference = copy.deepcopy(policy)
    before = {}
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            # Flatter than the reference: likelier tokens at random, so that the KL is not 0.
            weight.mul_(0.8).add_(0.02 * torch.randn_like(weight))
            before[name] = weight.clone()
    window = next(iter(feed))
    method = METHODS[config.method].bind(config.loss)
    batches = window.batches
    if method.reference:
        batches = [with_ref_logprobs(reference, batch) for batch in batches]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    report = train_step(
        policy, batches, method, optimizer, totals=window.totals, max_grad_norm=None
    )
    return report, {n: before[n] - w.detach() for n, w in policy.named_parameters()}


def same(one: tuple[StepReport, Any], other: tuple[StepReport, Any]) -> None:
    close: dict[str, float] = {"rtol": 1e-4, "atol": 2e-6}
    torch.testing.assert_close(one[0].loss, other[0].loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one[1], other[1], **close)
    assert one[0].grad_norm.item() > 1e-3
    for name, value in one[0].metrics.items():
        torch.testing.assert_close(value, other[0].metrics[name], **close, msg=name)


@pytest.mark.parametrize("name", RUNS)
def test_bins_have_the_loss_and_gradients_of_their_rows(name: str, tmp_path: Path) -> None:
    method, loss = RUNS[name]
    results, windows = [], []
    for packing in (False, True):
        config = settings(tmp_path, method, loss, packing)
        feed = open_train(config)
        results.append(one_step(config, feed))
        windows.append(next(iter(open_train(config))))
    same(*results)
    assert windows[0].totals == windows[1].totals
    sequences = [[b.num_sequences for b in window.batches] for window in windows]
    plain = 2 if method == "kto" else 4
    assert set(sequences[0]) == {plain} and max(sequences[1]) > plain


def test_kto_in_bins_is_kto_in_their_order(tmp_path: Path) -> None:
    """Completions go round in the order of the window, and bins change that order."""
    config = settings(tmp_path, "kto", {"loss_type": "kto"}, True)
    packed = open_train(config)
    rows = replace(packed.items, offsets=np.arange(len(packed.items.store) + 1))
    mixture = mix(rows.source, None, False, 0)
    schedule = replace(packed.schedule, mixture=mixture)
    alone = Feed(rows, packed.cut, schedule, mismatch=True, max_length=18)
    results = one_step(config, packed), one_step(config, alone)
    same(*results)
    assert results[0][0].metrics["kl"].item() > 0


@pytest.mark.parametrize("name", ["sigmoid", "mpo"])
def test_runs_of_two_ranks_and_with_a_reference_on_disk(name: str, tmp_path: Path) -> None:
    method, loss = RUNS[name]
    small = {"gradient_accumulation_steps": 3, "max_steps": 4}
    config = settings(tmp_path, method, loss, True, **small)
    loop.train(config)
    alone = lines(tmp_path)
    more = {**loss, "precompute_ref_log_probs": True}
    two = {"gradient_accumulation_steps": None, "batch_size": 6, "micro_batch_size": 1}
    for changed in (
        settings(tmp_path, method, more, True, **small),
        settings(tmp_path, method, loss, True, **{**small, **two}),
    ):
        shutil.rmtree(tmp_path / "out")
        ranks = 1 if changed.loss.precompute_ref_log_probs else 2
        on_ranks(ranks, lambda world, changed=changed: loop.train_as(world, changed))
        for line, expected in zip(lines(tmp_path), alone, strict=True):
            assert line["num_tokens"] == expected["num_tokens"]
            assert line["epoch"] == expected["epoch"]
            for key in ("loss", "grad_norm", "rewards/margins", "rewards/accuracies"):
                assert line[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key


def test_log_probs_of_rows_are_not_those_of_bins(tmp_path: Path) -> None:
    loss = {"precompute_ref_log_probs": True}
    loop.train(settings(tmp_path, "dpo", loss, False))
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    with pytest.raises(ValueError, match="packing was False, is True"):
        loop.train(settings(tmp_path, "dpo", loss, True))
