from math import exp

import pytest
import torch

from lean_trl.losses import KTO_LOSSES, kl_estimate, kto_loss


def sigma(x):
    return 1 / (1 + exp(-x))


LOGPROBS = torch.tensor([-10.0, -12.0, -7.0], dtype=torch.float64)
REFERENCE = torch.tensor([-12.0, -11.0, -7.5], dtype=torch.float64)  # log-ratios 2, -1, 0.5
LABELS = torch.tensor([True, False, False])


def test_kto_by_hand():
    loss = kto_loss(
        LOGPROBS, REFERENCE, LABELS, kl=1.5, desirable_weight=3.0, undesirable_weight=0.5
    )
    expected = [
        3.0 * (1 - sigma(0.1 * (2 - 1.5))),
        0.5 * (1 - sigma(0.1 * (1.5 + 1))),
        0.5 * (1 - sigma(0.1 * (1.5 - 0.5))),
    ]
    assert loss.losses.tolist() == pytest.approx(expected)
    assert loss.rewards.tolist() == pytest.approx([0.2, -0.1, 0.05])


def test_apo_zero_unpaired_by_hand():
    loss = kto_loss(LOGPROBS, REFERENCE, LABELS, loss_type="apo_zero_unpaired", beta=0.5)
    expected = [1 - sigma(1.0), sigma(-0.5), sigma(0.25)]
    assert loss.losses.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", KTO_LOSSES)
def test_gradients_in_float64(name):
    def loss(logprobs):
        return kto_loss(
            logprobs, REFERENCE, LABELS, 0.3, loss_type=name, desirable_weight=1.3
        ).losses

    assert torch.autograd.gradcheck(loss, (LOGPROBS.clone().requires_grad_(),))


@pytest.mark.parametrize("name", KTO_LOSSES)
def test_extremes_are_finite(name):
    logprobs = torch.tensor([0.0, -2e4, -2e4, 0.0], requires_grad=True)
    labels = torch.tensor([True, True, False, False])
    loss = kto_loss(logprobs, logprobs.detach().flip(0), labels, 1e4, loss_type=name, beta=1.0)
    loss.losses.sum().backward()
    assert loss.losses.isfinite().all() and logprobs.grad.isfinite().all()
    assert ((loss.losses >= 0) & (loss.losses <= 1)).all()


def test_each_completion_by_itself_given_the_same_kl():
    whole = kto_loss(LOGPROBS, REFERENCE, LABELS, 0.7).losses
    for i in range(3):
        part = slice(i, i + 1)
        alone = kto_loss(LOGPROBS[part], REFERENCE[part], LABELS[part], 0.7).losses
        torch.testing.assert_close(alone, whole[part])


def test_kl_is_a_constant_and_never_negative():
    logprobs = torch.tensor([-3.0, -5.0], requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([-4.0, -6.5]))
    assert kl.item() == 1.25 and not kl.requires_grad
    assert kl_estimate(logprobs, torch.tensor([-1.0, -1.0])).item() == 0.0
    assert kl_estimate(torch.zeros(0), torch.zeros(0)).item() == 0.0
    # Clamped once over everything: 1 and -0.5 give 0.25, not the mean 0.5 of clamped parts.
    parts = kl_estimate(torch.tensor([1.0, -0.5]), torch.zeros(2))
    assert parts.item() == 0.25


def test_one_desirable_in_a_hundred():
    labels = torch.zeros(100, dtype=torch.bool)
    labels[17] = True
    logprobs = torch.full((100,), -5.0, requires_grad=True)
    loss = kto_loss(logprobs, torch.full((100,), -5.0), labels, 0.0, desirable_weight=99.0)
    loss.losses.sum().backward()
    assert loss.losses.sum().item() == pytest.approx(99.0)  # 99 * 0.5 + 99 * 0.5
    assert logprobs.grad[17].item() == pytest.approx(-99 * 0.1 * 0.25)


def test_all_of_one_kind_and_none_at_all():
    zeros = torch.zeros(2)
    for label in (True, False):
        loss = kto_loss(zeros, zeros, torch.tensor([label] * 2), 0.0).losses
        assert loss.tolist() == [0.5, 0.5]
    assert kto_loss(zeros[:0], zeros[:0], torch.tensor([]).bool(), 0.0).losses.shape == (0,)


def test_wrong_input():
    zeros, labels = torch.zeros(2), torch.tensor([True, False])
    with pytest.raises(ValueError, match="one of kto, apo_zero_unpaired, got 'kt'"):
        kto_loss(zeros, zeros, labels, 0.0, loss_type="kt")
    with pytest.raises(ValueError, match="'kto' needs kl"):
        kto_loss(zeros, zeros, labels)
    with pytest.raises(ValueError, match="labels of torch.int64"):
        kto_loss(zeros, zeros, labels.long(), 0.0)
    with pytest.raises(ValueError, match=r"got shapes \[\(2,\), \(1,\), \(2,\)\]"):
        kto_loss(zeros, zeros[:1], labels, 0.0)
