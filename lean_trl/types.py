"""The types that every part of the library speaks, each field with its shape, unit and meaning.

    row -> Example -> plan -> Batch -> model -> Scores -> objective -> LossTerms -> train_step

Dimension letters: T tokens of a batch (padding included), R independent trees, S sequences, U
scored tokens, P pairs, Q distinct hidden rows, E experts.

Worked example. Documents of 3 and 2 tokens, all scored (the first token of a document is never a
target):

    input_ids  a b c | d e      cu_seqlens 0 3 5      rows     0 1 | 3
    positions  0 1 2 | 0 1      last       2 4        targets  b c | e        cu_units 0 2 3

A prompt `abc` with completions `d` and `e` that share it (a tree: R = 1, S = 2):

    input_ids  a b c d e        cu_seqlens 0 5        rows     2 2
    positions  0 1 2 3 3        end  5 5 5 4 5        targets  d e       cu_units 0 1 2   last 3 4
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

# The label that data files (and the `targets` that outsiders pass to linear_logprobs) use for "no
# loss here".
IGNORE_INDEX = -100
MAX_ID = 2**31 - 1  # ids are kept as int32

# What a loss term may be divided by; counted over the whole window and all ranks before the first
# forward.
Unit = Literal["tokens", "processed", "sequences", "pairs", "groups", "chosen_tokens"]
UNITS: tuple[str, ...] = (
    "tokens",  # scored
    "processed",  # real, scored or not
    "sequences",
    "pairs",
    "groups",
    "chosen_tokens",  # scored tokens of the chosen completions; 0 without pairs
)
Totals = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Example:
    """One token sequence and which of its tokens are learnt from.

    A preference pair is two consecutive Examples, chosen then rejected, with the same `pair`.

    >>> Example([5, 6, 7], scored=[False, False, True]).num_scored
    1
    >>> Example([5, 6, 7]).num_scored  # everything but the first token, which nothing predicts
    2
    """

    input_ids: np.ndarray  # int32 [n], n >= 1; any sequence of ints is accepted and converted
    scored: np.ndarray | None = (
        None  # bool [n]; True: predict this token from the one before. None: all
    )
    extras: Mapping[str, Any] = field(default_factory=dict)  # per-sequence data, see EXTRAS
    pair: int = -1  # id shared by chosen and rejected; -1: not part of a pair
    group: int = -1  # id shared by the completions of one prompt; -1: no group
    source: tuple[str, int] = ("", -1)  # (file, row) that it came from, for messages

    def __post_init__(self) -> None:
        given = np.asarray(self.input_ids)
        if given.ndim != 1 or len(given) == 0:
            raise ValueError(
                f"input_ids of {self.source} must be a non-empty list of ints, "
                f"got shape {given.shape}"
            )
        if given.dtype.kind not in "iu" or given.min() < 0 or given.max() > MAX_ID:
            raise ValueError(
                f"input_ids of {self.source} must be ints from 0 to {MAX_ID}, "
                f"got {reprlib.repr(given.tolist())}"
            )
        ids = given.astype(np.int32, copy=False)
        scored = np.ones(len(ids), bool) if self.scored is None else np.asarray(self.scored, bool)
        if scored.shape != ids.shape:
            raise ValueError(
                f"scored of {self.source} has {scored.shape[0]} entries for "
                f"{len(ids)} tokens: give one per token"
            )
        if scored[0]:  # the first token has no predecessor
            scored = scored.copy()
            scored[0] = False
        object.__setattr__(self, "input_ids", ids)
        object.__setattr__(self, "scored", scored)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_scored(self) -> int:
        assert self.scored is not None  # filled in when it was left out
        return int(np.count_nonzero(self.scored))


@dataclass(frozen=True)
class Extra:
    """What a name in Batch.extras means.

    axis: U per scored token, S per sequence, P per pair; the same in each batch of a window: E per
    expert, W one value.
    """

    axis: Literal["U", "S", "P", "E", "W"]
    dtype: torch.dtype
    meaning: str


# Every extra that a Batch may carry, declared once; build_batch refuses other names.
EXTRAS: dict[str, Extra] = {
    "ref_logprobs": Extra(
        "U", torch.float32, "log-probability of the token under the frozen reference"
    ),
    "old_logprobs": Extra("U", torch.float32, "log-probability of the token when it was sampled"),
    "sampled_logprobs": Extra("U", torch.float32, "log-probability that the engine reported"),
    "importance_weights": Extra("U", torch.float32, "correction of engine to trainer, a factor"),
    "advantages": Extra("S", torch.float32, "advantage of the sequence"),
    "reward": Extra("S", torch.float32, "reward of the sequence, all functions together"),
    "entropy_threshold": Extra("W", torch.float32, "entropy that a token must reach to be learnt"),
    "entropy_kept": Extra("W", torch.float32, "share of the window's tokens that reach it"),
    "entropy_coef": Extra("W", torch.float32, "weight of the entropy bonus in this window"),
    "expert_shares": Extra(
        "E", torch.float32, "share of the window's tokens that chose the expert"
    ),
    "margin": Extra("P", torch.float32, "reward margin asked of the pair"),
    "label": Extra("S", torch.bool, "desirable (True) or undesirable completion, KTO"),
    "kl": Extra("S", torch.float32, "KTO: KL estimate of the whole window, the same for all"),
    "aot_ref_margin": Extra("P", torch.float32, "reference margin of the rank of the pair's"),
    "aot_rejected": Extra("P", torch.float32, "rejected log-ratio of the rank of the chosen one"),
    "aot_chosen": Extra("P", torch.float32, "chosen log-ratio of the rank of the rejected one"),
}


@dataclass(frozen=True)
class Batch:
    """Some sequences laid one after another: no batch dimension, no attention mask, no shift left
    to do.

    Tensors live on one device; the host fields repeat every offset as Python ints, so nothing in a
    step reads a tensor back. In preference batches sequences 2p and 2p + 1 are chosen and rejected
    of pair p.
    """

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]; depth of the token in its sequence (tree), from 0
    # int32 [R + 1]; bounds of the independent trees. R = S when nothing branches, and one more when
    # a tail of padding rounds T up: that tail is a tree of its own but no sequence.
    cu_seqlens: Tensor
    end: (
        Tensor | None
    )  # int32 [T]; last descendant + 1 of each token; None when no prefix is shared
    # int64 [U]; scored token u is predicted from hidden row rows[u]; grouped by sequence, in order
    rows: Tensor
    targets: Tensor  # int64 [U]; the id of scored token u
    cu_units: (
        Tensor  # int64 [S + 1]; scored tokens of sequence s are [cu_units[s], cu_units[s + 1])
    )
    last: Tensor  # int64 [S]; row of each sequence's last real token
    # (distinct rows int64 [Q] ascending, index into them of each unit int64 [U]), or None: all rows
    # differ.
    row_map: tuple[Tensor, Tensor] | None
    extras: dict[str, Tensor]  # see EXTRAS
    # -- host --
    max_seqlen: int  # longest tree, in tokens
    seqlens: tuple[int, ...]  # [R]; differences of cu_seqlens
    lengths: tuple[int, ...]  # [S]; real tokens of each sequence (a shared prefix counts for each)
    units: tuple[int, ...]  # [S]; scored tokens of each sequence
    num_real_tokens: int  # tokens in [T] that are not padding (a shared prefix counts once)
    num_pairs: int = 0
    num_groups: int = 0
    temperature: float = 1.0  # the scored tokens were sampled at it: logits are divided by it
    max_completion_length: int = 0  # tokens that a completion could have had; 0: not sampled
    max_id: int = 0  # largest of input_ids: the model refuses one that it has no embedding for
    sources: tuple[tuple[str, int], ...] = ()  # [S]; (file, row) of each sequence, for messages
    # The same prompts with completions of other rows, for KTO's KL: scored, never trained on.
    mismatched: Batch | None = None

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return self.input_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_units(self) -> int:
        """U."""
        return self.rows.shape[0]

    @property
    def sequence_ids(self) -> Tensor:
        """int64 [U]: the sequence that each scored token belongs to."""
        index = torch.arange(self.num_sequences, device=self.cu_units.device)
        return torch.repeat_interleave(index, self.cu_units.diff(), output_size=self.num_units)

    @property
    def totals(self) -> dict[str, int]:
        """This batch's share of each unit that a loss term may be divided by."""
        counts = (
            self.num_units,
            self.num_real_tokens,
            self.num_sequences,
            self.num_pairs,
            self.num_groups,
            sum(self.units[0::2]) if self.num_pairs else 0,
        )
        return dict(zip(UNITS, counts, strict=True))

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on `device` (asynchronously from pinned memory)."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, non_blocking=True)
            if isinstance(value, Batch):
                return value.to(device)
            if isinstance(value, dict):
                return {name: move(item) for name, item in value.items()}
            if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
                return tuple(move(item) for item in value)
            return value

        return replace(self, **{f.name: move(getattr(self, f.name)) for f in fields(self)})

    def with_extras(self, **extras: Tensor) -> Batch:
        """The same batch with more (or other) extras."""
        return replace(self, extras={**self.extras, **extras})


@dataclass(frozen=True)
class Scores:
    """What the model says of the scored tokens: statistics in fp32, never logits.

    `top1`, `entropy` and `log_sum_sq` are there only when asked for in `want`; `entropy` carries
    gradients.
    """

    logprobs: Tensor  # fp32 [U]; log p(target)
    entropy: Tensor | None = None  # fp32 [U]; of the whole next-token distribution, in nats
    top1: Tensor | None = None  # bool [U]; the target is the most likely token
    log_sum_sq: Tensor | None = None  # fp32 [U]; log sum_v p_v^2
    reward: Tensor | None = None  # fp32 [S]; reward models only
    router_probs: Tensor | None = None  # fp32 [E, T]; mean over MoE layers of the router's softmax
    expert_counts: Tensor | None = (
        None  # fp32 [E]; assignments of real tokens, summed over MoE layers
    )


WANT = ("entropy", "top1", "log_sum_sq")


@dataclass(frozen=True)
class Term:
    """One summand of the loss: coef * sum(values * weights) / totals[unit].

    values carry the gradient; weights never do and never depend on how a window is cut into
    micro-batches.
    """

    values: Tensor  # fp32 [any]
    weights: Tensor | None  # same shape; None: all 1
    unit: str  # one of UNITS
    coef: float | Tensor = 1.0

    def total(self) -> Tensor:
        """fp32 scalar: coef * sum(values * weights), before the division."""
        values = self.values if self.weights is None else self.values * self.weights
        return self.coef * values.sum()


How = Literal["mean", "sum", "min", "max", "last", "contrast"]


@dataclass(frozen=True)
class Metric:
    """A number to log, combined over micro-batches and ranks.

    mean is sum(values * weights) / sum(weights); contrast is the mean of those with weights above 0
    less the mean of those with weights below.
    """

    values: Tensor  # [any], detached
    weights: Tensor | None = (
        None  # same shape; None: all 1; a weight of 0 leaves the value out of min and max too
    )
    how: How = "mean"


@dataclass(frozen=True)
class LossTerms:
    """What an objective returns; it is the step that divides, sums, reduces and logs."""

    terms: tuple[Term, ...]
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What train_step returns: tensors, not yet read back, equal on all ranks."""

    loss: Tensor  # fp32 scalar
    grad_norm: Tensor  # fp32 scalar, before clipping
    metrics: dict[str, Tensor]  # fp32 scalars


@dataclass(frozen=True)
class Method:
    """One way to train: where its examples come from and what its objective makes of the scores.

    The step knows nothing else about a method. `bind` gives the functions below the run's loss
    settings; only a bound Method may be handed to train_step.
    """

    name: str
    # one of UNITS; a window whose total of it is 0 has nothing to learn from and changes no weight
    unit: str
    examples: str  # the kind of rows it trains on, a key of the data part's table
    objective: Callable[
        ..., LossTerms
    ]  # (scores, batch, loss settings); once bound (scores, batch)
    want: (
        tuple[str, ...] | Callable[[Any], tuple[str, ...]]
    ) = ()  # statistics beyond logprobs, see WANT
    reference: bool | Callable[[Any], bool] = False  # needs ref_logprobs in extras
    # Losses that need a statistic of the whole window: loss settings -> None or, once bound,
    # (score, micro-batches, group) -> the micro-batches with the statistic in their extras, where
    # score(batch) gives Scores without gradients at the current weights. So the loss is the same
    # however the window is cut. All ranks must score equally often.
    window_statistics: Callable[..., Any] | None = None
    rollout: bool = False  # sequences come from an engine, not from files
    check: Callable[[Any], None] | None = None  # raises ValueError for loss settings at odds

    def bind(self, loss: Any) -> Method:
        """The same method with the run's loss settings filled in."""
        if self.check:
            self.check(loss)
        statistics = self.window_statistics
        return replace(
            self,
            objective=partial(self.objective, loss=loss),
            want=self.want(loss) if callable(self.want) else self.want,
            reference=self.reference(loss) if callable(self.reference) else self.reference,
            window_statistics=statistics(loss) if statistics else None,
        )
