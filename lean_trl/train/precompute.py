"""Reference log-probs on disk: computed once, handed out by the feed, refused after a change.

    <output_dir>/ref_logprobs/train/{meta.json, logprobs.npy}

logprobs.npy is fp32, one number for each scored token, in the order of the store. meta.json names
what they were made from; the token ids themselves are part of it, so tokenizer, template, data and
max_length cannot change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from lean_trl.data.batch import build_batch, filler_batch
from lean_trl.data.store import Store
from lean_trl.train.distributed import World
from lean_trl.train.score import with_ref_logprobs
from lean_trl.types import Example

SAMPLE, STRIDE = 64 << 10, 16 << 20  # bytes hashed of every so many: training changes all of them


@dataclass(frozen=True)
class ScoredStore(Store):
    """A store whose Examples bring their ref_logprobs."""

    ref_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [U]
    units: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # [S + 1] into it

    def __getitem__(self, s: int) -> Example:
        example = super().__getitem__(s)
        values = self.ref_logprobs[self.units[s] : self.units[s + 1]]
        return replace(example, extras={**example.extras, "ref_logprobs": values})


def fingerprint_model(folder: Path) -> str:
    """Of config.json and of samples all over the weight files: 0.1 s for 16 GB."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for start in range(0, size, STRIDE):
                stream.seek(start)
                digest.update(stream.read(SAMPLE))
    digest.update((folder / "config.json").read_bytes())
    return digest.hexdigest()


def fingerprint_store(store: Store) -> str:
    """Of the token ids, of what is scored, and of where each sequence begins and ends."""
    digest = hashlib.blake2b(digest_size=16)
    for array in (store.start, store.stop):
        digest.update(np.ascontiguousarray(array).tobytes())
    for array in (store.tokens, store.scored):
        for low in range(0, len(array), 1 << 24):
            digest.update(np.ascontiguousarray(array[low : low + (1 << 24)]).tobytes())
    return digest.hexdigest()


def load_logprobs(folder: Path, store: Store, made_from: Mapping[str, Any]) -> ScoredStore | None:
    """The store with the ref_logprobs of `folder`; None when there are none.

    made_from: {what: fingerprint or value} of model, tokenizer and settings now. Raises ValueError
    that names what has changed since the log-probs were made.
    """
    if not (folder / "meta.json").is_file():
        return None
    then = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    now = json.loads(json.dumps(_meta(store, made_from)))
    changed = [what for what in {**then, **now} if then.get(what) != now.get(what)]
    if changed:
        details = "; ".join(f"{what} was {then.get(what)}, is {now.get(what)}" for what in changed)
        raise ValueError(
            f"{folder} was made with another {', '.join(changed)} ({details}): "
            "remove it, or make it again with scripts/score.py"
        )
    values = np.load(folder / "logprobs.npy", mmap_mode="r", allow_pickle=False)
    known = {item.name: getattr(store, item.name) for item in fields(store)}
    return ScoredStore(**known, ref_logprobs=values, units=_unit_offsets(store))


def write_logprobs(
    folder: Path,
    store: Store,
    offsets: np.ndarray,
    model: nn.Module,
    made_from: Mapping[str, Any],
    world: World,
    *,
    items_per_batch: int,
) -> None:
    """Score every sequence of the store with `model`, every rank its share, into `folder`.

    offsets: int64 [I + 1], the sequences of each item. All ranks must see the same folder. It has
    its meta.json, and so counts, only when everything is written.
    """
    units = _unit_offsets(store)
    file = folder / "logprobs.npy"
    if world.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meta.json").unlink(missing_ok=True)
        np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(int(units[-1]),))
    _wait(world)
    values = np.lib.format.open_memmap(file, mode="r+")
    for sequences in _shares(offsets, items_per_batch, world):
        examples = [store[s] for s in sequences]
        batch = build_batch(examples) if examples else filler_batch()
        logprobs = with_ref_logprobs(model, batch).extras["ref_logprobs"]
        if examples:
            first, last = units[sequences[0]], units[sequences[-1] + 1]
            values[first:last] = logprobs.float().cpu().numpy()
    values.flush()
    _wait(world)
    if world.is_main:
        meta = json.dumps(_meta(store, made_from), indent=1)
        (folder / "meta.json.part").write_text(meta, encoding="utf-8")
        os.replace(folder / "meta.json.part", folder / "meta.json")
    _wait(world)


def _shares(offsets: np.ndarray, items: int, world: World) -> Iterator[range]:
    """This rank's runs of consecutive sequences, as many on every rank; some may be empty."""
    starts = range(0, len(offsets) - 1, items)
    rounds = -(-len(starts) // world.size)
    for turn in range(rounds):
        index = turn * world.size + world.rank
        if index >= len(starts):
            yield range(0)
            continue
        last = min(starts[index] + items, len(offsets) - 1)
        yield range(int(offsets[starts[index]]), int(offsets[last]))


def _unit_offsets(store: Store) -> np.ndarray:
    """int64 [S + 1]: where the scored tokens of each sequence begin among all of them."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(store.count_scored())])


def _meta(store: Store, made_from: Mapping[str, Any]) -> dict[str, Any]:
    return {**made_from, "sequences": len(store), "tokens": fingerprint_store(store)}


def _wait(world: World) -> None:
    if world.group is not None:
        dist.all_reduce(torch.zeros(1), group=world.group)
