"""One generation, in the memory of every rank: what was said, what it earned, what is learnt of it.

A rank generates the completions of its own prompts; then all ranks exchange them as arrays of
numbers, so that each can plan every window by itself, as for rows on disk.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lean_trl.rollout.engine import Completion
from lean_trl.train.gather import gather_columns
from lean_trl.types import Example

FIXED_ROWS = {"fixed": 9, "floats": 2}  # numbers that each rollout has
REASONS = (None, "stop", "length", "abort", "error")


@dataclass(frozen=True)
class Rollout:
    """One completion of a prompt. C ids, K rewards, U of the ids scored."""

    group: int  # number of its prompt in the generation; equal for all completions of it
    item: int  # number of the prompt's row among the prompts
    prompt_ids: np.ndarray  # int32 [P]
    completion_ids: np.ndarray  # int32 [C]
    scored: np.ndarray  # bool [C]; False: put in by a tool, not said by the model
    sampled_logprobs: np.ndarray | None  # fp32 [C], of the engine; None: not reported
    finish_reason: str | None
    truncated: bool
    version: int  # of the weights that sampled its first token
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # fp32 [K]
    reward: float = float("nan")  # all of them together; NaN: every function abstained
    advantage: float = 0.0
    masked: bool = False  # not learnt from, but counted in denominators and baselines
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)  # fp32 [U] each

    @property
    def num_scored(self) -> int:
        """U."""
        return int(self.scored.sum())

    @property
    def learnt(self) -> bool:
        """Whether it is forwarded at all."""
        return not self.masked and self.num_scored > 0 and not np.isnan(self.reward)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def example(self, *, pair: int = -1) -> Example:
        """Prompt and completion as one sequence with all that losses read."""
        ids = np.concatenate([self.prompt_ids, self.completion_ids])
        scored = np.concatenate([np.zeros(len(self.prompt_ids), bool), self.scored])
        extras = {**self.extras, "advantages": self.advantage, "reward": self.reward}
        return Example(ids, scored, extras, pair=pair, group=self.group)


def make_rollout(
    completion: Completion, group: int, item: int, prompt_ids: np.ndarray, stop_ids: Iterable[int]
) -> Rollout:
    """What an engine said, as arrays.

    Raises ValueError when its lists differ in length.
    """
    count = len(completion.ids)
    for name, values in (("logprobs", completion.logprobs), ("scored", completion.scored)):
        if values is not None and len(values) != count:
            raise ValueError(
                f"the engine gave {len(values)} {name} for {count} ids of request "
                f"{completion.request_id}: one each is expected"
            )
    logprobs = completion.logprobs
    scored = np.ones(count, bool) if completion.scored is None else np.array(completion.scored)
    return Rollout(
        group,
        item,
        prompt_ids,
        np.array(completion.ids, np.int32),
        scored.astype(bool),
        None if logprobs is None else np.array(logprobs, np.float32),
        completion.finish_reason,
        completion.truncated(stop_ids),
        completion.versions[0][1] if completion.versions else 0,
        masked=completion.finish_reason in ("abort", "error"),
    )


# -- across ranks, and to disk: the same arrays --


def pack_rollouts(rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
    """The rollouts as a few arrays: fixed [columns, N], and everything of variable length."""
    names = sorted({name for r in rollouts for name in r.extras})
    nothing = np.zeros(0, np.float32)
    fixed = [
        [
            *(r.group, r.item, len(r.prompt_ids), len(r.completion_ids)),
            *(r.sampled_logprobs is not None, REASONS.index(r.finish_reason), r.truncated),
            *(r.version, r.masked),
        ]
        for r in rollouts
    ]
    floats = [[r.reward, r.advantage] for r in rollouts]
    packed: dict[str, np.ndarray] = {
        "fixed": np.array(fixed, np.int64).reshape(len(rollouts), -1).T,
        "floats": np.array(floats, np.float64).reshape(len(rollouts), -1).T,
        "rewards": np.array([r.rewards for r in rollouts], np.float32).T,
        "prompt_ids": _cat([r.prompt_ids for r in rollouts], np.int32),
        "completion_ids": _cat([r.completion_ids for r in rollouts], np.int32),
        "scored": _cat([r.scored for r in rollouts], bool),
        "sampled": _cat(
            [nothing if r.sampled_logprobs is None else r.sampled_logprobs for r in rollouts],
            np.float32,
        ),
    }
    for name in names:
        # Those that are not learnt from were not scored.
        values = [r.extras.get(name, np.zeros(r.num_scored)) for r in rollouts]
        packed[f"extra_{name}"] = _cat(values, np.float32)
    return packed


def unpack_rollouts(packed: Mapping[str, np.ndarray]) -> list[Rollout]:
    """The inverse of pack_rollouts."""
    take = {name: _Taker(values) for name, values in packed.items() if values.ndim == 1}
    names = [name.removeprefix("extra_") for name in packed if name.startswith("extra_")]
    rollouts = []
    for i, row in enumerate(packed["fixed"].T.tolist()):
        group, item, prompt, count, sampled, reason, truncated, version, masked = row
        scored = take["scored"](count)
        units = int(scored.sum())
        reward, advantage = packed["floats"][:, i].tolist()
        rollouts.append(
            Rollout(
                group,
                item,
                take["prompt_ids"](prompt),
                take["completion_ids"](count),
                scored,
                take["sampled"](count) if sampled else None,
                REASONS[reason],
                bool(truncated),
                version,
                packed["rewards"][:, i] if packed["rewards"].size else np.zeros(0, np.float32),
                reward,
                advantage,
                bool(masked),
                {name: take[f"extra_{name}"](units) for name in names},
            )
        )
    return rollouts


class _Taker:
    """Hands out an array piece by piece."""

    def __init__(self, values: np.ndarray) -> None:
        self._values, self._at = values, 0

    def __call__(self, count: int) -> np.ndarray:
        self._at += count
        return self._values[self._at - count : self._at]


def exchange(rollouts: Sequence[Rollout], group: dist.ProcessGroup | None) -> list[Rollout]:
    """The rollouts of all ranks, ordered by their group; every rank gets the same list.

    Before they are judged or scored. Arrays of numbers travel, nothing that would have to be
    unpickled.
    """
    if group is None:
        return list(rollouts)
    mine = pack_rollouts(rollouts)
    assert not mine.pop("rewards").size, "exchanged before they have rewards"
    whole = {"rewards": np.zeros((0, 0), np.float32)}
    for name, values in mine.items():
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        rows = FIXED_ROWS.get(name, 1)
        tensor = tensor.reshape(rows, tensor.numel() // rows)
        gathered = gather_columns(tensor, group)[0].numpy()
        whole[name] = gathered if name in FIXED_ROWS else gathered[0]
    return sorted(unpack_rollouts(whole), key=lambda r: r.group)


def to_text(rollouts: Sequence[Rollout]) -> str:
    """The rollouts as text for a checkpoint, every bit of them."""
    file = io.BytesIO()
    np.savez_compressed(file, **pack_rollouts(rollouts))  # type: ignore[arg-type]
    return base64.b64encode(file.getvalue()).decode()


def from_text(text: str) -> list[Rollout]:
    """The inverse of to_text."""
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as arrays:
        return unpack_rollouts(dict(arrays))


def with_values(
    rollouts: Sequence[Rollout], name: str, values: Mapping[int, np.ndarray]
) -> list[Rollout]:
    """The rollouts with one more extra; values by position in `rollouts`, fp32 [U] each."""
    return [
        replace(r, extras={**r.extras, name: values[i]}) if i in values else r
        for i, r in enumerate(rollouts)
    ]


def _cat(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
