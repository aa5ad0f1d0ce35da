"""Layouts against hand-worked numbers and against a slow, obvious reading of what a Batch means."""

import doctest

import numpy as np
import pytest
import torch

import lean_trl.data.batch
from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.types import EXTRAS, Batch, Example


def test_docstrings() -> None:
    assert doctest.testmod(lean_trl.data.batch).failed == 0


def documents(*lengths: int) -> list[Example]:
    counter = iter(range(1, 10_000))
    return [Example([next(counter) for _ in range(n)]) for n in lengths]


def ancestors(batch: Batch, index: int) -> list[int]:
    """Tokens that token `index` sees, itself included, read from cu_seqlens and end alone."""
    start = max(s for s in batch.cu_seqlens.tolist() if s <= index)
    end = batch.cu_seqlens.tolist()[1:] if batch.end is None else batch.end.tolist()
    return [k for k in range(start, index + 1) if batch.end is None or index < end[k]]


def read_back(batch: Batch) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Per sequence: its ids, and (depth, target) of each scored token."""
    sequences = []
    cu = batch.cu_units.tolist()
    for s, last in enumerate(batch.last.tolist()):
        path = ancestors(batch, last)
        assert batch.positions[path].tolist() == list(range(len(path)))
        span = slice(cu[s], cu[s + 1])
        pairs = zip(batch.rows[span].tolist(), batch.targets[span].tolist(), strict=True)
        units = [(path.index(row) + 1, target) for row, target in pairs]
        sequences.append((batch.input_ids[path].tolist(), units))
    return sequences


def expected(examples: list[Example]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    return [
        (e.input_ids.tolist(), [(i, int(e.input_ids[i])) for i in np.flatnonzero(e.scored)])
        for e in examples
    ]


def random_examples(seed: int, count: int = 12, group: int = -1) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [
        Example(rng.integers(1, 3, n), rng.random(n) < 0.5, group=group)
        for n in rng.integers(1, 9, count)
    ]


def test_one_token_segments() -> None:
    batch = build_batch(documents(3, 1, 1, 2))
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 5, 7]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 0, 1]
    assert batch.num_sequences == 4 and batch.num_units == 3
    assert batch.units == (2, 0, 0, 1) and batch.last.tolist() == [2, 3, 4, 6]


def test_first_token_of_a_document_is_never_a_target() -> None:
    assert build_batch(documents(3, 5, 1, 6)).num_units == 2 + 4 + 0 + 5


@pytest.mark.parametrize("padding_free", [True, False])
@pytest.mark.parametrize("multiple", [None, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_layout_reads_back(seed: int, padding_free: bool, multiple: int | None) -> None:
    examples = random_examples(seed)
    batch = build_batch(examples, padding_free=padding_free, pad_to_multiple_of=multiple)
    assert batch.end is None and batch.row_map is None
    cu = batch.cu_seqlens.tolist()
    for s, e in enumerate(examples):
        assert batch.input_ids[cu[s] : cu[s] + len(e)].tolist() == e.input_ids.tolist()
        assert batch.last[s] == cu[s] + len(e) - 1
    sequence = batch.sequence_ids
    assert batch.targets.tolist() == [t for _, units in expected(examples) for _, t in units]
    assert (batch.rows - batch.cu_seqlens[sequence] + 1).tolist() == [
        d for _, u in expected(examples) for d, _ in u
    ]
    assert batch.num_real_tokens == sum(map(len, examples)) and batch.max_seqlen == max(
        batch.seqlens
    )
    if multiple:
        assert batch.num_tokens % multiple == 0
    if padding_free:
        assert batch.num_tokens - batch.num_real_tokens < (multiple or 1)
    else:
        assert len(set(batch.seqlens)) == 1 and len(batch.seqlens) == len(examples)


def test_tail_of_padding_is_a_tree_but_no_sequence() -> None:
    batch = build_batch(documents(3, 2), pad_to_multiple_of=4)
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8] and batch.num_sequences == 2
    assert {name: n for name, n in batch.totals.items() if n} == {
        "tokens": 3,
        "processed": 5,
        "sequences": 2,
    }


@pytest.mark.parametrize("multiple", [None, 16])
@pytest.mark.parametrize("seed", range(20))
def test_shared_prefixes_read_back(seed: int, multiple: int | None) -> None:
    examples = (
        random_examples(seed, group=0)
        + random_examples(seed + 100, count=3)
        + random_examples(seed + 200, group=1)
    )
    batch = build_batch(examples, share_prefixes=True, pad_to_multiple_of=multiple)
    assert batch.end is not None
    assert read_back(batch) == expected(examples)
    assert batch.num_real_tokens < sum(map(len, examples)) and batch.lengths == tuple(
        map(len, examples)
    )
    distinct = {
        tuple(e.input_ids[: i + 1]) + (e.group if e.group >= 0 else 10 + n,)
        for n, e in enumerate(examples)
        for i in range(len(e))
    }
    assert batch.num_real_tokens == len(
        distinct
    )  # one token per distinct prefix: nothing left to share
    if batch.row_map is not None:
        rows, index = batch.row_map
        assert torch.equal(rows[index], batch.rows) and len(rows) == len(set(batch.rows.tolist()))


def test_prefix_sharing_without_anything_to_share_is_the_flat_batch() -> None:
    examples = [Example([1, 2], group=0), Example([3, 4], group=0)]
    flat, tree = build_batch(examples), build_batch(examples, share_prefixes=True)
    assert (
        tree.end is None
        and torch.equal(flat.cu_seqlens, tree.cu_seqlens)
        and torch.equal(flat.rows, tree.rows)
    )


def test_extras_follow_their_axis() -> None:
    pair = [
        Example([1, 2, 3], [0, 1, 1], {"margin": 0.5, "ref_logprobs": [-1.0, -2.0]}, pair=7),
        Example([1, 4], None, {"ref_logprobs": [-3.0]}, pair=7),
    ]
    batch = build_batch(pair)
    assert batch.num_pairs == 1 and batch.extras["margin"].tolist() == [0.5]
    assert batch.extras["ref_logprobs"].tolist() == [-1.0, -2.0, -3.0]
    kto = build_batch(
        [Example([1, 2], extras={"label": True}), Example([1, 2], extras={"label": False})]
    )
    assert kto.extras["label"].tolist() == [True, False] and kto.extras["label"].dtype == torch.bool


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "at least one"),
        ([Example([1], pair=0), Example([1], pair=1)], "chosen, rejected"),
        ([Example([1], pair=0)], "chosen, rejected"),
        ([Example([1], extras={"colour": 1})], "no extra 'colour'"),
        ([Example([1, 2], extras={"label": True}), Example([1, 2])], "missing"),
        ([Example([1, 2], extras={"ref_logprobs": [1.0, 2.0]})], r"shape \(1,\)"),
    ],
)
def test_refusals(examples: list[Example], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(examples)


@pytest.mark.parametrize("ids", [[], [1.5, 2.0], [3, -1], [2**31], [2**70], ["a"], [[1]], 7])
def test_what_are_no_token_ids(ids: object) -> None:
    with pytest.raises(ValueError, match=r"input_ids of \('rows', 3\) must be"):
        Example(ids, source=("rows", 3))  # type: ignore[arg-type]


def test_a_batch_knows_its_largest_id() -> None:
    assert build_batch([Example([5, 9]), Example([7])]).max_id == 9
    assert filler_batch().max_id == 0


def test_filler_counts_for_nothing() -> None:
    filler = filler_batch()
    assert (
        set(filler.totals.values()) == {0}
        and filler.num_tokens == 1
        and set(filler.extras) == set(EXTRAS)
    )
    assert filler.sequence_ids.shape == (0,)
