"""Objectives of DPO, reward models and KTO through the step: any split of a window is the same."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lean_trl.config import config_from_dict
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.loss_config import LOSS_TYPES
from lean_trl.losses import DPO_LOSSES, KTO_LOSSES, dpo_loss, kto_loss
from lean_trl.model import load_model
from lean_trl.train.methods import METHODS
from lean_trl.train.score import with_ref_logprobs
from lean_trl.train.step import count_totals, reduce_terms, train_step
from lean_trl.types import Example, Scores

from ..ranks import on_ranks
from .stubs import RewardTable, Table

MODEL = Path(__file__).parents[1] / "golden" / "models" / "qwen3"
VOCAB = 40


def bound(method, **settings):
    loss = config_from_dict({"method": method, "loss": settings}).loss
    return METHODS[method].bind(loss)


def draw(seed=0, num_pairs=6):
    """Pairs of unequal lengths over VOCAB tokens, with margins."""
    rng = np.random.default_rng(seed)
    examples = []
    for pair in range(num_pairs):
        prompt = rng.integers(1, VOCAB, rng.integers(1, 6)).tolist()
        margin = float(rng.random())
        for _ in range(2):
            answer = rng.integers(1, VOCAB, rng.integers(1, 8)).tolist()
            scored = [False] * len(prompt) + [True] * len(answer)
            row = Example(prompt + answer, scored, {"margin": margin}, pair=pair)
            examples.append(row)
    return examples


def tables(seed=1):
    """Log-probs of policy and reference."""
    generator = torch.Generator().manual_seed(seed)
    values = -3 * torch.rand(2, VOCAB, dtype=torch.float64, generator=generator)
    return Table(values[0]), Table(values[1])


def split(examples, cuts):
    """Micro-batches of so many pairs each; 0 makes a filler."""
    batches, first = [], 0
    for pairs in cuts:
        part = examples[first : first + 2 * pairs]
        batches.append(build_batch(part) if part else filler_batch())
        first += 2 * pairs
    assert first == len(examples)
    return batches


def step(model, window, method, group=None, lr=1.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    totals = count_totals(window, group)
    return train_step(
        model, window, method, optimizer, totals=totals, max_grad_norm=None, group=group
    )


SUMS = {
    "aot": {"loss_type": "aot", "label_smoothing": 0.1},
    "aot_unpaired": {"loss_type": "aot_unpaired"},
    "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "wpo": {"loss_type": ["hinge", "sft"], "use_weighting": True},
    "ld": {"loss_type": ["sigmoid", "sft"], "ld_alpha": 0.3},
    "divergence": {"loss_type": "sigmoid_norm", "f_divergence_type": "js_divergence"},
    "several statistics": {"loss_type": ["aot", "aot_unpaired", "robust"], "label_smoothing": 0.2},
    "orpo": {"loss_type": "orpo"},
}


@pytest.mark.parametrize("name", SUMS)
def test_any_split_of_the_window_is_the_same_step(name):
    method = bound("dpo", **SUMS[name])
    results = []
    for cuts in ((6,), (1,) * 6, (4, 2), (0, 3, 0, 3)):
        policy, reference = tables()
        window = [with_ref_logprobs(reference, batch) for batch in split(draw(), cuts)]
        report = step(policy, window, method)
        results.append((report.loss, report.grad_norm, policy.logprobs.detach()))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["aot_unpaired", "several statistics", "mpo"])
def test_two_ranks_are_one(name):
    method = bound("dpo", **SUMS[name])
    policy, reference = tables()
    window = [with_ref_logprobs(reference, batch) for batch in split(draw(), (6,))]
    alone = step(policy, window, method)

    def work(world):
        mine, ref = tables()
        parts = split(draw(), (4, 2, 0, 0))[world.rank :: 2]
        parts = [with_ref_logprobs(ref, batch) for batch in parts]
        return step(mine, parts, method, world.group), mine.logprobs.detach()

    for report, weights in on_ranks(2, work):
        torch.testing.assert_close(report.loss, alone.loss)
        torch.testing.assert_close(weights, policy.logprobs.detach(), rtol=1e-6, atol=1e-7)
        assert report.metrics["rewards/margins"].item() == pytest.approx(
            alone.metrics["rewards/margins"].item()
        )


def test_statistics_cost_one_forward_of_the_window_and_others_none():
    _, reference = tables()
    window = [with_ref_logprobs(reference, batch) for batch in split(draw(), (2, 4))]
    tokens = sum(batch.num_real_tokens for batch in window)
    assert step(tables()[0], window, bound("dpo", loss_type="aot")).metrics[
        "extra_forward_tokens"
    ].item() == pytest.approx(tokens)
    assert "extra_forward_tokens" not in step(tables()[0], window, bound("dpo")).metrics


# -- what is summed --


def sums(table, examples, weights=None):
    """Summed log-probs of every completion, the slow way."""
    totals = []
    for i, example in enumerate(examples):
        ids = example.input_ids[example.scored]
        scale = np.ones(len(ids)) if weights is None else weights[i]
        totals.append(
            sum(table.logprobs[int(t)].item() * w for t, w in zip(ids, scale, strict=True))
        )
    return torch.tensor(totals, dtype=torch.float64)


def test_mpo_by_hand():
    """0.8 sigmoid + 0.2 bco over 6 pairs, and the likelihood over the tokens of the chosen."""
    examples = draw()
    policy, reference = tables()
    total, ref = sums(policy, examples), sums(reference, examples)
    pairs = [total[0::2], total[1::2], ref[0::2], ref[1::2]]
    expected = 0.8 * dpo_loss(*pairs).losses.mean()
    expected += 0.2 * dpo_loss(*pairs, loss_type="bco_pair").losses.mean()
    expected -= total[0::2].sum() / sum(e.num_scored for e in examples[0::2])
    window = [with_ref_logprobs(reference, batch) for batch in split(examples, (2, 4))]
    report = step(policy, window, bound("dpo", **SUMS["mpo"]))
    assert report.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert report.metrics["rewards/chosen"].item() == pytest.approx(
        (0.1 * (total - ref)[0::2]).mean().item(), rel=1e-5
    )
    assert report.metrics["logps/rejected"].item() == pytest.approx(total[1::2].mean().item())
    ahead = ((total - ref)[0::2] > (total - ref)[1::2]).double().mean().item()
    assert report.metrics["rewards/accuracies"].item() == pytest.approx(ahead)


def test_ld_alpha_weighs_the_longer_tail_of_policy_and_reference_but_not_the_likelihood():
    examples = draw()
    policy, reference = tables()
    lengths = np.array([e.num_scored for e in examples]).reshape(-1, 2)
    shared = np.repeat(lengths.min(1), 2)
    weights = [
        np.where(np.arange(example.num_scored) < n, 1.0, 0.3)
        for example, n in zip(examples, shared, strict=True)
    ]
    total, ref = sums(policy, examples, weights), sums(reference, examples, weights)
    expected = dpo_loss(total[0::2], total[1::2], ref[0::2], ref[1::2]).losses.mean()
    expected -= sums(policy, examples)[0::2].sum() / lengths[:, 0].sum()
    window = [with_ref_logprobs(reference, batch) for batch in split(examples, (6,))]
    report = step(policy, window, bound("dpo", **SUMS["ld"]))
    assert report.loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_use_weighting_weighs_every_loss_of_the_sum_by_the_pair():
    examples = draw()
    policy, reference = tables()
    total, ref = sums(policy, examples), sums(reference, examples)
    count = torch.tensor([e.num_scored for e in examples])
    # The stub's log sum p^2 is half of the log-prob.
    weights = (total / 2 / count).reshape(-1, 2).sum(1).exp()
    hinge = dpo_loss(total[0::2], total[1::2], ref[0::2], ref[1::2], loss_type="hinge").losses
    expected = (hinge * weights).mean() - (total[0::2] * weights).sum() / count[0::2].sum()
    window = [with_ref_logprobs(reference, batch) for batch in split(examples, (3, 3))]
    report = step(policy, window, bound("dpo", **SUMS["wpo"]))
    assert report.loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_mean_token_accuracy_is_of_the_chosen_and_entropy_of_both():
    batch = split(draw(), (6,))[0]
    top1 = batch.sequence_ids % 2 == 0  # right on every chosen token, wrong on every rejected one
    logprobs = torch.zeros(batch.num_units)
    scores = Scores(logprobs, entropy=torch.arange(batch.num_units).float(), top1=top1)
    batch = batch.with_extras(ref_logprobs=logprobs)
    metrics = bound("dpo").objective(scores, batch).metrics
    accuracy = metrics["mean_token_accuracy"]
    assert (accuracy.values * accuracy.weights).sum() == accuracy.weights.sum() == top1.sum()
    assert metrics["entropy"].weights is None


def test_rewards_are_log_ratios_wherever_the_loss_with_a_reference_stands():
    policy, reference = tables()
    batch = with_ref_logprobs(reference, split(draw(), (6,))[0])
    orders = (["sigmoid", "sft"], ["sft", "sigmoid"])
    first, second = (
        bound("dpo", loss_type=order).objective(policy(batch, ()), batch).metrics
        for order in orders
    )
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert torch.equal(first[name].values, second[name].values), name


# -- reward models --


def test_reward_by_hand_with_margin_and_centring():
    examples = draw(num_pairs=3)
    model = RewardTable(torch.linspace(-2, 2, VOCAB, dtype=torch.float64))
    rewards = [model.rewards[int(e.input_ids[-1])].item() for e in examples]
    expected = 0.0
    for pair in range(3):
        chosen, rejected = rewards[2 * pair : 2 * pair + 2]
        expected += math.log1p(math.exp(rejected - chosen + examples[2 * pair].extras["margin"]))
        expected += 0.01 * (chosen + rejected) ** 2
    method = bound("reward", center_rewards_coefficient=0.01)
    for cuts in ((3,), (1, 2), (1, 0, 1, 1)):
        report = step(copy.deepcopy(model), split(examples, cuts), method)
        assert report.loss.item() == pytest.approx(expected / 3, rel=1e-6)
        assert report.metrics["min_reward"].item() == pytest.approx(min(rewards))
        assert report.metrics["max_reward"].item() == pytest.approx(max(rewards))
        assert report.metrics["mean_reward"].item() == pytest.approx(sum(rewards) / 6)


# -- KTO --


def unpaired(cuts):
    """Completions with labels, in micro-batches; each carries the completions rotated by one."""
    rows = [replace(e, pair=-1, extras={"label": i % 3 == 0}) for i, e in enumerate(draw())]
    answers = [e.input_ids[e.scored] for e in rows]
    rotated = []
    for row, answer in zip(rows, [answers[-1], *answers[:-1]], strict=True):
        prompt = row.input_ids[~row.scored]
        scored = np.arange(len(prompt) + len(answer)) >= len(prompt)
        rotated.append(Example(np.concatenate([prompt, answer]), scored))
    batches, first = [], 0
    for count in cuts:
        part, other = rows[first : first + count], rotated[first : first + count]
        batch = build_batch(part) if part else filler_batch()
        mismatched = build_batch(other) if part else filler_batch()
        batches.append(replace(batch, mismatched=mismatched))
        first += count
    return rows, batches


@pytest.mark.parametrize("seed", [1, 2])  # the mean log-ratio is below 0, above 0
@pytest.mark.parametrize("cuts", [(12,), (1,) * 12, (5, 0, 7)])
def test_kto_by_hand_for_any_split(cuts, seed):
    rows, batches = unpaired(cuts)
    policy, reference = tables(seed)
    ratio = sums(policy, rows) - sums(reference, rows)
    # Rotation moves completions between prompts; a table of tokens scores them as before.
    kl = max(ratio.mean().item(), 0.0)
    labels = torch.tensor([row.extras["label"] for row in rows])
    settings = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.7}
    expected = kto_loss(ratio, torch.zeros_like(ratio), labels, kl, **settings).losses.mean()
    window = [with_ref_logprobs(reference, batch) for batch in batches]
    report = step(policy, window, bound("kto", **settings))
    assert report.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert report.metrics["kl"].item() == pytest.approx(kl, rel=1e-6)
    assert report.metrics["rewards/chosen"].item() == pytest.approx(
        0.5 * ratio[labels].mean().item(), rel=1e-6
    )
    assert report.metrics["rewards/margins"].item() == pytest.approx(
        0.5 * (ratio[labels].mean() - ratio[~labels].mean()).item(), rel=1e-5
    )
    extra = sum(batch.mismatched.num_real_tokens for batch in batches)
    assert report.metrics["extra_forward_tokens"].item() == extra


def test_kto_on_two_ranks_has_the_kl_of_one():
    method = bound("kto")
    policy, reference = tables(seed=2)
    alone = step(policy, [with_ref_logprobs(reference, b) for b in unpaired((12,))[1]], method)
    assert alone.metrics["kl"].item() > 0

    def work(world):
        mine, ref = tables(seed=2)
        parts = [with_ref_logprobs(ref, b) for b in unpaired((5, 3, 4, 0))[1][world.rank :: 2]]
        return step(mine, parts, method, world.group), mine.logprobs.detach()

    for report, weights in on_ranks(2, work):
        torch.testing.assert_close(report.metrics["kl"], alone.metrics["kl"])
        torch.testing.assert_close(report.loss, alone.loss)
        torch.testing.assert_close(weights, policy.logprobs.detach(), rtol=1e-6, atol=1e-7)


def test_kto_without_kl_scores_nothing_more():
    _, batches = unpaired((12,))
    policy, reference = tables()
    window = [with_ref_logprobs(reference, replace(b, mismatched=None)) for b in batches]
    report = step(policy, window, bound("kto", loss_type="apo_zero_unpaired"))
    assert "extra_forward_tokens" not in report.metrics and "kl" not in report.metrics


# -- a real model: layouts, step 0 --


def layout_pairs():
    """Prompts of 2, 5, 3 tokens; chosen of 4, 1, 6; rejected of 2, 7, 3."""
    rng = np.random.default_rng(4)
    examples = []
    for pair, (p, c, r) in enumerate(((2, 4, 2), (5, 1, 7), (3, 6, 3))):
        prompt = rng.integers(0, 500, p).tolist()
        for n in (c, r):
            ids = prompt + rng.integers(0, 500, n).tolist()
            examples.append(Example(ids, [False] * p + [True] * n, pair=pair))
    return examples


def test_padding_free_dpo_equals_padded_with_43_tokens_in_place_of_72():
    policy = load_model(MODEL)
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    method, results = bound("dpo"), []
    for layout in ({}, {"padding_free": False}, {"share_prefixes": True}):
        batch = with_ref_logprobs(reference, build_batch(layout_pairs(), **layout))
        policy.zero_grad()
        scores = policy(batch, method.want)
        reduce_terms(method.objective(scores, batch), batch.totals).backward()
        grads = {name: weight.grad.clone() for name, weight in policy.named_parameters()}
        metrics = method.objective(scores, batch).metrics
        logps = torch.cat([metrics["logps/chosen"].values, metrics["logps/rejected"].values])
        results.append((logps, grads, batch.num_tokens))
    assert [tokens for _, _, tokens in results] == [43, 72, 33]
    for logps, grads, _ in results[1:]:
        torch.testing.assert_close(logps, results[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grads, results[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_0_costs_ln_two_and_has_no_rewards(dtype):
    policy = load_model(MODEL, dtype=dtype).train()
    batch = with_ref_logprobs(load_model(MODEL, dtype=dtype), build_batch(layout_pairs()))
    report = step(policy, [batch], bound("dpo"), lr=0.0)
    assert report.loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert report.metrics["rewards/chosen"].item() == report.metrics["rewards/margins"].item() == 0


def test_a_pair_of_equal_answers_is_kept_and_costs_ln_two():
    same = Example([5, 6, 7, 8], [False, False, True, True], pair=0)
    policy, reference = load_model(MODEL), load_model(MODEL)
    with torch.no_grad():
        reference.model.norm.weight.mul_(1.3)
    batch = with_ref_logprobs(reference, build_batch([same, same]))
    report = step(policy, [batch], bound("dpo"))
    assert report.loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert report.metrics["rewards/accuracies"].item() == 0  # a tie is no success


def test_accumulation_changes_nothing_for_a_real_reward_model():
    from lean_trl.model.value_head import RewardModel

    results = []
    for cuts in ((3,), (1, 1, 1), (2, 0, 1)):
        model = load_model(MODEL, kind=RewardModel)
        window = split(layout_pairs(), cuts)
        report = step(model, window, bound("reward"), lr=0.1)
        results.append((report.loss, report.grad_norm, model.score.weight.detach()))
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


# -- settings --


def test_names_of_losses_agree_with_the_tables():
    assert set(LOSS_TYPES["dpo"]) == set(DPO_LOSSES)
    assert set(LOSS_TYPES["kto"]) == set(KTO_LOSSES)
    assert set(METHODS) == set(LOSS_TYPES)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing has no effect on hinge"),
        ({"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "go with nca_pair"),
        ({"loss_type": "simpo", "f_divergence_type": "forward_kl"}, "go with simpo"),
        ({"loss_type": ["sigmoid", "aot"], "use_weighting": True}, "sorted values"),
        ({"loss_type": "exo_pair"}, "exo_pair needs label_smoothing"),
        ({"loss_type": ["sigmoid", "robust"], "label_smoothing": 0.5}, "robust needs label_smooth"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, "discopop_tau must lie in"),
        ({"loss_type": "simpo", "ld_alpha": 0.5}, "ld_alpha is for losses with a reference"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=message):
        bound("dpo", **settings)


def test_a_setting_is_fine_where_one_loss_of_the_sum_reads_it():
    mixed = {"loss_type": ["sigmoid", "sft"], "f_divergence_type": "forward_kl"}
    assert bound("dpo", **mixed, label_smoothing=0.1).reference
    assert not bound("dpo", loss_type=["simpo", "sft"]).reference
