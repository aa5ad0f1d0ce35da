"""The files of a checkpoint: shards that are hashed while they are written, and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lean_trl.model.safetensors_io import write_file

FORMAT = 1


class ShardWriter(StorageWriter):
    """This rank's part as one safetensors file: streamed, hashed on the way, fsynced.

    torch's HuggingFaceStorageWriter makes the same files, but holds all their bytes in memory once
    more. commit: called on rank 0 with {file: {bytes, sha256}} of all ranks.
    """

    def __init__(
        self,
        folder: Path,
        local: Mapping[str, Tensor],
        commit: Callable[[dict[str, dict[str, Any]]], None],
        event: Callable[[str], None],
    ) -> None:
        self.folder, self.local, self.commit, self.event = folder, local, commit, event

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if is_coordinator:  # the others write only after all have planned
            self.event("before_write")
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan) if plan.items else [])
        return done

    def _write(self, plan: SavePlan) -> list[WriteResult]:
        file = f"shard-{plan.storage_data:05}.safetensors"
        tensors = {item.index.fqn: self.local[item.index.fqn] for item in plan.items}
        offsets = {
            item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            for item in plan.items
            if item.tensor_data is not None
        }
        digest, written = hashlib.sha256(), 0
        half = sum(tensor.nbytes for tensor in tensors.values()) // 2

        def watch(part: bytes | memoryview) -> None:
            nonlocal written
            digest.update(part)
            if written <= half < written + len(part):
                self.event("mid_file")
            written += len(part)

        # The key that torch's reader looks for.
        metadata = {"DCP_SHARDING_INFO": json.dumps(offsets)}
        write_file(self.folder / file, tensors, metadata=metadata, watch=watch)
        entry = {file: {"bytes": written, "sha256": digest.hexdigest()}}
        return [WriteResult(plan.items[0].index, written, entry)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, dict[str, Any]] = {}
        for result in (result for rank in results for result in rank):
            files |= result.storage_data
        self.commit(files)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True


def saved_sizes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor in a checkpoint."""
    metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {
        name: tuple(entry.size)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """state.json, with the sha256 of its own content."""
    content = {"format": FORMAT, **content}
    content["sha256"] = _digest(content)
    with open(folder / "state.json", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


class OtherFormat(ValueError):
    """A checkpoint of another version: whole, but not for this one."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """What write_manifest wrote; ValueError when it is not that any more."""
    file = folder / "state.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        digest = content.pop("sha256")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"state.json cannot be read ({error})") from None
    if digest != _digest(content):
        raise ValueError("state.json is not what was written (its sha256 differs)")
    if content["format"] != FORMAT:
        raise OtherFormat(
            f"{folder} is of format {content['format']}, this version reads {FORMAT}: "
            "resume with the version that wrote it, or set checkpoint.resume never"
        )
    return content


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def problems_of(folder: Path, files: Mapping[str, Any], rank: int, ranks: int) -> list[str]:
    found = []
    for name in sorted(files)[rank::ranks]:
        file, expected = folder / name, files[name]
        size = file.stat().st_size if file.is_file() else -1
        if size < 0:
            found.append(f"{name} is missing")
        elif size != expected["bytes"]:
            found.append(f"{name} has {size} bytes, {expected['bytes']} were written")
        else:
            with open(file, "rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != expected["sha256"]:
                    found.append(f"{name} is not what was written (its sha256 differs)")
    return found


def fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
