"""Completions on disk: the log of a run, and the engine that answers from such a file.

One JSON object a line: prompt, prompt_ids, completion_ids, completion, and where known logprobs,
finish_reason, versions, rewards, step; every other column of the row comes along. Floats are
written with all their digits, so what is read back is what was sampled, bit for bit.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lean_trl.data.rows import read_rows
from lean_trl.rollout.engine import Completion, Request

# What the engine takes from a line; the rest are columns for rewards.
_OWN = {
    *("prompt", "prompt_ids", "completion_ids", "completion", "logprobs", "finish_reason"),
    *("version", "versions", "scored", "step", "advantage"),
}


class ReplayEngine:
    """Answers each prompt with the file's completions of the same prompt_ids, in their order.

    No weights are needed. A prompt that comes again gets the lines that follow. Raises ValueError
    for a file without lines of completions.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lines: dict[tuple[int, ...], deque[dict[str, Any]]] = {}
        for number, row in enumerate(read_rows(self.path)):
            if "prompt_ids" not in row or "completion_ids" not in row:
                raise ValueError(
                    f"{self.path}, row {number}: a replay needs prompt_ids and completion_ids, "
                    f"got {', '.join(row)}"
                )
            self._lines.setdefault(tuple(row["prompt_ids"]), deque()).append(row)
        if not self._lines:
            raise ValueError(f"{self.path} holds no completions")
        self._ready: list[Completion] = []

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            lines = self._lines.get(request.prompt_ids, deque())
            if len(lines) < request.n:
                known = "the prompt is not in the file" if not lines else f"only {len(lines)} left"
                raise ValueError(
                    f"{self.path} cannot give {request.n} completions of prompt "
                    f"{list(request.prompt_ids[:8])}... ({known}): replay the prompts, tokenizer "
                    "and number of steps that the file was written with"
                )
            for index in range(request.n):
                self._ready.append(_completion(lines.popleft(), request, index))

    def poll(self, timeout: float | None = None) -> list[Completion]:
        ready, self._ready = self._ready, []
        return ready

    def skip(self, prompts: Iterable[tuple[tuple[int, ...], int]]) -> None:
        """Pass over the lines that (prompt, n) took before a run was resumed."""
        for prompt_ids, n in prompts:
            lines = self._lines.get(prompt_ids, deque())
            for _ in range(min(n, len(lines))):
                lines.popleft()

    def cancel(self, ids: Iterable[int]) -> None:
        gone = set(ids)
        self._ready = [c for c in self._ready if c.request_id not in gone]

    def sync_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        pass  # the file was written by weights of its own

    def sleep(self, level: int = 1) -> None:
        pass

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        self._lines.clear()


def _completion(row: Mapping[str, Any], request: Request, index: int) -> Completion:
    ids, logprobs, scored = row["completion_ids"], row.get("logprobs"), row.get("scored")
    for name, values in (("logprobs", logprobs), ("scored", scored)):
        if values is not None and len(values) != len(ids):
            raise ValueError(
                f"{len(ids)} completion_ids but {len(values)} {name} for prompt "
                f"{list(request.prompt_ids[:8])}...: one each is expected"
            )
    length, reason = len(ids), row.get("finish_reason")
    if length > request.max_tokens:
        length, reason = request.max_tokens, "length"
    versions = row.get("versions") or [[0, row.get("version", 0)]]
    return Completion(
        request.id,
        index,
        tuple(ids[:length]),
        None if logprobs is None else tuple(logprobs[:length]),
        reason,
        tuple((start, version) for start, version in versions if start < max(length, 1)),
        None if scored is None else tuple(scored[:length]),
        {name: value for name, value in row.items() if name not in _OWN},
    )


class CompletionLog:
    """Appends completions to a file that ReplayEngine reads.

    step: how many optimizer steps the run has done; lines of later ones, which a run that ended
    abruptly left behind, are dropped.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if _step_of(line) < step]
            partial = path.with_name(path.name + ".partial")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Lines with the names above; `step` is the number of steps done before them."""
        for record in records:
            self._file.write(json.dumps(record, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _step_of(line: str) -> float:
    """inf for a line that was cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return float("inf")
