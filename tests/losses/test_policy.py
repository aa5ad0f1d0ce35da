"""Policy losses: hand-worked numbers, a scalar implementation beside them, splits, gradients."""

import math

import numpy as np
import pytest
import torch

from lean_trl.losses import (
    GRPO_LOSSES,
    entropy_threshold,
    grpo_loss,
    importance_weights,
    kl,
    off_policy_mask,
    policy_loss,
    policy_weights,
    rloo_loss,
    segment_ids,
)

SAPO = {"sapo_temperature_pos": 1.3, "sapo_temperature_neg": 1.7}
VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}


def problem(dtype=torch.float64, seed=0):
    """Three completions of 4, 2 and 3 tokens."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(9, generator=generator, dtype=dtype) - 0.5
    new = old + 0.4 * torch.randn(9, generator=generator, dtype=dtype)
    ref = old + 0.2 * torch.randn(9, generator=generator, dtype=dtype)
    return new, old, ref, torch.tensor([1.5, -0.5, -1.0], dtype=dtype), torch.tensor([0, 4, 6, 9])


@pytest.mark.parametrize(
    "ratio, advantage, loss", [(1.5, 1, -1.2), (1.5, -1, 1.5), (0.5, -1, 0.8), (0.5, 1, -0.5)]
)
def test_clip(ratio, advantage, loss):
    got = policy_loss(torch.tensor([ratio]).log(), torch.zeros(1), torch.tensor([float(advantage)]))
    assert got.item() == pytest.approx(loss, abs=1e-6)


def test_delta_caps_what_a_negative_advantage_may_cost():
    ratio, advantage = torch.tensor([10.0, 10.0]).log(), torch.tensor([-1.0, 1.0])
    got = policy_loss(ratio, torch.zeros(2), advantage, delta=4.0, epsilon_high=0.28)
    assert got.tolist() == pytest.approx([4.0, -1.28])


def test_cispo_does_not_scale_gradients_down_by_default():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss = policy_loss(logprobs, logprobs.detach(), torch.tensor([1.0, -0.5]), kind="cispo")
    (grad,) = torch.autograd.grad(loss.sum(), logprobs)
    assert grad.tolist() == [-1.0, 0.5]


def test_kl_by_hand():
    policy, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert kl(policy, reference).item() == pytest.approx(0.106531, abs=1e-6)
    assert kl(policy, reference, "k1").item() == pytest.approx(0.5)
    assert kl(policy, reference, "k2").item() == pytest.approx(0.125)
    assert kl(policy, policy).item() == 0
    # Tiny differences keep their digits: exp(-d) + d - 1 would round 5e-9 to 0.
    close = kl(torch.tensor([1e-4]), torch.tensor([0.0])).item()
    assert close == pytest.approx(5e-9, rel=1e-3)


def test_bias_corrected_kl_has_the_gradient_of_the_kl():
    """Over the whole vocabulary, weighted by the probability of sampling each token."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampled = policy.detach()
    corrected = kl(policy, reference) * (policy - sampled).exp()
    (got,) = torch.autograd.grad((sampled.exp() * corrected).sum(), logits)
    torch.testing.assert_close(got, wanted)


def scalar_loss(kind, level, new, old, advantages, cu, epsilon=0.2, high=None):
    """The same with floats and loops. -> a list of per-token losses."""
    result = []
    for s, advantage in enumerate(advantages):
        span = range(cu[s], cu[s + 1])
        mean = sum(new[t] - old[t] for t in span) / max(len(span), 1)
        for t in span:
            w = math.exp(new[t] - old[t] if level == "token" else mean)
            if kind == "clip":
                bounded = min(max(w, 1 - epsilon), 1 + (high or epsilon))
                result.append(-min(w * advantage, bounded * advantage))
            elif kind == "cispo":
                result.append(-min(w, high or 5.0) * advantage * new[t])
            elif kind == "sapo":
                tau = SAPO["sapo_temperature_pos" if advantage > 0 else "sapo_temperature_neg"]
                result.append(-advantage * 4 / tau / (1 + math.exp(-tau * (w - 1))))
            else:
                k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
                total = math.exp(sum(new[u] - old[u] for u in span))
                phi = math.exp(rate + k * math.log(total) - rate * total)
                result.append(-phi * advantage * new[t])
    return result


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["clip", "cispo", "sapo", "vespo"])
def test_kinds_and_levels_against_loops(kind, level):
    new, old, _, advantages, cu = problem()
    options = {**SAPO, **VESPO}
    got = policy_loss(
        new, old, advantages, kind=kind, level=level, sequence_ids=segment_ids(cu, 9), **options
    )
    wanted = scalar_loss(kind, level, new.tolist(), old.tolist(), advantages.tolist(), cu.tolist())
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-12)


@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_gradient(loss_type):
    """float64; cispo and vespo weigh with a detached factor, so compare with their own formula."""
    new, old, ref, advantages, cu = problem(seed=3)

    def loss(logprobs):
        return grpo_loss(
            logprobs,
            old,
            advantages,
            cu,
            loss_type=loss_type,
            ref_logprobs=ref,
            beta=0.1,
            max_completion_length=8,
            level="sequence" if loss_type == "luspo" else "token",
        )

    new = new.requires_grad_()
    if loss_type in ("cispo", "vespo"):
        (grad,) = torch.autograd.grad(loss(new), new)
        row = GRPO_LOSSES[loss_type]
        ids = segment_ids(cu, 9)
        plain = policy_loss(new, old, advantages, kind=row.kind, sequence_ids=ids).detach()
        factor = plain / new.detach()  # -weight * A
        divergence = kl(new, ref) * (new - old).exp()
        wanted = (factor * new + 0.1 * divergence).sum() / 9
        torch.testing.assert_close(grad, torch.autograd.grad(wanted, new)[0])
    else:
        assert torch.autograd.gradcheck(loss, (new,))


ROWS = torch.tensor([0.5] * 4 + [1.0] * 2), torch.tensor([0, 4, 6])


@pytest.mark.parametrize(
    "loss_type, wanted", [("grpo", 0.75), ("dapo", 2 / 3), ("bnpo", 2 / 3), ("dr_grpo", 0.25)]
)
def test_normalisers(loss_type, wanted):
    values, cu = ROWS
    weights, unit = policy_weights(loss_type, cu, max_completion_length=8)
    total = {"tokens": 6, "sequences": 2}[unit]
    assert ((values * weights).sum() / total).item() == pytest.approx(wanted, abs=1e-6)
    # One completion in each of two micro-batches: the same, whatever the cut.
    first, _ = policy_weights(loss_type, torch.tensor([0, 4]), max_completion_length=8)
    second, _ = policy_weights(loss_type, torch.tensor([0, 2]), max_completion_length=8)
    parts = (values[:4] * first).sum() / total + (values[4:] * second).sum() / total
    assert parts.item() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("loss_type", GRPO_LOSSES)
def test_splitting_a_step_changes_nothing(loss_type):
    new, old, ref, advantages, cu = problem(seed=1)
    options = {
        "loss_type": loss_type,
        "beta": 0.04,
        "max_completion_length": 16,
        "level": "sequence" if loss_type == "luspo" else "token",
    }
    whole = grpo_loss(new, old, advantages, cu, ref_logprobs=ref, **options)
    total = {"tokens": 9, "sequences": 3}[GRPO_LOSSES[loss_type].unit]
    parts = []
    for low, high in ((0, 1), (1, 3)):
        span = slice(int(cu[low]), int(cu[high]))
        offsets = cu[low : high + 1] - cu[low]
        parts.append(
            grpo_loss(
                new[span],
                old[span],
                advantages[low:high],
                offsets,
                ref_logprobs=ref[span],
                total=total,
                **options,
            )
        )
    torch.testing.assert_close(sum(parts), whole)


def test_rloo_by_hand():
    """Ratios of whole completions: exp(0.1 + 0.2) clipped to 1.2, exp(-0.5) free or not."""
    new, old = torch.tensor([0.1, 0.2, -0.5, -0.5]), torch.zeros(4)
    cu = torch.tensor([0, 2, 3, 4])
    got = rloo_loss(new, old, torch.tensor([2.0, 1.0, -1.0]), cu)
    assert got.tolist() == pytest.approx([-2.4, -math.exp(-0.5), 0.8])


def test_importance_weights():
    old, sampled = torch.tensor([-1.0, -2.0, -1.0]), torch.tensor([-1.5, -1.0, math.nan])
    cu = torch.tensor([0, 2, 3])

    def weights(mode, low=None, high=None):
        values = importance_weights(old, sampled, cu, mode=mode, clip_min=low, clip_max=high)
        return values.tolist()

    half, third = math.exp(0.5), math.exp(-1)
    assert weights("token_truncate", high=1.2) == pytest.approx([1.2, third, 1])
    assert weights("token_mask", 0.5, 3.0) == pytest.approx([half, 0, 1])
    both = math.exp(-0.5)
    assert weights("sequence_truncate", 0.7) == pytest.approx([0.7, 0.7, 1])
    assert weights("sequence_mask", 0.5, 3.0) == pytest.approx([both, both, 1])
    assert weights("sequence_mask", 0.7, 3.0) == [0, 0, 1]
    with pytest.raises(ValueError, match="clip_min or clip_max"):
        weights("token_truncate")


def test_off_policy_mask_keeps_the_good_and_the_near():
    logprobs, sampled = torch.tensor([-3.0, -1.0, -3.0, -1.0]), torch.full((4,), -1.0)
    cu, advantages = torch.tensor([0, 2, 3, 4]), torch.tensor([-1.0, 1.0, -1.0])
    assert off_policy_mask(logprobs, sampled, advantages, cu, 0.5).tolist() == [0, 0, 1, 1]
    assert off_policy_mask(logprobs, sampled, advantages, cu, 1.0).tolist() == [1, 1, 1, 1]


def test_entropy_threshold_is_a_quantile():
    values = torch.rand(101, generator=torch.Generator().manual_seed(0))
    for quantile in (0.0, 0.2, 0.5, 1.0):
        wanted = np.quantile(values.numpy(), 1 - quantile)
        assert entropy_threshold(values, quantile).item() == pytest.approx(wanted, abs=1e-6)
    assert entropy_threshold(torch.zeros(0), 0.2) == 0


def test_extremes_stay_finite():
    old = torch.tensor([-700.0, 0.0], requires_grad=False)
    new = torch.tensor([-1.0, -700.0], requires_grad=True)
    cu = torch.tensor([0, 1, 2])
    for loss_type in ("cispo", "vespo", "sapo"):
        options = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
        loss = grpo_loss(new, old, torch.tensor([1.0, -1.0]), cu, loss_type=loss_type, **options)
        assert loss.isfinite()


def test_bad_arguments():
    one = torch.zeros(1)
    with pytest.raises(ValueError, match="kind"):
        policy_loss(one, one, one, kind="ppo")
    with pytest.raises(ValueError, match="level"):
        policy_loss(one, one, one, level="tokens", sequence_ids=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="shape"):
        policy_loss(one, torch.zeros(2), one)
    with pytest.raises(ValueError, match="max_completion_length"):
        policy_weights("dr_grpo", torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="loss_type"):
        policy_weights("ppo", torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        grpo_loss(one, one, one, torch.tensor([0, 1]), beta=0.1)
