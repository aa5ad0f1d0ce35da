"""Read and write safetensors files without ever holding a tensor twice.

The format (huggingface.co/docs/safetensors): 8 bytes little-endian length of the header, the header
as JSON {name: {dtype, shape, data_offsets}}, then the data. Nothing in it is executed. Tensors are
read straight into the memory where they will live, or through a small buffer when dtype or device
differ; safetensors' own reader maps the file instead, which counts as memory a second time and ends
the process by a signal when the file is cut short.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

# In the order of the format's own writer, which lays the last kind first: wide before narrow, so
# that every tensor is aligned.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: where it lies and what it is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    def chunks(self, start: int = 0, count: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """(place from `start` on, 1-D tensor) over `count` elements, all by default, in one buffer
        that each step overwrites.
        """
        count, size = prod(self.shape) if count is None else count, self.dtype.itemsize
        step = max(1, min(count, CHUNK_BYTES // size))
        buffer = torch.empty(step, dtype=self.dtype)
        with open(self.file, "rb") as file:
            file.seek(self.offset + start * size)
            for first in range(0, count, step):
                part = buffer[: min(step, count - first)]
                if file.readinto(_bytes(part)) != part.nbytes:
                    raise ValueError(
                        f"{self.file} ends in the middle of a tensor: download it again"
                    )
                yield first, part

    def copy_into(self, destination: Tensor, name: str, row: int = 0) -> None:
        """Fill `destination` (contiguous, any dtype and device) with rows from `row` on, as many as
        it has. ValueError when a value is not finite.
        """
        flat = destination.view(-1)
        for first, part in self.chunks(row * prod(self.shape[1:]), flat.shape[0]):
            if not torch.isfinite(part).all():
                raise ValueError(
                    f"{self.file}: {name} has values that are not finite (NaN or infinity)"
                )
            flat[first : first + len(part)] = part

    def load(self) -> Tensor:
        """The tensor as it is stored."""
        out = torch.empty(prod(self.shape), dtype=self.dtype)
        for first, part in self.chunks():
            out[first : first + len(part)] = part
        return out.view(self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds. Checks the header against the file; reads no data."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is not a safetensors file, or was cut short: download it again"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:  # bad UTF-8 or bad JSON
            raise ValueError(f"{path} has a broken header ({error}): download it again") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a broken header (no JSON object): download it again")
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: Any, base: int, file_size: int) -> Stored:
    try:
        code, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        valid = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        valid = valid and isinstance(code, str)
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise ValueError(f"{path}: the header's entry for {name} is broken: {entry!r:.200}")
    if code not in DTYPES:
        raise ValueError(f"{path}: {name} has dtype {code}; known are {', '.join(DTYPES)}")
    if end - begin != prod(shape) * DTYPES[code].itemsize:
        raise ValueError(
            f"{path}: {name} takes {end - begin} bytes, which does not fit {code} {list(shape)}"
        )
    if base + end > file_size:
        raise ValueError(
            f"{path} is {file_size} bytes, but {name} ends at {base + end}: download it again"
        )
    return Stored(path, DTYPES[code], shape, base + begin)


def read_folder(folder: Path) -> dict[str, Stored]:
    """All tensors of a model folder: one model.safetensors, or the files that
    model.safetensors.index.json lists.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        return _read_shards(folder, index)
    if single.is_file():
        return read_header(single)
    pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(
        p.name for p in folder.glob("*.pt*")
    )
    hint = f" ({pickled[0]} is a pickle, which is never loaded: convert it)" if pickled else ""
    raise ValueError(f"{folder} has neither {single.name} nor {index.name}{hint}")


def _read_shards(folder: Path, index: Path) -> dict[str, Stored]:
    content = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    shards: dict[str, dict[str, Stored]] = {}
    for name, shard in weight_map.items():
        # A name, never a path: an index must not reach files outside its folder.
        if not isinstance(shard, str) or shard in ("", ".", "..") or "/" in shard or "\\" in shard:
            raise ValueError(
                f"{index}: {name} points to {shard!r}, expected the name of a file beside it"
            )
        if shard not in shards:
            if not (folder / shard).is_file():
                raise ValueError(f"{index} lists {shard}, which is not in {folder}")
            shards[shard] = read_header(folder / shard)
        if name not in shards[shard]:
            raise ValueError(f"{index} says that {name} is in {shard}, but it is not")
    stored = {name: shards[shard][name] for name, shard in weight_map.items()}
    for shard, content in shards.items():
        if extra := [name for name in content if name not in stored]:
            raise ValueError(f"{folder / shard} holds {extra[0]}, which {index.name} does not list")
    return stored


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the file."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def write_file(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    watch: Callable[[bytes | memoryview], object] = len,
) -> None:
    """Write a file with the same bytes that safetensors.torch.save_file writes, one tensor in
    memory at a time.

    It appears under its name only when it is complete. metadata: more of the header's strings.
    watch: sees the bytes, part by part, before they are written.
    """
    rank = list(DTYPES.values())
    order = sorted(tensors, key=lambda name: (-rank.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            watch(part)
            file.write(part)
        for name in order:
            tensor = tensors[name].detach().contiguous().cpu()
            if tensor.numel():
                watch(_bytes(tensor))
                file.write(_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as HF does (two spaces, a final newline); it appears under its name only when it
    is complete.
    """
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
