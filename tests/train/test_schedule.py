"""Learning-rate factors: by hand, and against transformers."""

import pytest

from lean_trl.train.schedule import DECAYS, lr_factor


@pytest.mark.parametrize(
    ("name", "steps", "warmup", "expected"),
    [
        ("linear", 3, 0, [1.0, 0.666667, 0.333333]),
        ("linear", 4, 2, [0.0, 0.5, 1.0, 0.5]),
        ("linear", 1, 0, [1.0]),
        # cos(0), cos(pi / 4), cos(pi / 2), cos(3 pi / 4), each through (1 + c) / 2
        ("cosine", 4, 0, [1.0, 0.853553, 0.5, 0.146447]),
        ("cosine", 3, 1, [0.0, 1.0, 0.5]),
        ("constant", 3, 1, [0.0, 1.0, 1.0]),
        ("linear", 2, 2, [0.0, 0.5]),  # nothing is left to decay over
        ("linear", 2, 4, [0.0, 0.25]),  # cut short during the warm-up
    ],
)
def test_factors_worked_by_hand(name, steps, warmup, expected):
    factors = [lr_factor(name, step, steps, warmup) for step in range(steps)]
    assert factors == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", [name for name in DECAYS if name != "wsd"])
def test_steps_beyond_the_end_never_turn_negative_or_rise_again(name):
    assert lr_factor(name, 9, 5) == lr_factor(name, 5, 5) >= 0


def test_an_unknown_end_needs_a_constant_rate():
    assert [lr_factor("constant", s, None, 2) for s in range(3)] == [0.0, 0.5, 1.0]
    with pytest.raises(ValueError, match=r"set train\.max_steps"):
        lr_factor("cosine", 5, None)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'cosin' is unknown: choose one of linear, cosine, const"):
        lr_factor("cosin", 0, 3)


@pytest.mark.parametrize("steps", [1, 7, 30])
@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("name", [name for name in DECAYS if name != "wsd"])
def test_equal_to_transformers(name, warmup, steps):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs_name = "constant_with_warmup" if name == "constant" else name
    scheduler = transformers.get_scheduler(theirs_name, optimizer, warmup, steps)
    theirs = []
    for _ in range(steps):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ours = [lr_factor(name, step, steps, warmup) for step in range(steps)]
    assert ours == pytest.approx(theirs, abs=1e-12)
