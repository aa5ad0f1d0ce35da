"""Every preference loss: numbers from plain Python, gradients in float64, extremes, window
statistics."""

import math
from math import exp, log, log1p

import pytest
import torch

from lean_trl.losses import (
    DPO_LOSSES,
    F_DIVERGENCES,
    Pairs,
    dpo_loss,
    shared_length_weights,
    wpo_weights,
)

# Policy chosen, rejected, reference chosen, rejected, tokens of both; beta.
PAIRS = [(-12.0, -15.0, -13.0, -14.5, 4, 6), (-9.0, -4.0, -7.5, -5.0, 3, 2)]
BETA = 0.1


def sigma(x):
    return 1 / (1 + exp(-x))


def log_sigma(x):
    return -log1p(exp(-x))


def logistic(x, e=0.0):
    return -(1 - e) * log_sigma(x) - e * log_sigma(-x)


def columns(pairs=PAIRS, dtype=torch.float64):
    *logprobs, n, m = zip(*pairs, strict=True)
    lengths = {"chosen_lengths": torch.tensor(n), "rejected_lengths": torch.tensor(m)}
    return [torch.tensor(values, dtype=dtype) for values in logprobs], lengths


def by_hand(name, c, r, rc, rr, n, m, e=0.1, b=BETA, score=lambda d: d, tau=0.05):
    """The loss of one pair in plain Python floats."""
    dc, dr = c - rc, r - rr
    sc, sr = score(dc), score(dr)
    x = b * (sc - sr)
    odds = [p - log(1 - exp(p)) for p in (c / n, r / m)]
    return {
        "sigmoid": lambda: logistic(x, e),
        "hinge": lambda: max(0.0, 1 - x),
        "ipo": lambda: (sc / n - sr / m - 1 / (2 * b)) ** 2,
        "exo_pair": lambda: sigma(x) * log(sigma(x) / (1 - e)) + sigma(-x) * log(sigma(-x) / e),
        "nca_pair": lambda: (
            -log_sigma(b * dc) - 0.5 * log_sigma(-b * dc) - 0.5 * log_sigma(-b * dr)
        ),
        "robust": lambda: (-(1 - e) * log_sigma(x) + e * log_sigma(-x)) / (1 - 2 * e),
        "bco_pair": lambda: -log_sigma(b * dc) - log_sigma(-b * dr),
        "sppo_hard": lambda: (dc - 1 / (2 * b)) ** 2 + (dr + 1 / (2 * b)) ** 2,
        "apo_zero": lambda: 1 - sigma(b * dc) + sigma(b * dr),
        "apo_down": lambda: sigma(b * dc) + 1 - sigma(b * (dc - dr)),
        "discopop": lambda: (1 - sigma(x / tau)) * -log_sigma(x) + sigma(x / tau) * exp(-x),
        "sigmoid_norm": lambda: logistic(b * (sc / n - sr / m), e),
        "sft": lambda: -c,
        "simpo": lambda: logistic(b * (c / n - r / m) - 0.5, e),
        "cpo": lambda: logistic(b * (c - r), e) - c / n,
        "orpo": lambda: -c / n - b * log_sigma(odds[0] - odds[1]),
    }[name]()


def smoothing_of(name):
    return 0.1 if DPO_LOSSES[name].smoothing else 0.0


# Every loss with every divergence that it honours.
WITH_DIVERGENCE = [
    (name, divergence)
    for name, row in DPO_LOSSES.items()
    for divergence in (F_DIVERGENCES if row.divergence else ["reverse_kl"])
]
PAIRWISE = [name for name, row in DPO_LOSSES.items() if row.statistics is None]


@pytest.mark.parametrize("name", PAIRWISE)
def test_by_hand(name):
    logprobs, lengths = columns()
    e = smoothing_of(name)
    loss = dpo_loss(*logprobs, loss_type=name, label_smoothing=e, **lengths)
    expected = [by_hand(name, *pair, e=e) for pair in PAIRS]
    torch.testing.assert_close(loss.losses, torch.tensor(expected, dtype=torch.float64))
    assert not loss.chosen_rewards.requires_grad


SCORES = {
    "forward_kl": lambda d: 1 - exp(-d),
    "js_divergence": lambda d: log(2) + log_sigma(d),
    "alpha_divergence": lambda d: (exp((0.7 - 1) * d) - 1) / (0.7 - 1),
}


@pytest.mark.parametrize("divergence", SCORES)
@pytest.mark.parametrize("name", [n for n, row in DPO_LOSSES.items() if row.divergence])
def test_divergences_by_hand(name, divergence):
    logprobs, lengths = columns()
    e = smoothing_of(name)
    loss = dpo_loss(
        *logprobs,
        loss_type=name,
        label_smoothing=e,
        f_divergence_type=divergence,
        f_alpha_divergence_coef=0.7,
        **lengths,
    )
    expected = [by_hand(name, *pair, e=e, score=SCORES[divergence]) for pair in PAIRS]
    torch.testing.assert_close(loss.losses, torch.tensor(expected, dtype=torch.float64))
    # Rewards are log-ratios under every divergence.
    torch.testing.assert_close(loss.chosen_rewards, BETA * (logprobs[0] - logprobs[2]))


def test_alpha_one_is_reverse_kl_and_near_one_is_continuous():
    logprobs, _ = columns()
    reverse = dpo_loss(*logprobs).losses
    for alpha in (1.0, 1 + 1e-5, 1 - 1e-5):
        settings = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": alpha}
        torch.testing.assert_close(
            dpo_loss(*logprobs, **settings).losses, reverse, rtol=1e-5, atol=0
        )


def test_rewards_of_each_kind():
    logprobs, lengths = columns()
    sigmoid = dpo_loss(*logprobs, **lengths)
    torch.testing.assert_close(
        sigmoid.rejected_rewards, torch.tensor([-0.05, 0.1], dtype=torch.float64)
    )
    simpo = dpo_loss(*logprobs[:2], loss_type="simpo", beta=2.0, **lengths)
    torch.testing.assert_close(
        simpo.chosen_rewards, torch.tensor([-6.0, -6.0], dtype=torch.float64)
    )
    sft = dpo_loss(*logprobs[:2], loss_type="sft")
    torch.testing.assert_close(sft.chosen_rewards, torch.tensor([-1.2, -0.9], dtype=torch.float64))


def test_published_values():
    """A pair with logit 0.15, and log-ratios of -680 and 680 with both signs at beta 1."""
    loss = dpo_loss(*torch.tensor([[-12.0], [-15.0], [-13.0], [-14.5]]))
    assert loss.losses.item() == pytest.approx(0.620957, abs=1e-6)
    assert loss.chosen_rewards.item() == pytest.approx(0.1, abs=1e-6)
    assert loss.rejected_rewards.item() == pytest.approx(-0.05, abs=1e-6)
    low, high = torch.tensor([-700.0]), torch.tensor([-20.0])
    for chosen, rejected, expected in ((low, high, 1360.0), (high, low, 0.0)):
        policy = chosen.clone().requires_grad_()
        loss = dpo_loss(policy, rejected, rejected, chosen, beta=1.0).losses
        loss.backward()
        assert loss.item() == expected
        assert math.isfinite(policy.grad.item())


def test_chosen_equal_to_rejected_costs_ln_two():
    same = torch.tensor([-7.0])
    assert dpo_loss(same, same, same + 1, same + 1).losses.item() == pytest.approx(math.log(2))


EXTREMES = torch.tensor([(-700.0, -20.0), (-20.0, -700.0), (0.0, -2e4), (-2e4, 0.0), (0.0, 0.0)])


@pytest.mark.parametrize("beta", [0.01, 1.0])
@pytest.mark.parametrize(("name", "divergence"), WITH_DIVERGENCE)
def test_extremes_are_finite(name, divergence, beta):
    policy = EXTREMES.clone().requires_grad_()
    lengths = torch.tensor([1, 3, 5, 7, 0])  # a completion without scored tokens counts as one
    loss = dpo_loss(
        *policy.T,
        *EXTREMES.flip(1).T,
        loss_type=name,
        beta=beta,
        label_smoothing=1e-3 if DPO_LOSSES[name].smoothing else 0.0,
        f_divergence_type=divergence,
        chosen_lengths=lengths,
        rejected_lengths=lengths.flip(0),
    ).losses
    loss.sum().backward()
    assert loss.isfinite().all(), loss
    assert policy.grad.isfinite().all(), policy.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype):
    logprobs, lengths = columns(dtype=dtype)  # every value is exact in both types
    half = dpo_loss(*logprobs, **lengths)
    assert half.losses.dtype == half.chosen_rewards.dtype == torch.float32
    full = dpo_loss(*columns(dtype=torch.float32)[0], **lengths)
    torch.testing.assert_close(half.losses, full.losses)


def random_pairs(count, seed=0):
    """float64 [2, P] policy and reference, without ties."""
    values = torch.randn(
        4, count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    lengths = {
        "chosen_lengths": torch.arange(count) + 2,
        "rejected_lengths": torch.arange(count) + 1,
    }
    return 3 * values[:2] - 8, 3 * values[2:] - 8, lengths


# aot_unpaired is no gradient of its value per pair, only of the sum: tested below.
@pytest.mark.parametrize(
    ("name", "divergence"), [case for case in WITH_DIVERGENCE if case[0] != "aot_unpaired"]
)
def test_gradients_in_float64(name, divergence):
    policy, reference, lengths = random_pairs(5)

    def loss(chosen, rejected):
        return dpo_loss(
            chosen,
            rejected,
            *reference,
            loss_type=name,
            label_smoothing=smoothing_of(name),
            f_divergence_type=divergence,
            **lengths,
        ).losses

    inputs = [policy[0].clone().requires_grad_(), policy[1].clone().requires_grad_()]
    assert torch.autograd.gradcheck(loss, inputs)


# -- statistics of the window --


def aot_by_sorting(policy, reference, unpaired):
    """The definition: both sides sorted over the whole window by a differentiable sort."""
    if unpaired:
        ahead, behind = policy[0] - reference[0], policy[1] - reference[1]
    else:
        ahead, behind = policy[0] - policy[1], reference[0] - reference[1]
    difference = ahead.sort().values - behind.sort().values
    x = BETA * difference
    return -0.9 * torch.nn.functional.logsigmoid(x) - 0.1 * torch.nn.functional.logsigmoid(-x)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
@pytest.mark.parametrize("cuts", [(8,), (1,) * 8, (3, 5), (5, 0, 2, 1)])
def test_window_statistics_make_the_split_irrelevant(name, cuts):
    policy, reference, _ = random_pairs(8)
    whole = policy.clone().requires_grad_()
    expected = aot_by_sorting(whole, reference, name == "aot_unpaired")
    expected.sum().backward()

    window = Pairs(*policy, *reference)
    statistics = DPO_LOSSES[name].statistics(window)
    parts = policy.clone().requires_grad_()
    total = 0.0
    for index in torch.arange(8).split(cuts):
        loss = dpo_loss(
            *parts[:, index],
            *reference[:, index],
            loss_type=name,
            label_smoothing=0.1,
            matched=tuple(values[index] for values in statistics),
        ).losses.sum()
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.sum().item(), rel=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_without_statistics_the_pairs_are_the_window(name):
    policy, reference, _ = random_pairs(6)
    statistics = DPO_LOSSES[name].statistics(Pairs(*policy, *reference))
    alone = dpo_loss(*policy, *reference, loss_type=name).losses
    torch.testing.assert_close(
        alone, dpo_loss(*policy, *reference, loss_type=name, matched=statistics).losses
    )


def test_aot_by_hand():
    # Policy margins 3, 1, 2; reference margins 0, 9, 4. Ranks 2, 0, 1 -> 9, 0, 4.
    zeros = torch.zeros(3, dtype=torch.float64)
    margins, ref = torch.tensor([3.0, 1, 2]).double(), torch.tensor([0.0, 9, 4]).double()
    loss = dpo_loss(margins, zeros, ref, zeros, loss_type="aot", beta=1.0).losses
    expected = [logistic(3 - 9), logistic(1 - 0), logistic(2 - 4)]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))


def test_aot_unpaired_by_hand():
    # Log-ratios 5, 1 and 0, 2: sorted 1, 5 against 0, 2.
    zeros = torch.zeros(2, dtype=torch.float64)
    chosen, rejected = torch.tensor([5.0, 1]).double(), torch.tensor([0.0, 2]).double()
    loss = dpo_loss(chosen, rejected, zeros, zeros, loss_type="aot_unpaired", beta=1.0).losses
    assert loss.sum().item() == pytest.approx(logistic(1 - 0) + logistic(5 - 2))


# -- invariances that hold whatever the formula --


@pytest.mark.parametrize("name", [n for n, row in DPO_LOSSES.items() if row.reference])
def test_shifting_policy_and_reference_together_changes_nothing(name):
    policy, reference, lengths = random_pairs(4)
    settings = {"loss_type": name, "label_smoothing": smoothing_of(name), **lengths}
    loss = dpo_loss(*policy, *reference, **settings).losses
    torch.testing.assert_close(loss, dpo_loss(*(policy - 3), *(reference - 3), **settings).losses)


@pytest.mark.parametrize("name", PAIRWISE)
def test_pairs_do_not_see_each_other(name):
    policy, reference, lengths = random_pairs(4)
    settings = {"loss_type": name, "label_smoothing": smoothing_of(name)}
    whole = dpo_loss(*policy, *reference, **settings, **lengths)
    for i in range(4):
        one = {key: value[i : i + 1] for key, value in lengths.items()}
        alone = dpo_loss(*policy[:, i : i + 1], *reference[:, i : i + 1], **settings, **one)
        for got, expected in zip(alone, whole, strict=True):
            torch.testing.assert_close(got, expected[i : i + 1])


@pytest.mark.parametrize("name", DPO_LOSSES)
def test_no_pairs(name):
    empty = torch.zeros(0, requires_grad=True)
    settings = {"loss_type": name, "label_smoothing": smoothing_of(name)}
    lengths = torch.zeros(0, dtype=torch.int64)
    loss = dpo_loss(
        empty, empty, empty, empty, chosen_lengths=lengths, rejected_lengths=lengths, **settings
    )
    loss.losses.sum().backward()
    assert loss.losses.shape == (0,)


# -- what users get wrong --


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "dpo"}, "must be one of sigmoid, hinge.*got 'dpo'"),
        ({"f_divergence_type": "kl"}, "must be one of reverse_kl.*got 'kl'"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "no effect on 'hinge'"),
        ({"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "no effect on 'nca_pair'"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, r"in \[0, 0.5\), got 0.5"),
        ({"loss_type": "exo_pair"}, r"in \(0, 1\), got 0.0"),
        ({"loss_type": "discopop", "discopop_tau": 0.0}, r"\(0, 1\], got 0.0"),
        ({"loss_type": "sigmoid_norm"}, "needs chosen_lengths and rejected_lengths"),
    ],
)
def test_wrong_settings(settings, message):
    logprobs, _ = columns()
    with pytest.raises(ValueError, match=message):
        dpo_loss(*logprobs, **settings)


def test_wrong_shapes():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ValueError, match="needs ref_chosen and ref_rejected; .*simpo"):
        dpo_loss(one, one)
    with pytest.raises(ValueError, match=r"each of shape \[P\], got shapes \[\(2,\), \(1,\)"):
        dpo_loss(two, one, two, two)
    with pytest.raises(ValueError, match=r"each of shape \[P\]"):
        dpo_loss(*torch.zeros(4, 2, 3))


# -- weights of tokens and pairs --


def test_shared_length_weights_by_hand():
    # Pairs of 3 and 1 tokens, 2 and 2, 0 and 2.
    cu_units = torch.tensor([0, 3, 4, 6, 8, 8, 10])
    weights = shared_length_weights(cu_units, 10, ld_alpha=0.25)
    assert weights.tolist() == [1, 0.25, 0.25, 1, 1, 1, 1, 1, 0.25, 0.25]
    assert shared_length_weights(cu_units, 10, ld_alpha=1.0).tolist() == [1] * 10
    assert shared_length_weights(torch.tensor([0]), 0, ld_alpha=0.5).shape == (0,)


def test_wpo_weights_against_a_whole_distribution():
    """Three tokens over five words: the mean log-prob relative to log sum p^2, per completion."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    targets = torch.tensor([0, 3, 1, 4, 2])
    everything = logits.log_softmax(-1)
    logprobs = everything.gather(1, targets[:, None])[:, 0].requires_grad_()
    log_sum_sq = (2 * everything).logsumexp(-1)
    weights = wpo_weights(logprobs, log_sum_sq, torch.tensor([0, 2, 5]))
    relative = [
        logprobs[t].item() - log(sum(exp(v) ** 2 for v in everything[t].tolist())) for t in range(5)
    ]
    expected = exp(sum(relative[:2]) / 2 + sum(relative[2:]) / 3)
    assert weights.item() == pytest.approx(expected)
    assert not weights.requires_grad


def test_wpo_weighs_a_greedy_peaked_policy_by_one():
    logprobs = torch.zeros(4)  # p = 1 for every token, so sum p^2 = 1
    assert wpo_weights(logprobs, logprobs, torch.tensor([0, 1, 4])).item() == 1.0


def test_the_table_has_every_name():
    names = (
        "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired apo_zero"
    )
    names += " apo_down discopop sft sigmoid_norm simpo orpo cpo"
    assert set(names.split()) == set(DPO_LOSSES)
    assert [n for n, row in DPO_LOSSES.items() if row.unit != "pairs"] == ["sft"]
    assert [n for n, row in DPO_LOSSES.items() if row.statistics] == ["aot", "aot_unpaired"]
