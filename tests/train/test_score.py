"""The frozen reference: a second model, a moving one, log-probs on disk."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.data.plan import Window
from lean_trl.data.store import StoreWriter, load_store
from lean_trl.model import load_model
from lean_trl.train.distributed import World
from lean_trl.train.precompute import fingerprint_model, load_logprobs, write_logprobs
from lean_trl.train.score import freeze, move_reference, referenced, with_ref_logprobs
from lean_trl.types import Example

from ..ranks import on_ranks
from .stubs import Table

MODEL = Path(__file__).parents[1] / "golden" / "models" / "qwen3"
ALONE = World(0, 1, torch.device("cpu"), None)


def test_a_window_is_scored_without_gradients_before_it_is_handed_out():
    reference = freeze(load_model(MODEL))
    batches = [build_batch([Example([5, 6, 7]), Example([8, 9])]), filler_batch()]
    mismatched = build_batch([Example([5, 9])])
    window = Window([replace(batches[0], mismatched=mismatched), batches[1]], {"tokens": 3}, 0.5)
    (scored,) = referenced([window], reference)
    first, filler = scored.batches
    expected = reference(batches[0]).logprobs
    torch.testing.assert_close(first.extras["ref_logprobs"], expected)
    assert not first.extras["ref_logprobs"].requires_grad
    assert filler.extras["ref_logprobs"].shape == (0,)
    torch.testing.assert_close(
        first.mismatched.extras["ref_logprobs"], reference(mismatched).logprobs
    )
    assert (scored.totals, scored.epoch) == (window.totals, window.epoch)
    assert not any(weight.requires_grad for weight in reference.parameters())


def test_without_a_reference_windows_pass_as_they_are():
    window = Window([filler_batch()], {"tokens": 0}, 1.0)
    assert list(referenced([window], None)) == [window]


def test_move_reference_mixes_every_weight_and_leaves_the_policy():
    torch.manual_seed(0)
    reference, policy = nn.Linear(3, 2), nn.Linear(3, 2)
    before = [weight.detach().clone() for weight in (*reference.parameters(), *policy.parameters())]
    move_reference(reference, policy, 0.6)
    after = [*reference.parameters(), *policy.parameters()]
    for ours, old, theirs in zip(after[:2], before[:2], before[2:], strict=True):
        torch.testing.assert_close(ours.detach(), 0.6 * theirs + 0.4 * old)
    for now, old in zip(after[2:], before[2:], strict=True):
        assert torch.equal(now.detach(), old)
    move_reference(reference, policy, 1.0)
    torch.testing.assert_close(reference.weight, policy.weight)


# -- on disk --


@pytest.fixture
def store(tmp_path):
    """Five pairs of unequal length, partly scored, without their first token."""
    rng = np.random.default_rng(2)
    folder = tmp_path / "store"
    folder.mkdir()
    with StoreWriter(folder, ["rows.jsonl"]) as writer:
        for pair in range(5):
            item = []
            for length in rng.integers(4, 10, 2):
                scored = rng.random(length) < 0.6
                scored[-1] = True
                item.append((rng.integers(0, 40, length), scored))
            writer.add(item, file=0, row=pair, extras={"margin": float(pair)})
    whole = load_store(folder)
    return whole.select(np.arange(10), whole.start + 1, whole.stop)


OFFSETS = np.arange(0, 11, 2)
MADE_FROM = {"model": "abc", "max_length": 256}


def table():
    return Table(-torch.rand(40, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("items", [1, 2, 5, 9])
def test_a_stored_reference_is_the_second_model(tmp_path, store, items):
    model = table()
    assert load_logprobs(tmp_path / "ref", store, MADE_FROM) is None
    write_logprobs(tmp_path / "ref", store, OFFSETS, model, MADE_FROM, ALONE, items_per_batch=items)
    scored = load_logprobs(tmp_path / "ref", store, MADE_FROM)
    examples = [scored[s] for s in range(len(scored))]
    batch = build_batch(examples)
    expected = with_ref_logprobs(model, build_batch([store[s] for s in range(len(store))]))
    assert torch.equal(batch.extras["ref_logprobs"], expected.extras["ref_logprobs"])
    assert torch.equal(batch.extras["margin"], expected.extras["margin"])
    assert batch.num_pairs == 5 and scored.paired


def test_ranks_share_the_work_and_write_one_file(tmp_path, store):
    write_logprobs(tmp_path / "1", store, OFFSETS, table(), MADE_FROM, ALONE, items_per_batch=2)

    def work(world):
        write_logprobs(tmp_path / "2", store, OFFSETS, table(), MADE_FROM, world, items_per_batch=2)

    on_ranks(2, work)
    alone, shared = (np.load(tmp_path / n / "logprobs.npy") for n in "12")
    assert len(alone) == store.count_scored().sum()
    assert np.array_equal(alone, shared)


CHANGES = {
    "model": lambda store: (store, {**MADE_FROM, "model": "abd"}),
    "max_length": lambda store: (store, {**MADE_FROM, "max_length": 512}),
    "tokens": lambda store: (replace(store, tokens=store.tokens + 1), MADE_FROM),
    "sequences": lambda store: (store.select(np.arange(8)), MADE_FROM),
    "template": lambda store: (store, {**MADE_FROM, "template": "new"}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_stored_reference_is_refused_after_any_change(tmp_path, store, what):
    write_logprobs(tmp_path / "ref", store, OFFSETS, table(), MADE_FROM, ALONE, items_per_batch=4)
    with pytest.raises(ValueError, match=f"made with another .*{what}.*scripts/score.py"):
        load_logprobs(tmp_path / "ref", *CHANGES[what](store))


def test_what_is_scored_and_where_sequences_end_is_part_of_the_key(tmp_path, store):
    write_logprobs(tmp_path / "ref", store, OFFSETS, table(), MADE_FROM, ALONE, items_per_batch=4)
    flipped = store.scored.copy()
    flipped[int(store.start[0]) + 1] ^= True
    for changed in (
        replace(store, scored=flipped),
        replace(store, stop=store.stop - np.eye(10, dtype=np.int64)[3]),
    ):
        with pytest.raises(ValueError, match="another tokens"):
            load_logprobs(tmp_path / "ref", changed, MADE_FROM)


def test_an_interrupted_write_does_not_count(tmp_path, store):
    write_logprobs(tmp_path / "ref", store, OFFSETS, table(), MADE_FROM, ALONE, items_per_batch=4)

    class Broken(Table):
        def forward(self, batch, want=()):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        broken = Broken(torch.zeros(40))
        write_logprobs(
            tmp_path / "ref", store, OFFSETS, broken, MADE_FROM, ALONE, items_per_batch=4
        )
    assert load_logprobs(tmp_path / "ref", store, MADE_FROM) is None


def test_model_fingerprint_sees_weights_and_config_but_not_the_place(tmp_path):
    for name in ("a", "b"):
        shutil.copytree(MODEL, tmp_path / name)
    one = fingerprint_model(tmp_path / "a")
    assert one == fingerprint_model(tmp_path / "b")
    weights = tmp_path / "a" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1 if len(data) < 1 << 16 else 0
    data[40_000] ^= 1
    weights.write_bytes(data)
    assert fingerprint_model(tmp_path / "a") != one
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    config["rope_theta"] = 1.0
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    assert fingerprint_model(tmp_path / "b") != one
