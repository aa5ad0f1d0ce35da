"""Windows and micro-batches: who gets what, how many steps, mixtures."""

import numpy as np
import pytest

from lean_trl.data.plan import Cut, Schedule, Table, cut_by_tokens, cut_window, mix
from lean_trl.types import UNITS


def table(lengths: list[int]) -> Table:
    tokens = np.array(lengths)
    counts = {unit: np.ones_like(tokens) for unit in UNITS} | {
        "processed": tokens,
        "tokens": tokens,
    }
    return Table(counts, tokens * tokens)


def schedule(
    rows: int, window: int, *, shuffle: bool = False, steps: int | None = None
) -> Schedule:
    mixture = mix(np.zeros(rows, int), None, shuffle, seed=0)
    return Schedule(mixture, window, steps or -(-rows // window))


@pytest.mark.parametrize(
    ("rows", "window", "steps"), [(5, 2, 3), (5, 5, 1), (5, 8, 1), (64, 8, 8), (7, 3, 3)]
)
def test_every_row_once_an_epoch_and_the_last_window_may_be_short(
    rows: int, window: int, steps: int
) -> None:
    plan = schedule(rows, window, shuffle=True)
    windows = list(plan.windows())
    assert len(windows) == plan.steps_per_epoch == steps
    assert sorted(np.concatenate(windows).tolist()) == list(range(rows))
    assert [len(w) for w in windows[:-1]] == [window] * (steps - 1)
    assert plan.epoch_after(steps - 1) == 1.0


def test_data_repeat_and_no_window_crosses_an_epoch() -> None:
    plan = schedule(5, 2, steps=7)
    got = [w.tolist() for w in plan.windows()]
    assert got == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4], [0, 1]]
    assert [plan.epoch_after(w) for w in range(4)] == [0.4, 0.8, 1.0, 1.4]
    assert [w.tolist() for w in plan.windows(3)] == got[3:]


def test_epochs_differ_and_depend_on_the_seed() -> None:
    one, two = (mix(np.zeros(50, int), None, True, seed) for seed in (0, 1))
    assert one.epoch(0).tolist() != one.epoch(1).tolist() != two.epoch(1).tolist()
    assert one.epoch(1).tolist() == one.epoch(1).tolist()
    assert mix(np.zeros(5, int), None, False, 0).epoch(3).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("budget", [None, 16])
@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_ranks_share_a_window(world: int, budget: int | None, count: int) -> None:
    lengths = table(np.random.default_rng(count).integers(1, 12, 40).tolist())
    items = np.arange(40)[::-1][:count]
    ranks = cut_window(items, lengths, Cut(3, budget, world))
    assert len(ranks) == world and len({len(mine) for mine in ranks}) == 1
    chunks = [chunk for mine in ranks for chunk in mine]
    assert sorted(np.concatenate(chunks).tolist()) == sorted(items.tolist())
    for chunk in chunks:
        assert len(chunk) <= 3 or budget
        assert budget is None or lengths.counts["processed"][chunk].sum() <= budget
    if world == 1:
        assert np.concatenate(chunks).tolist() == items.tolist()


def test_ranks_carry_about_the_same_attention() -> None:
    lengths = table(np.random.default_rng(0).lognormal(5, 0.8, 64).astype(int).tolist())
    ranks = cut_window(np.arange(64), lengths, Cut(4, None, 4))
    loads = [sum(int(lengths.cost[chunk].sum()) for chunk in mine) for mine in ranks]
    in_order = lengths.cost.reshape(4, 16).sum(1)
    assert max(loads) / np.mean(loads) < 1.1 < in_order.max() / in_order.mean()


def test_token_budget_keeps_the_order() -> None:
    cut = cut_by_tokens(np.arange(6), np.array([5, 5, 5, 11, 1, 9]), 10)
    assert [c.tolist() for c in cut] == [[0, 1], [2], [3], [4, 5]]
    assert cut_by_tokens(np.arange(0), np.arange(0), 10) == []


def test_weights_are_shares_of_an_epoch_and_sources_are_exhausted_before_they_repeat() -> None:
    source = np.array([0] * 30 + [1] * 10)
    mixture = mix(source, [1.0, 3.0], True, seed=0)
    assert mixture.per_epoch == (10, 30) and mixture.num_items == 40
    epochs = [mixture.epoch(e) for e in range(3)]
    first = np.concatenate([e[e < 30] for e in epochs])
    assert sorted(first.tolist()) == list(range(30))  # a third each epoch, none twice
    for epoch in epochs:
        second = np.bincount(epoch[epoch >= 30], minlength=40)[30:]
        assert second.tolist() == [3] * 10


def test_unshuffled_sources_alternate() -> None:
    mixture = mix(np.array([0, 0, 0, 0, 1, 1]), [2, 1], False, 0)
    assert mixture.epoch(0).tolist() == [0, 4, 1, 2, 5, 3]
    with pytest.raises(ValueError, match="source 2 has no usable row"):
        mix(np.zeros(3, int), [1, 1], False, 0)
