"""The protocol of engines: token ids in, token ids out, requests that finish one by one.

    completions = generate(engine, [Request(0, (5, 6, 7), n=4, max_tokens=32)])

Nothing is ever tokenised again between an engine and the loss: text is made from ids for rewards
and logs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The filters apply in this order, after the temperature.

    Raises ValueError for values out of range.
    """

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # of the k most likely; 0: all
    top_p: float = 1.0  # of the fewest that hold this probability together
    min_p: float = 0.0  # of those at least this times as likely as the most likely
    repetition_penalty: float = 1.0  # > 1: logits of tokens seen before are lowered

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or self.repetition_penalty <= 0:
            raise ValueError(
                f"temperature {self.temperature} and top_k {self.top_k} must not be negative, "
                f"repetition_penalty {self.repetition_penalty} must be above 0"
            )
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be in (0, 1], min_p {self.min_p} in [0, 1]")


@dataclass(frozen=True)
class Request:
    """One prompt to answer n times."""

    id: int
    prompt_ids: tuple[int, ...]  # at least one
    n: int = 1
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()  # each ends a completion and belongs to it
    seed: int = 0  # completion i of equal requests is the same, whatever else the engine runs
    max_tokens: int = 512

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"request {self.id} has an empty prompt: give it one id (BOS will do)")
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(
                f"request {self.id} asks for {self.n} completions of {self.max_tokens} tokens: "
                "both must be at least 1"
            )


@dataclass(frozen=True)
class Completion:
    """One answer. `versions` says which weights sampled it: (first token, version) of each span."""

    request_id: int
    index: int  # 0 .. n - 1
    ids: tuple[int, ...]  # with the stop id that ended it; may be empty
    # log p of each id at the request's temperature, before the filters; None: not reported
    logprobs: tuple[float, ...] | None = None
    finish_reason: FinishReason | None = None  # None: not reported, see `truncated`
    versions: tuple[tuple[int, int], ...] = ()
    # True: a token that the model said and learns from; None: all (tools put in others)
    scored: tuple[bool, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # for rewards, beside the prompt's row

    def truncated(self, stop_ids: Iterable[int]) -> bool:
        """Cut off: finish_reason length, or none given and the last id ends nothing."""
        if self.finish_reason is not None:
            return self.finish_reason == "length"
        return not self.ids or self.ids[-1] not in set(stop_ids)


class Engine(Protocol):
    """What the rollout feed needs of an engine."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Take in requests; ids must be new."""

    def poll(self, timeout: float | None = None) -> list[Completion]:
        """Completions that are done, in any order; waits for at least one when any is under way."""

    def cancel(self, ids: Iterable[int]) -> None:
        """Drop requests; those under way come back with finish_reason abort."""

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the trainer's weights; completions say `version` from here on."""

    def sleep(self, level: int = 1) -> None:
        """Free memory between generations; 2 also forgets the weights."""

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Undo `sleep`."""

    def reset_prefix_cache(self) -> None:
        """Forget what was computed with older weights."""

    def close(self) -> None:
        """Free everything."""


def generate(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Submit, and poll until all n of each request are there: sorted by (request, index).

    Raises RuntimeError when the engine has nothing left to do and some are missing.
    """
    engine.submit(requests)
    waiting = {(request.id, index) for request in requests for index in range(request.n)}
    place = {request.id: i for i, request in enumerate(requests)}
    # At least once: ranks that share an engine's weights meet in poll, with requests or without.
    done = engine.poll()
    waiting -= {(c.request_id, c.index) for c in done}
    while waiting:
        polled = engine.poll()
        if not polled:
            raise RuntimeError(
                f"the engine is idle, but {len(waiting)} completions are missing, "
                f"the first of request {min(waiting)[0]}"
            )
        waiting -= {(c.request_id, c.index) for c in polled}
        done += polled
    return sorted(done, key=lambda c: (place[c.request_id], c.index))
