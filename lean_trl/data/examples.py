"""Rows -> drafts: which formats each kind of training accepts, tried in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lean_trl.data import formats
from lean_trl.data.chat import TemplateError
from lean_trl.data.drafts import Draft, Reader
from lean_trl.data.messages import RowError
from lean_trl.data.rows import Row

Format = Callable[[Row, Reader], list[Draft] | None]

_PAIRS = (formats.preference, formats.tokenised_preference)

KINDS: dict[str, tuple[Format, ...]] = {
    "sft": (formats.tokenised, formats.conversation, formats.prompt_completion, formats.text),
    "preference": _PAIRS,
    "reward": _PAIRS,
    "unpaired": (formats.unpaired, formats.tokenised_unpaired, formats.unpaired_from_preference),
    "prompt": (formats.prompt_only, formats.prompt_of_conversation, formats.tokenised_prompt),
}

# Kinds whose objective reads no token's log-probability: their rows need none scored.
UNSCORED = ("reward", "prompt")

_PAIRED = "chosen and rejected, with or without prompt; chosen_ids and rejected_ids"

# The same in words, for the error that shows the columns found.
ACCEPTED: dict[str, str] = {
    "sft": "text; messages (or conversations with from/value); prompt and completion; "
    "input_ids with labels, completion_mask or assistant_masks",
    "preference": _PAIRED,
    "reward": _PAIRED,
    "unpaired": f"prompt, completion and label; prompt_ids, completion_ids and label; {_PAIRED}",
    "prompt": "prompt; messages, with or without an answer at their end; prompt_ids",
}


def kind_of(row: Row) -> str:
    """What a row looks made for, by its columns.

    >>> kind_of({"chosen": "", "rejected": ""}), kind_of({"prompt": "", "answer": ""})
    ('preference', 'prompt')
    """
    if "chosen" in row or "chosen_ids" in row:
        return "preference"
    if {"completion", "label"} <= row.keys() or {"completion_ids", "label"} <= row.keys():
        return "unpaired"
    return "prompt" if "prompt" in row and "completion" not in row else "sft"


def read_row(row: Row, reader: Reader) -> tuple[str, list[Draft]]:
    """(format, drafts) of one row; several drafts when a pair is read as two unpaired answers.

    Raises RowError with the reason why the row cannot be used.
    """
    if reader.reading.columns:
        row = rename_columns(row, reader.reading.columns)
    row = {name: value for name, value in row.items() if value is not None}
    for read in KINDS[reader.reading.kind]:
        try:
            drafts = read(row, reader)
        except TemplateError as error:
            raise RowError(str(error)) from error
        if drafts is not None:
            return read.__name__, drafts
    raise RowError("no known columns")


def rename_columns(row: Row, columns: Mapping[str, Any]) -> Row:
    """The row with more columns: a value names one, or is a text, list or map with {column} in it.

    Filled once: what a column holds is never filled again. In a list or map a text names no column,
    so {role: user} says user in files that have a column of that name too.

    >>> rename_columns({"q": "1+1", "a": 2}, {"prompt": "Q: {q}", "completion": "a"})["prompt"]
    'Q: 1+1'
    """
    for value in columns.values():
        if isinstance(value, str) and value not in row and "{" not in value:
            _column(value, row)
    named = {name: row[v] for name, v in columns.items() if isinstance(v, str) and v in row}
    filled = {name: _fill(v, row) for name, v in columns.items() if name not in named}
    return {**row, **named, **filled}


def _fill(value: Any, row: Row) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, row) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, row) for item in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\{(\w+)\}", lambda match: _column(match.group(1), row), value)


def _column(name: str, row: Row) -> str:
    if row.get(name) is None:
        raise RowError(f"no column {name!r}, which data.columns names")
    return row[name] if isinstance(row[name], str) else str(row[name])
