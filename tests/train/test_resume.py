"""Stopped and resumed is the same as not stopped: bit for bit, or on another number of ranks."""

import json
import os
import pickle
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from lean_trl.config import Config
from lean_trl.train import loop, setup
from lean_trl.train.distributed import World
from lean_trl.train.resume import dry_run
from lean_trl.train.signals import Signals
from tests.ranks import on_ranks

from .golden import recorded_config

ONE = World(0, 1, torch.device("cpu"), None)
STEPS = 10  # two epochs of five


class Stopped(Exception):
    """A crash between two steps."""


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle.load")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)


@pytest.fixture
def dropout(monkeypatch):
    """Dropout of 0.1 after each MLP: the random generator decides the result."""
    open_model = setup.open_model

    def with_dropout(config: Config, device: torch.device):
        model = open_model(config, device)
        for block in model.blocks:
            block.mlp.register_forward_hook(lambda m, args, out: F.dropout(out, 0.1, m.training))
        return model

    monkeypatch.setattr(setup, "open_model", with_dropout)


def rows(folder: Path, count: int = 20) -> Path:
    file = folder / "rows.jsonl"
    words = "alpha beta gamma delta epsilon zeta eta theta".split()
    lines = [
        {"text": " ".join(words[(i * j) % 8] for j in range(3 + 5 * i % 17))} for i in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def settings(folder: Path, **changes) -> Config:
    base = {
        "data": {"path": str(rows(folder)), "shuffle": True, "max_length": 64},
        "train": {
            "batch_size": 4,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": None,
            "max_steps": None,
            "num_epochs": 2,
            "lr_scheduler": "linear",
        },
        "checkpoint": {"every": 1, "keep": 100, "export_hf": True},
    }
    for section, keys in changes.items():
        base[section] = base.get(section, {}) | keys
    return recorded_config(folder, "text", **base)


def run(config: Config, world: World, stop_after: int | None, monkeypatch) -> None:
    """The whole run, or until it crashes before step stop_after + 1."""
    if stop_after is None:
        loop.train_as(world, config)
        return
    calls = Counter()
    step = loop.train_step

    def crashing(*args, **kwargs):
        calls[world.rank] += 1
        if calls[world.rank] > stop_after:
            raise Stopped
        return step(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(loop, "train_step", crashing)
        loop.train_as(world, config)
    for thread in threading.enumerate():  # a process that crashes takes its threads with it
        if thread.name == "checkpoint":
            thread.join()


def outcome(folder: Path) -> tuple[list[tuple], dict[str, torch.Tensor]]:
    """(what each step logged, the exported weights)."""
    text = (folder / "out" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    keys = ("step", "loss", "grad_norm", "learning_rate", "epoch", "num_tokens")
    steps = [tuple(line[key] for key in keys) for line in lines if "loss" in line]
    return steps, load_file(folder / "out" / "model" / "model.safetensors")


def check_same_bits(ours: Path, uninterrupted: Path) -> None:
    (steps, weights), (expected, whole) = outcome(ours), outcome(uninterrupted)
    assert len(expected) == STEPS
    assert steps == expected
    assert weights.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(weights[name], weight), name


VARIANTS = {
    "rows": {},
    "bins": {"data": {"packing": True, "max_length": 16}, "train": {"batch_size": 2}},
    "computed in bf16": {"distributed": {"sharding": "fsdp"}},
    "streaming": {
        "data": {"streaming": True},
        "train": {"max_steps": 10, "num_epochs": None},
    },
    "in the background": {"checkpoint": {"async_save": True}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_stops_on_one_rank(variant, dropout, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("whole", "stopped")]
    for folder in folders:
        folder.mkdir()
    whole, stopped = (settings(folder, **VARIANTS[variant]) for folder in folders)
    if variant == "computed in bf16":
        whole, stopped = (
            replace(c, model=replace(c.model, dtype="bfloat16")) for c in (whole, stopped)
        )
        # A mesh of one rank needs a group of one.
        monkeypatch.setattr(
            loop, "train_as", lambda _, c, train=loop.train_as: on_ranks(1, lambda w: train(w, c))
        )
    run(whole, ONE, None, monkeypatch)
    for steps in (3, 2, 2):  # after 3, 5 (the end of an epoch) and 7
        run(stopped, ONE, steps, monkeypatch)
    run(stopped, ONE, None, monkeypatch)
    steps, weights = outcome(folders[1])
    expected, whole_weights = outcome(folders[0])
    assert len(expected) >= 8 and steps == expected
    assert all(torch.equal(weights[name], whole_weights[name]) for name in whole_weights)


def test_the_dropout_matters(dropout, tmp_path, monkeypatch):
    """Else the test above would not see a random generator that starts anew."""
    outcomes = []
    for seed in (0, 0, 1):
        folder = tmp_path / str(len(outcomes))
        folder.mkdir()
        monkeypatch.setattr(torch, "manual_seed", lambda _, s=seed: torch.random.manual_seed(s))
        run(settings(folder, data={"shuffle": False}), ONE, None, monkeypatch)
        outcomes.append(outcome(folder)[0])
    assert outcomes[0] == outcomes[1] != outcomes[2]


def test_two_ranks_then_one_then_four(tmp_path, monkeypatch):
    """Weights, optimizer and data position carry on; each row once an epoch."""
    folders = [tmp_path / name for name in ("whole", "moved")]
    for folder in folders:
        folder.mkdir()
    seen: Counter = Counter()  # rows trained on
    run(settings(folders[0]), ONE, None, monkeypatch)
    # Without batch_size the ranks would decide how large a step is: the run keeps its first size.
    moved = settings(folders[1], train={"batch_size": None, "micro_batch_size": 2})
    calls = Counter()
    step = loop.train_step

    def crashing(model, window, *args, **kwargs):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        calls[rank] += 1
        if calls[rank] > limit:
            raise Stopped
        seen.update(row for batch in window for _, row in batch.sources)
        return step(model, window, *args, **kwargs)

    monkeypatch.setattr(loop, "train_step", crashing)
    for ranks, limit in ((2, 3), (1, 4), (4, 99)):
        calls.clear()
        try:
            on_ranks(ranks, lambda world: loop.train_as(world, moved))
        except Stopped:
            assert limit < 99
    assert seen == {row: 2 for row in range(20)}  # two epochs
    (steps, weights), (expected, whole) = outcome(folders[1]), outcome(folders[0])
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    for name, weight in whole.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)


def test_a_damaged_checkpoint_costs_one_step(dropout, tmp_path, monkeypatch, capsys):
    folders = [tmp_path / name for name in ("whole", "stopped")]
    for folder in folders:
        folder.mkdir()
    run(settings(folders[0]), ONE, None, monkeypatch)
    config = settings(folders[1])
    run(config, ONE, 4, monkeypatch)
    shard = folders[1] / "out" / "checkpoints" / "step-4" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 16
    shard.write_bytes(data)
    run(config, ONE, None, monkeypatch)
    out = capsys.readouterr().out
    assert "step-4 is damaged" in out and "shard-00000.safetensors is not what was written" in out
    assert f"resumed from {folders[1]}/out/checkpoints/step-3" in out
    check_same_bits(folders[1], folders[0])


def test_a_finished_run_trains_no_further(tmp_path, monkeypatch, capsys):
    config = settings(tmp_path)
    run(config, ONE, None, monkeypatch)
    before = outcome(tmp_path)
    run(config, ONE, None, monkeypatch)
    after = outcome(tmp_path)
    assert before[0] == after[0]
    assert all(torch.equal(after[1][name], weight) for name, weight in before[1].items())


def test_other_settings_are_refused_unless_asked_for(tmp_path, monkeypatch, capsys):
    config = settings(tmp_path)
    run(config, ONE, 2, monkeypatch)
    other = replace(config, train=replace(config.train, learning_rate=0.5, micro_batch_size=1))
    with pytest.raises(ValueError, match=r"other settings: train.learning_rate was 0.001, is 0.5"):
        loop.train_as(ONE, other)
    always = replace(other, checkpoint=replace(other.checkpoint, resume="always"))
    run(always, ONE, 1, monkeypatch)
    assert [step[3] for step in _lines(tmp_path)] == pytest.approx([1e-3, 9e-4, 0.5 * 0.8])
    never = replace(other, checkpoint=replace(other.checkpoint, resume="never"))
    run(never, ONE, 1, monkeypatch)
    assert "starting anew; earlier checkpoints are now" in capsys.readouterr().out
    assert (tmp_path / "out" / "checkpoints.1" / "step-3").is_dir()
    assert [step[0] for step in _lines(tmp_path)] == [1]


def _lines(folder: Path) -> list[tuple]:
    text = (folder / "out" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["step"], line["loss"], None, line["learning_rate"]) for line in lines]


def test_another_batch_size_is_refused(tmp_path, monkeypatch):
    run(settings(tmp_path), ONE, 1, monkeypatch)
    with pytest.raises(ValueError, match="counts steps of 4 units, train.batch_size is 8: set it"):
        loop.train_as(ONE, settings(tmp_path, train={"batch_size": 8}))


def test_other_data_are_refused(tmp_path, monkeypatch):
    config = settings(tmp_path)
    run(config, ONE, 1, monkeypatch)
    rows(tmp_path, count=21)
    with pytest.raises(ValueError, match="the data have changed"):
        loop.train_as(ONE, config)


def test_lines_of_steps_that_were_lost_are_dropped(tmp_path, monkeypatch):
    config = settings(tmp_path, checkpoint={"every": 2})
    run(config, ONE, 3, monkeypatch)
    with open(tmp_path / "out" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    assert [line[0] for line in _lines_loose(tmp_path)] == [1, 2, 3]
    run(config, ONE, None, monkeypatch)
    assert [line[0] for line in _lines(tmp_path)] == list(range(1, STEPS + 1))


def _lines_loose(folder: Path) -> list[tuple]:
    text = (folder / "out" / "metrics.jsonl").read_text()
    return [(json.loads(line)["step"],) for line in text.splitlines()[:-1]]


@pytest.mark.parametrize("every", [0, 4])
def test_how_often(every, tmp_path, monkeypatch):
    run(settings(tmp_path, checkpoint={"every": every}), ONE, None, monkeypatch)
    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert saved == (["step-10"] if every == 0 else ["step-10", "step-4", "step-8"])


@pytest.mark.parametrize(
    ("number", "saved", "steps"), [(signal.SIGTERM, 3, 3), (signal.SIGUSR1, 3, STEPS)]
)
def test_signals_save_after_the_step_in_progress(number, saved, steps, tmp_path, monkeypatch):
    step, calls = loop.train_step, Counter()

    def signalled(*args, **kwargs):
        calls["step"] += 1
        if calls["step"] == 3:
            os.kill(os.getpid(), number)
        return step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", signalled)
    before = signal.getsignal(number)
    config = settings(tmp_path, checkpoint={"every": 0})
    if number == signal.SIGTERM:
        with pytest.raises(SystemExit) as raised:
            loop.train_as(ONE, config)
        assert raised.value.code == 143
    else:
        loop.train_as(ONE, config)
    assert signal.getsignal(number) == before
    assert len(_lines(tmp_path)) == steps
    folders = {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()}
    assert folders == {f"step-{saved}", f"step-{steps}"}


def test_one_rank_is_asked_and_all_stop_after_the_same_step(tmp_path, monkeypatch):
    """Each rank has its own Signals; rank 1 hears SIGTERM in step 2."""
    step = loop.train_step
    stopped = []

    def heard(*args, **kwargs):
        rank = torch.distributed.get_rank()
        calls[rank] += 1
        if rank == 1 and calls[rank] == 2:
            listeners[1]._hear(signal.SIGTERM, None)
        return step(*args, **kwargs)

    calls, listeners = Counter(), {}
    make = loop.Signals

    def listening(group):
        listeners[torch.distributed.get_rank()] = made = make(group)
        return made

    monkeypatch.setattr(loop, "train_step", heard)
    monkeypatch.setattr(loop, "Signals", listening)
    config = settings(tmp_path, checkpoint={"every": 0})

    def work(world: World) -> None:
        try:
            loop.train_as(world, config)
        except SystemExit:
            stopped.append((world.rank, calls[world.rank]))

    on_ranks(2, work)
    assert sorted(stopped) == [(0, 3), (1, 3)]


def test_frozen_weights_take_no_room_in_a_checkpoint():
    """A run with adapters must not ask for the disk space of its base model."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(3, 5, bias=False))
    model[0].requires_grad_(False)
    asked = []
    run = SimpleNamespace(
        model=model, checkpoints=SimpleNamespace(dry_run=asked.append), config=Config()
    )
    dry_run(run)
    assert asked == [3 * 4 * 15]  # weight and two moments, fp32


def test_a_handler_that_python_did_not_set_is_no_trouble():
    """faulthandler.register and C libraries leave None as the handler before ours."""
    with Signals() as signals:
        signals._before[signal.SIGUSR1] = None
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
