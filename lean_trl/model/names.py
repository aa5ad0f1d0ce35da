"""Which tensors of the files make up which parameter, by a family's name map.

A map {"model.layers.{i}.mlp.experts.down_proj":
("model.layers.{i}.mlp.experts.{e}.down_proj.weight",)} says that the parameter [experts, ...] is
the tensors of all experts {e}, one after another. Several names on the right are laid one below the
other (first dimension, equal parts). A parameter without an entry has the same name in the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor


class Piece(NamedTuple):
    """One tensor of the files, and its place in a parameter."""

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def of(self, parameter: Tensor) -> Tensor:
        """The view of the parameter that this piece is."""
        return self.within(parameter, 0, parameter.shape[0])[0]

    def within(self, rows: Tensor, first: int, total: int) -> tuple[Tensor, int]:
        """(what this piece is of `rows`, which are rows of a parameter from `first` on; the first
        of its own rows there). total: rows of the whole parameter. The view may be empty.

        >>> import torch
        >>> Piece("b", part=1, parts=2).within(torch.tensor([2, 3, 4]), first=2, total=8)
        (tensor([4]), 0)
        """
        if self.expert is not None:
            if not first <= self.expert < first + rows.shape[0]:
                return rows[:0], 0
            rows = rows[self.expert - first]
            first, total = 0, rows.shape[0]
        size = total // self.parts
        begin = max(self.part * size, first)
        end = max(begin, min((self.part + 1) * size, first + rows.shape[0]))
        return rows[begin - first : end - first], begin - self.part * size


def pieces(
    names: Mapping[str, tuple[str, ...]], parameter: str, shape: tuple[int, ...]
) -> Iterator[Piece]:
    """The pieces of a parameter, in order.

    >>> names = {"layers.{i}.up": ("layers.{i}.{e}.a", "layers.{i}.{e}.b")}
    >>> [piece.name for piece in pieces(names, "layers.3.up", (2, 8, 4))]
    ['layers.3.0.a', 'layers.3.0.b', 'layers.3.1.a', 'layers.3.1.b']
    >>> [piece.name for piece in pieces(names, "norm", (4,))]
    ['norm']
    """
    layer = re.search(r"(?<=\.)\d+(?=\.)", parameter)
    index = layer.group() if layer else ""
    pattern = (
        parameter
        if layer is None
        else parameter[: layer.start()] + "{i}" + parameter[layer.end() :]
    )
    templates = names.get(pattern)
    if templates is None:
        yield Piece(parameter)
        return
    stacked = "{e}" in templates[0]
    for expert in range(shape[0]) if stacked else (None,):
        for part, template in enumerate(templates):
            yield Piece(template.format(i=index, e=expert), expert, part, len(templates))
