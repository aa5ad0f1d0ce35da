import math

import pytest
import torch

from lean_trl.losses import reward_loss


def test_bradley_terry_by_hand():
    chosen, rejected = torch.tensor([1.5, 0.5]), torch.tensor([0.5, 1.5])
    assert reward_loss(chosen, rejected).tolist() == pytest.approx([0.313262, 1.313262], abs=1e-6)
    with_margin = reward_loss(chosen[:1], rejected[:1], margin=torch.tensor([0.5]))
    assert with_margin.item() == pytest.approx(0.474077, abs=1e-6)


def test_centring_adds_the_squared_sum():
    chosen, rejected = torch.tensor([1.5, -2.0]), torch.tensor([0.5, 2.0])
    plain = reward_loss(chosen, rejected)
    centred = reward_loss(chosen, rejected, center_rewards_coefficient=0.01)
    torch.testing.assert_close(centred - plain, torch.tensor([0.04, 0.0]))


def test_a_common_shift_changes_only_the_centring():
    chosen, rejected = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(reward_loss(chosen, rejected), reward_loss(chosen + 7, rejected + 7))


def test_gradients_and_extremes():
    chosen, rejected = torch.randn(2, 4, dtype=torch.float64)
    margin = torch.rand(4, dtype=torch.float64)
    inputs = (chosen.requires_grad_(), rejected.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda c, r: reward_loss(c, r, margin, 0.01), inputs)
    far = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = reward_loss(far, -far.detach())
    loss.sum().backward()
    assert loss.tolist() == [0.0, 2e4]
    assert far.grad.tolist() == [0.0, -1.0]


def test_equal_rewards_cost_ln_two_and_no_pairs_cost_nothing():
    assert reward_loss(torch.zeros(1), torch.zeros(1)).item() == pytest.approx(math.log(2))
    assert reward_loss(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"got shapes \[\(2,\), \(2,\), \(1,\)\]"):
        reward_loss(torch.zeros(2), torch.zeros(2), margin=torch.zeros(1))
