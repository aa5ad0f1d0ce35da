"""Examples -> Batch: lay sequences one after another, shift once, share prefixes when asked.

Everything is computed with numpy on the host; torch sees finished arrays. Letters: T tokens, S
sequences, R trees, U scored tokens, P pairs (lean_trl.types has a worked example of both layouts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lean_trl.types import EXTRAS, Batch, Example

# What padding is made of. Any valid id would do: nothing is ever inferred from ids, and padding is
# never scored.
PAD_ID = 0


@dataclass(frozen=True)
class _Layout:
    """Where the real tokens go. N counts a shared prefix once for each sequence that has it."""

    place: np.ndarray  # int64 [N]; index in [0, T) of each token of each sequence
    seqlens: np.ndarray  # int64 [R]; tokens of each tree, padding included
    end: np.ndarray | None  # int32 [T]; last descendant + 1


def build_batch(
    examples: Sequence[Example],
    *,
    device: torch.device | str = "cpu",
    padding_free: bool = True,
    pad_to_multiple_of: int | None = None,
    share_prefixes: bool = False,
    pin_memory: bool = False,
) -> Batch:
    """Lay `examples` one after another as one Batch.

    padding_free=False pads every sequence to the longest one with unscored tokens at its end (to
    measure what padding costs: loss and gradients are the same). pad_to_multiple_of rounds T up
    with one unscored tail, or with padding_free=False the length of every sequence.
    share_prefixes=True stores the common prefix of consecutive examples of one pair or group once,
    as a tree.

    Raises ValueError for no examples, pairs that are not adjacent, or extras that EXTRAS does not
    declare.

    >>> batch = build_batch([Example([5, 6, 7]), Example([8, 9])])
    >>> batch.rows.tolist(), batch.targets.tolist(), batch.cu_units.tolist()
    ([0, 1, 3], [6, 7, 9], [0, 2, 3])
    >>> scored = [0, 0, 0, 1]
    >>> pair = [Example([5, 6, 7, 8], scored, group=0), Example([5, 6, 7, 9], scored, group=0)]
    >>> tree = build_batch(pair, share_prefixes=True)
    >>> tree.input_ids.tolist(), tree.positions.tolist(), tree.end.tolist(), tree.rows.tolist()
    ([5, 6, 7, 8, 9], [0, 1, 2, 3, 3], [5, 5, 5, 4, 5], [2, 2])
    """
    if not examples:
        raise ValueError(
            "build_batch needs at least one Example; filler_batch() makes an empty batch"
        )
    if share_prefixes and not padding_free:
        raise ValueError(
            "share_prefixes needs padding_free: a shared token has no row of its own to pad"
        )
    multiple = pad_to_multiple_of or 1
    if multiple < 1:
        raise ValueError(f"pad_to_multiple_of must be at least 1, got {pad_to_multiple_of}")

    ids = np.concatenate([example.input_ids for example in examples])
    scored = np.concatenate([example.scored for example in examples])
    lengths = np.array([len(example) for example in examples])
    starts = _offsets(lengths)[:-1]
    depth = np.arange(len(ids)) - np.repeat(starts, lengths)

    layout = (
        _tree_layout(examples) if share_prefixes else _flat_layout(lengths, padding_free, multiple)
    )
    num_real_tokens = int(layout.seqlens.sum()) if padding_free else len(ids)
    seqlens, end = layout.seqlens, layout.end
    tail = -int(seqlens.sum()) % multiple
    if tail:
        seqlens = np.append(seqlens, tail)
        end = None if end is None else np.append(end, np.full(tail, seqlens.sum(), np.int32))

    cu_seqlens = _offsets(seqlens)
    input_ids = np.full(cu_seqlens[-1], PAD_ID, np.int64)
    input_ids[layout.place] = ids
    # Right for padding and for trees without branches; the next line sets the depth of branching
    # ones.
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], seqlens)
    positions[layout.place] = depth

    # The one shift: a scored token is predicted from the token before it, which is of the same
    # sequence because the first token of an Example is never scored.
    unit = np.flatnonzero(scored)
    rows = layout.place[unit - 1]
    units = np.add.reduceat(scored, starts, dtype=np.int64)
    num_pairs = _count_pairs(examples)

    def tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        value = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        return (value.pin_memory() if pin_memory else value).to(device, non_blocking=pin_memory)

    row_map = _row_map(rows) if end is not None else None
    return Batch(
        input_ids=tensor(input_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        cu_seqlens=tensor(cu_seqlens, torch.int32),
        end=None if end is None else tensor(end, torch.int32),
        rows=tensor(rows, torch.int64),
        targets=tensor(ids[unit], torch.int64),
        cu_units=tensor(_offsets(units), torch.int64),
        last=tensor(layout.place[starts + lengths - 1], torch.int64),
        row_map=row_map and (tensor(row_map[0], torch.int64), tensor(row_map[1], torch.int64)),
        extras={n: tensor(a, EXTRAS[n].dtype) for n, a in _gather_extras(examples, units).items()},
        max_seqlen=int(seqlens.max()),
        seqlens=tuple(seqlens.tolist()),
        lengths=tuple(lengths.tolist()),
        units=tuple(units.tolist()),
        num_real_tokens=num_real_tokens,
        num_pairs=num_pairs,
        num_groups=len({example.group for example in examples if example.group >= 0}),
        max_id=int(ids.max()),
        sources=tuple(example.source for example in examples),
    )


def filler_batch(device: torch.device | str = "cpu", *, mismatched: bool = False) -> Batch:
    """A micro-batch that counts for nothing: one unscored token, no sequence.

    It lets every rank run as many micro-batches. mismatched: it has such a batch beside it. It
    carries every extra, empty, so any objective can read what it needs.

    >>> filler_batch().totals["processed"], filler_batch().num_tokens
    (0, 1)
    """
    none = torch.zeros(0, dtype=torch.int64, device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return Batch(
        input_ids=zero + PAD_ID,
        positions=zero,
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32, device=device),
        end=None,
        rows=none,
        targets=none,
        cu_units=zero,
        last=none,
        row_map=None,
        extras={name: none.to(extra.dtype) for name, extra in EXTRAS.items()},
        max_seqlen=1,
        seqlens=(1,),
        lengths=(),
        units=(),
        num_real_tokens=0,
        mismatched=filler_batch(device) if mismatched else None,
    )


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """[n] -> [n + 1], from 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _flat_layout(lengths: np.ndarray, padding_free: bool, multiple: int) -> _Layout:
    seqlens = (
        lengths if padding_free else np.full_like(lengths, -(-lengths.max() // multiple) * multiple)
    )
    shift = _offsets(seqlens)[:-1] - _offsets(lengths)[:-1]
    return _Layout(np.arange(lengths.sum()) + np.repeat(shift, lengths), seqlens, None)


def _tree_layout(examples: Sequence[Example]) -> _Layout:
    """Depth-first tries of each pair or group; children in order of first appearance."""
    places = [np.empty(len(example), np.int64) for example in examples]
    ends: list[np.ndarray] = []
    size = 0

    def grow(members: list[int], depth: int) -> None:
        """Emit what all members have in common from `depth` on, then each branch."""
        nonlocal size
        first = examples[members[0]].input_ids
        shared = min(_common(first, examples[m].input_ids) for m in members)
        here = np.arange(size, size + shared - depth)
        for m in members:
            places[m][depth:shared] = here
        ends.append(np.empty(len(here), np.int32))
        segment, size = ends[-1], size + len(here)
        for branch in _branches(examples, members, shared):
            grow(branch, shared)
        segment[:] = size

    seqlens: list[int] = []
    for family in _families(examples):
        for members in _branches(examples, family, 0):
            before = size
            grow(members, 0)
            seqlens.append(size - before)
    end = np.concatenate(ends)
    shares = size < sum(len(example) for example in examples)
    return _Layout(np.concatenate(places), np.array(seqlens), end if shares else None)


def _families(examples: Sequence[Example]) -> list[list[int]]:
    """Runs of consecutive examples that may share a prefix."""
    families: list[list[int]] = []
    for index, example in enumerate(examples):
        previous = examples[index - 1] if index else None
        related = previous is not None and (
            (example.pair >= 0 and example.pair == previous.pair)
            or (example.group >= 0 and example.group == previous.group)
        )
        if related:
            families[-1].append(index)
        else:
            families.append([index])
    return families


def _branches(examples: Sequence[Example], members: list[int], depth: int) -> list[list[int]]:
    """The members longer than `depth`, by the token that they have there."""
    branches: dict[int, list[int]] = {}
    for m in members:
        ids = examples[m].input_ids
        if len(ids) > depth:
            branches.setdefault(int(ids[depth]), []).append(m)
    return list(branches.values())


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


def _row_map(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    distinct, index = np.unique(rows, return_inverse=True)
    return None if len(distinct) == len(rows) else (distinct, index)


def _count_pairs(examples: Sequence[Example]) -> int:
    pairs = [example.pair for example in examples]
    if all(pair < 0 for pair in pairs):
        return 0
    adjacent = len(pairs) % 2 == 0 and pairs[0::2] == pairs[1::2] and min(pairs) >= 0
    if not adjacent or len(set(pairs)) * 2 != len(pairs):
        raise ValueError(
            f"a preference batch is chosen, rejected, chosen, rejected ...; got pair ids {pairs}"
        )
    return len(pairs) // 2


def _gather_extras(examples: Sequence[Example], units: np.ndarray) -> dict[str, np.ndarray]:
    """{name: array along its declared axis}. A pair's extra is read from its chosen Example."""
    gathered: dict[str, np.ndarray] = {}
    for name in dict.fromkeys(name for example in examples for name in example.extras):
        if name not in EXTRAS:
            raise ValueError(f"a Batch carries no extra {name!r}; known: {', '.join(EXTRAS)}")
        axis = EXTRAS[name].axis
        owners = examples[0::2] if axis == "P" else examples
        missing = [example.source for example in owners if name not in example.extras]
        if missing:
            raise ValueError(
                f"{name!r} is missing in {missing[0]} but given in other rows of the batch"
            )
        if axis != "U":
            gathered[name] = np.array([example.extras[name] for example in owners])
            continue
        values = [np.asarray(example.extras[name]) for example in owners]
        for example, value, count in zip(owners, values, units, strict=True):
            if value.shape != (count,):
                raise ValueError(
                    f"{name!r} of {example.source} must have shape ({count},), got {value.shape}"
                )
        gathered[name] = np.concatenate(values)
    return gathered
