"""Advantages: the numbers of hand-worked groups, abstentions, several rewards."""

import math

import pytest
import torch

from lean_trl.losses import group_advantages, leave_one_out, total_reward

NAN = math.nan


def advantages(rewards, groups=None, **options):
    rewards = torch.tensor(rewards, dtype=torch.float32)
    groups = (
        torch.zeros(len(rewards), dtype=torch.int64) if groups is None else torch.tensor(groups)
    )
    return group_advantages(rewards, groups, **options).tolist()


def test_sample_deviation():
    assert advantages([1, 0, 0, 0]) == pytest.approx([1.4997, -0.4999, -0.4999, -0.4999], abs=5e-5)
    assert advantages([1, 0, 0, 0], scale="none") == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[2] * 4, [0.35] * 8, [1e6 + 0.35] * 8])
def test_equal_rewards_teach_nothing(rewards):
    assert advantages(rewards) == pytest.approx([0] * len(rewards), abs=1e-3)


def test_one_of_eight():
    values = advantages([0.35] * 7 + [0])
    assert values == pytest.approx([0.3533] * 7 + [-2.4729], abs=1e-4)
    assert max(map(abs, values)) <= 7 / math.sqrt(8)


@pytest.mark.parametrize(
    "scale, expected",
    [
        ("group", [-0.7070, 0.7070, -0.7071, 0.7071]),
        ("batch", [-0.1030, 0.1030, -1.0296, 1.0296]),
        ("none", [-0.5, 0.5, -5, 5]),
    ],
)
def test_scales(scale, expected):
    got = advantages([0, 1, 0, 10], [3, 3, 9, 9], scale=scale)
    assert got == pytest.approx(expected, abs=5e-5)


def test_abstained_is_not_zero():
    plain = advantages([1, NAN, 0, 1], scale="none")
    assert plain == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3])
    scaled = advantages([1, NAN, 0, 1])
    assert scaled == pytest.approx([0.57725, 0, -1.1545, 0.57725], abs=5e-5)


def test_abstentions_stay_in_their_group():
    for scale in ("group", "batch", "none"):
        got = advantages([NAN, NAN, 0, 1], [0, 0, 1, 1], scale=scale)
        assert got[:2] == [0, 0]
        assert all(map(math.isfinite, got))
        assert got[3] > 0


def test_two_rewards_one_abstains_the_other_decides():
    got = advantages([[1, NAN], [NAN, 0], [0, 0], [NAN, NAN]], scale="none")
    assert got == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0])


def test_weights():
    rewards = torch.tensor([[1.0, 10.0], [0.0, 20.0]])
    assert total_reward(rewards, torch.tensor([1.0, 0.1])).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="one weight for each of 2"):
        total_reward(rewards, torch.ones(3))


@pytest.mark.parametrize("aggregate", ["sum_then_normalize", "normalize_then_sum"])
def test_infinite_rewards_are_refused(aggregate):
    with pytest.raises(ValueError, match=r"reward at \[1, 0\] is infinite"):
        advantages([[1.0, 2.0], [math.inf, NAN]], aggregate=aggregate)
    with pytest.raises(ValueError, match=r"reward at \[1\] is infinite"):
        leave_one_out(torch.tensor([1.0, -math.inf]), torch.zeros(2, dtype=torch.int64))


def test_normalize_then_sum_by_hand():
    """Each reward scaled in its group, then the sum over the batch."""
    rewards, groups = [[1, 10], [0, 30], [4, 5], [2, 5]], [0, 0, 1, 1]
    root = math.sqrt(0.5)
    z = [
        0.5 / (root + 1e-4) - 10 / (20 * root + 1e-4),
        -0.5 / (root + 1e-4) + 10 / (20 * root + 1e-4),
        1 / (2 * root + 1e-4),
        -1 / (2 * root + 1e-4),
    ]
    mean = sum(z) / 4
    deviation = math.sqrt(sum((x - mean) ** 2 for x in z) / 3)
    got = advantages(rewards, groups, aggregate="normalize_then_sum")
    assert got == pytest.approx([(x - mean) / (deviation + 1e-4) for x in z], abs=1e-5)


def test_leave_one_out():
    ids = torch.zeros(4, dtype=torch.int64)
    got = leave_one_out(torch.tensor([1.0, 2, 3, 6]), ids)
    assert got.tolist() == pytest.approx([-2.6667, -1.3333, 0, 4], abs=5e-5)
    got = leave_one_out(torch.tensor([1.0, NAN, 3, NAN]), torch.tensor([0, 0, 0, 1]))
    assert got.tolist() == [-2, 0, 2, 0]


def test_order_and_numbers_of_groups_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(12, generator=generator)
    groups = torch.arange(12) // 4
    order = torch.randperm(12, generator=generator)
    for function in (group_advantages, leave_one_out):
        straight = function(rewards, groups)
        torch.testing.assert_close(function(rewards[order], groups[order] * 7 + 5), straight[order])


@pytest.mark.parametrize("options", [{"scale": "groups"}, {"aggregate": "sum"}])
def test_unknown_names(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        advantages([1, 2], **options)


def test_shapes():
    with pytest.raises(ValueError, match="group id"):
        advantages([1, 2], [0])
