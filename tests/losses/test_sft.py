import math

import pytest
import torch

from lean_trl.losses import segment_ids, segment_sum, sft_loss


def test_nll_and_dft_by_hand():
    logprobs = torch.tensor([0.5, 0.25], dtype=torch.float64).log().requires_grad_()
    torch.testing.assert_close(
        sft_loss(logprobs), torch.tensor([math.log(2), math.log(4)], dtype=torch.float64)
    )
    dft = sft_loss(logprobs, loss_type="dft")
    torch.testing.assert_close(
        dft, torch.tensor([0.5 * math.log(2), 0.25 * math.log(4)], dtype=torch.float64)
    )
    # p is a constant weight: the gradient is -p, not -p - p log p.
    dft.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.5, -0.25], dtype=torch.float64))


def test_unknown_loss_type_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'nlll'.*\['dft', 'nll'\]"):
        sft_loss(torch.zeros(1), loss_type="nlll")


def test_segments_with_empty_sequences():
    cu_units = torch.tensor([0, 0, 2, 2, 3, 3])
    values = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    assert segment_ids(cu_units, 3).tolist() == [1, 1, 3]
    sums = segment_sum(values, cu_units)
    assert sums.tolist() == [0, 3, 0, 4, 0]
    (sums * torch.arange(5)).sum().backward()
    assert values.grad.tolist() == [1, 1, 3]


def test_no_segments_and_no_values():
    assert segment_sum(torch.zeros(0), torch.tensor([0])).shape == (0,)
    assert segment_sum(torch.zeros(0), torch.tensor([0, 0])).tolist() == [0.0]
