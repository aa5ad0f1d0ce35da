"""Evaluation counts each token once, however rows are batched and dealt to ranks."""

import math
import resource

import numpy as np
import pytest
import torch

from lean_trl.config import LossConfig
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.data.plan import Window
from lean_trl.train.evaluate import evaluate
from lean_trl.train.methods import METHODS
from lean_trl.types import UNITS, Example
from tests.ranks import on_ranks

from .stubs import Table

SFT = METHODS["sft"].bind(LossConfig(loss_type="nll"))
ROWS = [[0, 1, 1, 1, 1], [0, 2, 2], [0, 5]]  # the id is the loss of the token


def model():
    return Table(-torch.arange(6.0))


def windows(rank: int, size: int, batch_size: int, rows=ROWS) -> list[Window]:
    """batch_size rows on each rank at a time; ranks without any have a filler."""
    made = []
    for first in range(0, len(rows), batch_size * size):
        parts = [rows[first + r * batch_size : first + (r + 1) * batch_size] for r in range(size)]
        whole = [build_batch([Example(row) for row in part]) for part in parts if part]
        totals = {unit: sum(batch.totals[unit] for batch in whole) for unit in UNITS}
        mine = [Example(row) for row in parts[rank]]
        made.append(Window([build_batch(mine) if mine else filler_batch()], totals, 0.0))
    return made


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_each_row_once_with_its_own_weight(size, batch_size):
    results = on_ranks(
        size,
        lambda w: evaluate(model(), windows(w.rank, size, batch_size), SFT, group=w.group),
    )
    for metrics in results:
        assert metrics["eval_loss"] == pytest.approx(13 / 7, abs=1e-6)
        assert math.exp(metrics["eval_loss"]) == pytest.approx(6.405409, abs=1e-5)


def test_the_training_mode_comes_back():
    for training in (True, False):
        ours = model().train(training)
        evaluate(ours, windows(0, 1, 3), SFT)
        assert ours.training is training


def test_nothing_to_score_is_an_error():
    nothing = [build_batch([Example([1, 2], scored=[False, False])])]
    with pytest.raises(ValueError, match="no tokens to score"):
        evaluate(model(), [Window(nothing, dict.fromkeys(UNITS, 0), 0.0)], SFT)


def test_memory_is_flat_over_200_batches():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 6, 20_000).tolist() for _ in range(4)]
    ours = model()
    peaks = []

    def many():
        for index in range(200):
            if index in (20, 199):
                peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            yield from windows(0, 1, 4, rows)

    evaluate(ours, many(), SFT)
    assert peaks[1] - peaks[0] < 8 << 10  # KiB; one batch's log-probs take 0.3 MiB
