"""Small cases of training on several ranks that users have met, with the numbers worked out."""

import json
from pathlib import Path

import pytest
import torch

from lean_trl.config import config_from_dict
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.techniques.shard import Precision, shard_model
from lean_trl.train import loop
from lean_trl.train.distributed import make_mesh
from lean_trl.train.step import train_step
from lean_trl.types import Example
from tests.ranks import on_ranks
from tests.techniques.test_shard import SFT, check_equal, tiny, two_steps, windows

from .golden import model_folder
from .stubs import Table

UNEQUAL = {"tokens": 8, "processed": 10, "sequences": 2, "pairs": 0, "groups": 0}


def test_ranks_with_unequal_supervised_tokens():
    """Six tokens of loss 1 and two of loss 3 are 12 / 8 = 1.5, not the mean of means 2."""

    def work(world):
        model = Table([0.0, -1.0, 0.0, -3.0])
        rows = ([0, 1, 1, 1, 1, 1, 1], [0, 3, 3])
        batch = build_batch([Example(rows[world.rank])])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return train_step(
            model, [batch], SFT, optimizer, totals=UNEQUAL, max_grad_norm=None, group=world.group
        )

    for report in on_ranks(2, work):
        assert report.loss.item() == pytest.approx(1.5)
        assert report.grad_norm.item() == pytest.approx((0.75**2 + 0.25**2) ** 0.5)


@pytest.mark.parametrize("kind", ["fsdp", None])
def test_a_rank_with_nothing_to_learn_and_then_all_of_them(kind):
    def work(world):
        model = tiny(tied=False)
        if kind:
            shard_model(model, make_mesh(kind, None, "cpu"), Precision())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        nothing = build_batch([Example([1, 2, 3], scored=[False] * 3)])
        learnt = build_batch([Example([1, 2, 3])]) if world.rank == 0 else nothing
        reports = []
        for batch, tokens in ((learnt, 2), (nothing, 0), (filler_batch(), 0)):
            before = [p.detach().clone() for p in model.parameters()]
            totals = {**UNEQUAL, "tokens": tokens}
            report = train_step(
                model, [batch], SFT, optimizer, totals=totals, max_grad_norm=1.0, group=world.group
            )
            same = [
                torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True)
            ]
            reports.append((report.loss.item(), report.grad_norm.item(), all(same)))
        return reports

    for first, *rest in on_ranks(2, work):
        assert first[0] > 3 and first[1] > 0 and not first[2]
        assert rest == [(0.0, 0.0, True)] * 2  # no decay step either


@pytest.mark.parametrize("kind", ["fsdp", None])
def test_only_the_first_layer_is_trained(kind):
    def work(world, kind=kind):
        model = tiny(tied=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".layers.0." in name)
        if kind:
            shard_model(model, make_mesh(kind, None, "cpu"), Precision())
        steps = two_steps(model, windows(world.size)[world.rank], world)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert len(frozen) > 9 and all(p.grad is None for p in frozen)
        return steps

    [reference] = on_ranks(1, lambda world: work(world, None))
    for steps in on_ranks(2, work):
        check_equal(steps, reference)


def run(folder: Path, ranks: int, rows: int, **train) -> list[dict]:
    """One epoch over `rows` rows on several ranks; what each step logged."""
    folder.mkdir(exist_ok=True)
    lines = [{"text": f"row {n} " + "word " * (n % 3 + 1)} for n in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = config_from_dict(
        {
            "output_dir": str(folder / "out"),
            "model": {"path": str(model_folder("qwen3", folder))},
            "data": {"path": str(folder / "rows.jsonl"), "shuffle": False},
            "train": {"micro_batch_size": 1, "learning_rate": 1.0, "max_grad_norm": 1e-3, **train},
            "checkpoint": {"export_hf": False},
            "logging": {"progress": False},
        }
    )
    on_ranks(ranks, lambda world: loop.train_as(world, config))
    text = (folder / "out" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_steps_and_learning_rate_of_five_rows(tmp_path):
    """Accumulation 2 on one rank or batch 2 on two: 3 steps, the last with one row."""
    one = run(tmp_path / "one", 1, 5, gradient_accumulation_steps=2)
    two = run(tmp_path / "two", 2, 5, batch_size=2)
    for lines in (one, two):
        rates = [line["learning_rate"] for line in lines]
        assert rates == pytest.approx([1.0, 2 / 3, 1 / 3], abs=1e-6)
        assert [line["epoch"] for line in lines] == pytest.approx([0.4, 0.8, 1.0])
    for ours, theirs in zip(two, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["num_tokens"] == theirs["num_tokens"]


def test_fewer_rows_than_ranks(tmp_path):
    [line] = run(tmp_path / "two", 2, 1)
    [alone] = run(tmp_path / "one", 1, 1)
    assert line["loss"] == pytest.approx(alone["loss"], rel=1e-6)
