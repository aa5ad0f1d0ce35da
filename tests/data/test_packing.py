"""Packing against recorded bins, hand-worked cases and the one-at-a-time algorithm."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_trl.data.packing import STRATEGIES, pack, stable_argsort

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trl_packing.json").read_text())


def one_at_a_time(lengths: list[int], max_length: int) -> list[list[int]]:
    """Documents of each bin by best-fit decreasing, as its definition says it."""
    bins: list[list[int]] = []
    waiting: list[tuple[int, int, int]] = []  # (space, when it came to have that space, bin)
    clock = 0
    for document in sorted(range(len(lengths)), key=lambda d: -min(lengths[d], max_length)):
        length = min(lengths[document], max_length)
        if not length:
            continue
        fitting = [entry for entry in waiting if entry[0] >= length]
        if fitting:
            entry = min(fitting)
            waiting.remove(entry)
            space, _, b = entry
        else:
            space, b = max_length, len(bins)
            bins.append([])
        bins[b].append(document)
        clock += 1
        waiting.append((space - length, clock, b))
    return bins


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 32))
def test_bfd_makes_the_bins_of_the_one_at_a_time_rule(lengths: list[int], max_length: int) -> None:
    packing = pack(lengths, max_length)
    assert [[d for d, _, _ in b] for b in packing.bins] == one_at_a_time(lengths, max_length)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 90), max_size=40), st.integers(1, 32), st.sampled_from(STRATEGIES))
def test_each_kept_token_is_in_one_bin(lengths: list[int], max_length: int, strategy: str) -> None:
    packing = pack(lengths, max_length, strategy)
    seen = [(d, t) for b in packing.bins for d, start, n in b for t in range(start, start + n)]
    limit = max_length if strategy == "bfd" else 10**9
    assert sorted(seen) == [(d, t) for d, n in enumerate(lengths) for t in range(min(n, limit))]
    assert packing.kept == len(seen) and packing.kept + packing.dropped == sum(lengths)
    assert all(0 < size <= max_length for size in packing.sizes) and all(packing.length > 0)
    if strategy == "wrapped":  # in the original order, all bins full but the last
        assert seen == sorted(seen) and all(packing.sizes[:-1] == max_length)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", GOLDEN)
def test_recorded_bins(name: str, strategy: str) -> None:
    case = GOLDEN[name]
    packing, recorded = pack(case["lengths"], case["max_length"], strategy), case[strategy]
    assert len(packing.bins) == recorded["bins"] and packing.kept == recorded["tokens"]
    assert sorted(packing.sizes.tolist()) == recorded["bin_sizes"]
    if recorded["seq_lengths"] is not None:
        ours = sorted(sorted(n for _, _, n in b) for b in packing.bins)
        assert ours == sorted(map(sorted, recorded["seq_lengths"]))


def test_token_accounting() -> None:
    lengths, sizes = [7, 3, 4, 2, 1], {}
    for strategy in STRATEGIES:
        packing = pack(lengths, 5, strategy)
        assert packing.kept + packing.dropped == 17
        sizes[strategy] = [[n for _, _, n in b] for b in packing.bins]
    assert sizes["bfd"] == [[5], [4, 1], [3, 2]]
    assert len(sizes["bfd_split"]) == 4
    assert [sum(b) for b in sizes["wrapped"]] == [5, 5, 5, 2]
    pieces = [(start, n) for b in pack(lengths, 5, "bfd_split").bins for d, start, n in b if d == 0]
    assert sorted(pieces) == [(0, 5), (5, 2)]


def test_more_room_never_takes_more_bins() -> None:
    assert [len(pack([4] * 10, c).bins) for c in range(4, 13)] == [10, 10, 10, 10, 5, 5, 5, 5, 4]


def test_nothing_and_empty_documents() -> None:
    assert pack([0, 7, 3], 5).kept == 8 and len(pack([0, 7, 3], 5).bins) == 2
    assert pack([0, 7, 3], 5, "bfd_split").kept == 10
    for strategy in STRATEGIES:
        for lengths in ([], [0, 0]):
            packing = pack(lengths, 5, strategy)
            assert len(packing.bins) == 0 and packing.kept == 0 and list(packing.bins) == []


def test_nothing_over_long_makes_both_the_same() -> None:
    lengths = np.random.default_rng(0).integers(1, 64, 1000)
    one, two = pack(lengths, 64, "bfd"), pack(lengths, 64, "bfd_split")
    assert one.bins[:] == two.bins[:]


def test_sort_of_keys_beyond_16_bits_is_stable() -> None:
    keys = np.random.default_rng(0).integers(0, 2**34, 5000) // 2**20 * 2**15
    assert np.array_equal(stable_argsort(keys), np.argsort(keys, kind="stable"))
    assert np.array_equal(stable_argsort(keys >> 10), np.argsort(keys >> 10, kind="stable"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 5, "best"), "bfd, bfd_split, wrapped"),
        (([1], 0), "at least 1"),
        (([-1], 5), "negative"),
    ],
)
def test_refusals(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(*arguments)
