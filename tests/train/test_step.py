"""The step on a stub model whose log-probs are its parameters: every number by hand."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.train.methods import METHODS
from lean_trl.train.step import count_totals, reduce_terms, train_step
from lean_trl.types import Batch, Example, LossTerms, Method, Metric, Scores, Term


class Table(nn.Module):
    """logprobs of scored token u = -losses[target]: the id chooses the loss."""

    def __init__(self, losses):
        super().__init__()
        self.losses = nn.Parameter(torch.tensor(losses))

    def forward(self, batch, want=()):
        return Scores(logprobs=-self.losses[batch.targets])


def rows(*ids):
    return build_batch([Example([0, *row]) for row in ids])


SFT = Method(
    "sft", "tokens", "sft", lambda s, b, loss: LossTerms((Term(-s.logprobs, None, "tokens"),))
).bind(None)


def run(model, window, **kwargs):
    optimizer = torch.optim.SGD(model.parameters(), lr=kwargs.pop("lr", 0.1), weight_decay=0.5)
    totals = kwargs.pop("totals", None) or count_totals(window)
    return train_step(model, window, SFT, optimizer, totals=totals, max_grad_norm=None, **kwargs)


def test_mean_over_tokens_of_the_window_not_mean_of_means():
    losses = [0.0, 2.0, 1.0, 0.5, 0.5, 1.0, 4.0]
    report = run(Table(losses), [rows([1, 2, 3, 4, 5]), rows([6])])
    assert report.loss.item() == pytest.approx(
        1.5, abs=1e-6
    )  # 2.5: mean of means; 9: never divided
    report = run(Table(losses), [rows([1, 2, 3, 4, 5], [6])])
    assert report.loss.item() == pytest.approx(1.5, abs=1e-6)


def test_a_micro_batch_with_nothing_to_learn():
    nothing = build_batch([Example([0, 1, 2], scored=[False] * 3)])
    model = Table([0.0, 1.0, 2.0, 3.0])
    report = run(model, [rows([1, 2, 3]), nothing, filler_batch()])
    assert report.loss.item() == pytest.approx(2.0)
    assert math.isfinite(report.grad_norm) and report.metrics["padding_fraction"] == pytest.approx(
        1 / 8
    )


def test_a_window_with_nothing_to_learn_leaves_the_weights_alone():
    nothing = build_batch([Example([0, 1, 2], scored=[False] * 3)])
    model = Table([0.0, 1.0, 2.0])
    before = model.losses.detach().clone()
    report = run(model, [nothing, nothing])
    assert report.loss.item() == 0.0 and report.grad_norm.item() == 0.0
    assert torch.equal(model.losses, before)  # no decay step either
    assert model.losses.grad is None


def test_terms_have_their_own_denominators():
    values = torch.tensor([1.0, 2.0])
    terms = LossTerms(
        (Term(values, torch.tensor([1.0, 0.5]), "tokens", 2.0), Term(values, None, "sequences"))
    )
    assert reduce_terms(terms, {"tokens": 4, "sequences": 3}).item() == pytest.approx(
        2 * 2 / 4 + 3 / 3
    )


def test_clipping_scales_the_update_and_reports_the_norm_before():
    model = Table([0.0, 1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window = [rows([1])]
    report = train_step(
        model, window, SFT, optimizer, totals=count_totals(window), max_grad_norm=0.25
    )
    assert report.grad_norm.item() == pytest.approx(1.0)
    assert model.losses[1].item() == pytest.approx(0.75, abs=1e-5)


def test_window_statistics_are_computed_once_over_the_window():
    def objective(scores: Scores, batch: Batch, loss: None) -> LossTerms:
        shift = batch.extras["advantages"]
        return LossTerms(
            (Term(-scores.logprobs - shift, None, "tokens"),), {"shift": Metric(shift)}
        )

    def mean_logprob(score, batches, group):
        mean = torch.cat([score(batch).logprobs for batch in batches]).mean()
        assert not mean.requires_grad
        return [b.with_extras(advantages=mean.expand(b.num_units)) for b in batches]

    statistics = {"window_statistics": lambda loss: mean_logprob}
    method = Method("m", "tokens", "sft", objective, **statistics).bind(None)
    window = [rows([1, 2]), rows([3])]
    model = Table([0.0, 1.0, 2.0, 6.0])
    report = train_step(
        model,
        window,
        method,
        torch.optim.SGD(model.parameters(), 0.1),
        totals=count_totals(window),
        max_grad_norm=0,
    )
    assert report.metrics["shift"].item() == pytest.approx(-3.0)
    assert report.loss.item() == pytest.approx(6.0)
    assert report.metrics["extra_forward_tokens"].item() == 5


def test_sft_method_logs_token_means():
    scores = Scores(
        torch.tensor([-1.0, -3.0]), torch.tensor([0.5, 1.5]), torch.tensor([True, False])
    )

    class Loss:
        loss_type = None

    terms = METHODS["sft"].bind(Loss).objective(scores, None)
    assert reduce_terms(terms, {"tokens": 2}).item() == pytest.approx(2.0)
    assert (
        terms.metrics["entropy"].values.mean() == 1.0
        and terms.metrics["mean_token_accuracy"].values.mean() == 0.5
    )


def test_batches_are_the_split_of_one_window():
    examples = [Example(np.arange(1, n + 2)) for n in (9, 3, 6, 1)]
    cut = partial(map, lambda part: build_batch(list(part)))
    whole = count_totals([build_batch(examples)])
    assert whole == count_totals(list(cut([examples[:1], examples[1:3], examples[3:]])))
    assert whole["tokens"] == 19 and whole["sequences"] == 4
