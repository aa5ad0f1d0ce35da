"""Drawing tokens: log-probs by hand, frequencies, filters, streams of their own."""

import doctest
import math

import pytest
import torch

from lean_trl.rollout import sampling
from lean_trl.rollout.engine import Sampling
from lean_trl.rollout.sampling import Dice, draw

LOGITS = torch.tensor([2.0, 1.0, 0.0])


def test_examples_in_docstrings():
    assert doctest.testmod(sampling).failed == 0


@pytest.mark.parametrize("temperature, logprob", [(1.0, -0.407606), (0.5, -0.142932)])
def test_logprobs_at_the_temperature(temperature, logprob):
    ids, logprobs = draw(LOGITS[None], Sampling(temperature), torch.zeros(1))
    assert ids.tolist() == [0]
    assert logprobs.item() == pytest.approx(logprob, abs=1e-6)


def grid(logits, count=4096, **options):
    """How often each token is drawn when the numbers are spread evenly."""
    uniform = torch.arange(count) / count
    ids, logprobs = draw(logits.expand(count, -1), Sampling(**options), uniform)
    frequency = torch.bincount(ids, minlength=logits.shape[-1]) / count
    return frequency, logprobs


@pytest.mark.parametrize("vocab", [3, 255, 256, 257, 1000])
def test_frequencies_are_the_probabilities(vocab):
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    frequency, _ = grid(logits, temperature=0.7)
    torch.testing.assert_close(frequency, (logits / 0.7).softmax(0), atol=5e-4, rtol=0)


def test_filters():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    for options, kept in (
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"min_p": 0.45}, [4 / 9, 3 / 9, 2 / 9, 0]),
    ):
        frequency, logprobs = grid(logits, **options)
        torch.testing.assert_close(frequency, torch.tensor(kept).float(), atol=1e-3, rtol=0)
        # The log-prob is that of the whole distribution: what training computes.
        assert logprobs[0].item() == pytest.approx(math.log(0.4), abs=1e-6)


def test_the_largest_number_finds_a_possible_token():
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 7] = 3.0
    logits[0, 280] = -60.0  # a weight of 0 in integers
    for u in (0.0, 1 - 2**-24):
        assert draw(logits, Sampling(), torch.tensor([u]))[0].tolist() == [7]


def test_repetition_penalty_lowers_both_signs():
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.5]])
    seen = torch.tensor([[True, False, True, False]])
    options = Sampling(temperature=0.0, repetition_penalty=2.0)
    ids, logprobs = draw(logits, options, torch.zeros(1), seen)
    assert ids.tolist() == [1]
    assert logprobs.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())
    ids, _ = draw(logits[:, 2:], options, torch.zeros(1), seen[:, 2:])
    assert ids.tolist() == [1]


def test_streams_depend_on_seed_and_index_alone():
    first = [Dice(1, 0).roll(), Dice(1, 1).roll(), Dice(2, 0).roll()]
    assert len(set(first)) == 3 and first[0] == Dice(1, 0).roll()
    assert all(0 <= number < 1 for number in first)


def test_options_out_of_range():
    for options in ({"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"top_k": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Sampling(**options)
