"""The data section's `path`: one source of rows or several with weights -> files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_trl.data.hub import resolve_dataset
from lean_trl.data.rows import find_files


@dataclass(frozen=True)
class Source:
    """One source of rows."""

    name: str
    files: tuple[Path, ...]
    weight: float | None = None  # its share of the rows of an epoch, relative to the others


def resolve_sources(
    path: str | Sequence[str | Mapping[str, Any]] | None,
    split: str | None,
    revision: str | None,
    kind: str = "sft",
    *,
    held_out: bool = False,
) -> list[Source]:
    """The sources that `path` names: a file, folder or hub id, or a list of such.

    kind: what rows the built-in data (None) are made into. held_out: as in find_files.

    An entry of a list is a path, or a map {path, weight, split, revision}. Raises ValueError for an
    entry that is neither, for weights that only some have, and for weights that are not positive.
    """
    entries = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    sources = []
    for entry in entries:
        options = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
        known = ("path", "weight", "split", "revision")
        wrong = [key for key in options if key not in known]
        if wrong or "path" not in options:
            raise ValueError(
                f"data.path: {entry!r} is no source: give a path, or {{{', '.join(known)}}}"
            )
        local = resolve_dataset(options["path"], options.get("revision", revision), kind=kind)
        files = find_files(local, options.get("split", split), held_out=held_out)
        weight = options.get("weight")
        if weight is not None and (
            isinstance(weight, bool) or not isinstance(weight, int | float) or weight <= 0
        ):
            raise ValueError(
                f"data.path: weight of {options['path']} must be a number above 0, got {weight!r}"
            )
        sources.append(Source(str(options["path"] or "built-in"), tuple(files), weight))
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        raise ValueError("data.path: give every source a weight, or none")
    if not sources:
        raise ValueError("data.path is an empty list: name at least one source")
    return sources
