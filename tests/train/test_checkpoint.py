"""Checkpoints: what was saved comes back, on any number of ranks; damage and kills lose nothing."""

import multiprocessing
import os
import pickle
import random
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lean_trl.train.checkpoint import Checkpointer
from lean_trl.train.checkpoint_files import read_manifest, saved_sizes
from lean_trl.train.distributed import World, make_mesh
from lean_trl.train.snapshot import run_tensors, set_generators, tensors_to_load
from tests.ranks import on_ranks

POINTS = [
    "before_write",
    "mid_file",
    "before_manifest",
    "before_rename",
    "after_rename",
    "clean_up",
]


@pytest.fixture(autouse=True)
def no_pickle(monkeypatch):
    """Nothing that was in a file is unpickled."""

    def refuse(*args, **kwargs):
        raise AssertionError("pickle.load")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build(seed: int, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if sharded:
        mesh = make_mesh("fsdp", None, "cpu")
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.randn(4, 7, generator=torch.Generator().manual_seed(5))
    (model(inputs) ** 2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict:
    tensors = run_tensors(model, optimizer, rank)
    return {name: whole(t).clone() for name, t in tensors.items() if not name.startswith("rng.")}


def save_two(folder: Path, world: World, **how) -> dict:
    """Checkpoints after steps 1 and 2; returns everything after step 3."""
    model, optimizer = build(0, world.size > 1)
    checkpointer = Checkpointer(folder, group=world.group, **how)
    for number in (1, 2):
        step(model, optimizer)
        checkpointer.save(number, run_tensors(model, optimizer, world.rank), {"seen": number})
    step(model, optimizer)
    checkpointer.wait()
    return everything(model, optimizer, world.rank)


def resume(folder: Path, world: World) -> tuple[dict, dict]:
    """(state, everything after one more step) from the newest checkpoint in a fresh run."""
    model, optimizer = build(9, world.size > 1)
    checkpointer = Checkpointer(folder, group=world.group)
    path = checkpointer.newest()
    assert path is not None
    tensors = tensors_to_load(path, model, optimizer, world.rank)
    state = checkpointer.load(path, tensors)
    step(model, optimizer)
    return state, everything(model, optimizer, world.rank)


@pytest.mark.parametrize(
    ("before", "after", "background"),
    # Ranks that are threads have no group for a thread of their own: see test_resume.py for two.
    [(1, 1, True), (1, 1, False), (2, 2, False), (2, 1, False), (1, 4, False), (4, 2, False)],
)
def test_resume_on_any_number_of_ranks(before, after, background, tmp_path):
    saved = on_ranks(before, lambda w: save_two(tmp_path, w, background=background))[0]
    for state, resumed in on_ranks(after, lambda w: resume(tmp_path, w)):
        assert state == {"seen": 2}
        assert resumed.keys() == saved.keys()
        for name, tensor in saved.items():
            if before == after:
                assert torch.equal(resumed[name], tensor), name
            else:  # sums over ranks come in another order
                torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6)


def test_before_the_first_step_there_is_no_optimizer_state(tmp_path):
    model, optimizer = build(0, False)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(0, run_tensors(model, optimizer, 0), {})
    assert not any(name.startswith("optimizer.") for name in saved_sizes(tmp_path / "step-0"))
    resume(tmp_path, World(0, 1, torch.device("cpu"), None))


def test_the_optimizers_rate_survives_its_set_up(tmp_path):
    save_two(tmp_path, World(0, 1, torch.device("cpu"), None))
    model, optimizer = build(1, False)
    tensors_to_load(tmp_path / "step-2", model, optimizer, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    assert all(p.grad is None for p in model.parameters())


def test_random_generators_continue(tmp_path):
    model, optimizer = build(0, False)
    checkpointer = Checkpointer(tmp_path)
    random.gauss(0, 1)  # leaves a second number behind, which is part of the state
    np.random.standard_normal()
    checkpointer.save(1, run_tensors(model, optimizer, 0), {})

    def draw() -> tuple:
        return torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()

    first = draw()
    draw()
    tensors = tensors_to_load(tmp_path / "step-1", model, optimizer, 0)
    checkpointer.load(tmp_path / "step-1", tensors)
    set_generators(tensors, 0)
    assert draw() == first


def test_a_rank_that_the_checkpoint_does_not_know_keeps_its_generators(tmp_path):
    on_ranks(2, lambda w: save_two(tmp_path, w))
    model, optimizer = build(0, False)
    names = tensors_to_load(tmp_path / "step-2", model, optimizer, 3)
    assert not any(name.startswith("rng.") for name in names)
    assert {n for n in saved_sizes(tmp_path / "step-2") if n.endswith(".torch")} == {
        "rng.0.torch",
        "rng.1.torch",
    }


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (None, [1, 2, 3, 4])])
def test_the_newest_stay(keep, left, tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=keep)
    for number in (1, 2, 3, 4):
        checkpointer.save(number, {"a": torch.tensor([number])}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{n}" for n in left]


def test_ten_comes_after_nine(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    for number in (9, 10):
        checkpointer.save(number, {"a": torch.zeros(1)}, {})
    assert checkpointer.newest() == tmp_path / "step-10"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("file", "damage", "told"),
    [
        ("shard-00000.safetensors", cut, "shard-00000.safetensors has"),
        ("shard-00000.safetensors", flip, "shard-00000.safetensors is not what was written"),
        ("shard-00000.safetensors", Path.unlink, "shard-00000.safetensors is missing"),
        ("state.json", cut, "state.json cannot be read"),
        ("state.json", flip, "state.json"),
        ("state.json", Path.unlink, "state.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    file, damage, told, size, tmp_path, capsys
):
    on_ranks(size, lambda w: save_two(tmp_path, w))
    damage(tmp_path / "step-2" / file)
    for state, _ in on_ranks(size, lambda w: resume(tmp_path, w)):
        assert state == {"seen": 1}
    assert told in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2.corrupt"]


def test_looking_alone_touches_nothing(tmp_path, capsys):
    """An evaluation beside a run must not remove the save in progress."""
    checkpointer = Checkpointer(tmp_path)
    for number in (1, 2):
        checkpointer.save(number, {"a": torch.zeros(1)}, {})
    cut(tmp_path / "step-2" / "state.json")
    (tmp_path / "step-3.partial").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert checkpointer.newest(tidy=False) == tmp_path / "step-1"
    assert "step-2 is damaged: state.json cannot be read" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert checkpointer.newest() == tmp_path / "step-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2.corrupt"]


def test_every_byte_counts(tmp_path):
    """Any flipped bit of a checkpoint is found."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": torch.arange(4.0)}, {"text": "x"})
    for file in sorted((tmp_path / "step-1").iterdir()):
        data = file.read_bytes()
        for place in range(0, len(data), 7):
            broken = bytearray(data)
            broken[place] ^= 4
            file.write_bytes(broken)
            if file.name == "state.json" and _same_json(broken, data):
                continue
            assert checkpointer._share_problems(tmp_path / "step-1"), (file.name, place)
        file.write_bytes(data)
    assert checkpointer._share_problems(tmp_path / "step-1") == []


def _same_json(broken: bytes, data: bytes) -> bool:
    """White space may change without a change of content."""
    return bytes(broken).split() == data.split()


def test_no_checkpoint(tmp_path):
    assert Checkpointer(tmp_path / "none").newest() is None


def test_another_model_is_refused(tmp_path):
    save_two(tmp_path, World(0, 1, torch.device("cpu"), None))
    model = nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 3))
    tensors = {f"model.{name}": p for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"has model.0.weight as \(5, 7\), this run as \(4, 7\)"):
        Checkpointer(tmp_path).load(tmp_path / "step-2", tensors)
    with pytest.raises(ValueError, match="has model.9 as None"):
        Checkpointer(tmp_path).load(tmp_path / "step-2", {"model.9": torch.zeros(2)})


def test_another_version_is_named_and_left_where_it_is(tmp_path, monkeypatch):
    Checkpointer(tmp_path).save(1, {"a": torch.zeros(1)}, {})
    monkeypatch.setattr("lean_trl.train.checkpoint_files.FORMAT", 2)
    with pytest.raises(ValueError, match="step-1 is of format 1, this version reads 2"):
        Checkpointer(tmp_path).newest()
    assert (tmp_path / "step-1").is_dir()


def test_the_manifest_says_what_is_there(tmp_path):
    on_ranks(2, lambda w: save_two(tmp_path, w))
    manifest = read_manifest(tmp_path / "step-2")
    assert manifest["step"] == 2 and manifest["state"] == {"seen": 2}
    assert set(manifest["files"]) == {"shard-00000.safetensors", "shard-00001.safetensors"}
    for name, entry in manifest["files"].items():
        assert (tmp_path / "step-2" / name).stat().st_size == entry["bytes"]


def killed_at(point: str, folder: Path) -> None:
    def event(at: str) -> None:
        if at == point:
            os.kill(os.getpid(), signal.SIGKILL)

    values = {"a": torch.full((64,), 2.0), "b": torch.full((8,), 2.0)}
    Checkpointer(folder, keep=1, event=event).save(2, values, {"seen": 2})


@pytest.mark.parametrize("point", POINTS)
def test_kill_9_at_any_point_of_a_save(point, tmp_path):
    first = {"a": torch.full((64,), 1.0), "b": torch.full((8,), 1.0)}
    Checkpointer(tmp_path, keep=1).save(1, first, {"seen": 1})
    process = multiprocessing.get_context("fork").Process(target=killed_at, args=(point, tmp_path))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL

    checkpointer = Checkpointer(tmp_path, keep=1)
    path = checkpointer.newest()
    expected = 2 if point in ("after_rename", "clean_up") else 1
    assert path == tmp_path / f"step-{expected}"
    tensors = {"a": torch.zeros(64), "b": torch.zeros(8)}
    assert checkpointer.load(path, tensors) == {"seen": expected}
    assert all((tensor == expected).all() for tensor in tensors.values())
    checkpointer.save(3, tensors, {"seen": 3})  # and the run goes on
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]


def test_an_error_on_a_rank_leaves_no_checkpoint_and_reaches_all(tmp_path):
    def fail(world: World) -> None:
        def event(point: str) -> None:
            if point == "before_manifest":
                raise OSError("disk full")

        Checkpointer(tmp_path, group=world.group, event=event).save(1, {"a": torch.zeros(3)}, {})

    with pytest.raises(OSError, match="step-1.partial was not written: rank 0: .*disk full"):
        on_ranks(2, fail)
    assert Checkpointer(tmp_path).newest() is None


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path):
    def event(point: str) -> None:
        raise OSError("disk full")

    checkpointer = Checkpointer(tmp_path, background=True, event=event)
    checkpointer.save(1, {"a": torch.zeros(3)}, {})
    with pytest.raises(OSError, match="disk full"):
        checkpointer.wait()
    checkpointer.wait()


def test_a_save_in_the_background_keeps_the_values_of_its_moment(tmp_path):
    values = {"a": torch.ones(1000)}
    state = {"seen": [1]}
    checkpointer = Checkpointer(tmp_path, background=True)
    checkpointer.save(1, values, state)
    values["a"].zero_()
    state["seen"].append(2)
    checkpointer.wait()
    loaded = {"a": torch.zeros(1000)}
    assert checkpointer.load(tmp_path / "step-1", loaded) == {"seen": [1]}
    assert (loaded["a"] == 1).all()


def test_a_dry_run_leaves_nothing_and_fails_early(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    on_ranks(2, lambda w: Checkpointer(folder, group=w.group).dry_run(1))
    assert list(folder.iterdir()) == []

    def elsewhere(
        world: World,
    ) -> None:  # rank 1 writes to the folder of rank 0 but looks in its own
        checkpointer = Checkpointer(folder, group=world.group)
        write = checkpointer._write

        def write_and_move(*arguments, **options):
            write(*arguments, **options)
            if world.rank == 1:
                checkpointer.folder = tmp_path

        checkpointer._write = write_and_move
        checkpointer.dry_run(1)

    with pytest.raises(ValueError, match=r"ranks \[1\] do not see the checkpoints in"):
        on_ranks(2, elsewhere)
    full = partial(shutil._ntuple_diskusage, 100, 100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full(2**30))
    with pytest.raises(ValueError, match=r"a checkpoint takes 3.0 GiB, and .* has 1.0 GiB left"):
        Checkpointer(folder).dry_run(3 * 2**30)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match="was not written"):
        Checkpointer(file).dry_run(1)
