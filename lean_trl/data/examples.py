"""Rows -> drafts: what each row says is to be read and what is to be learnt, still as text.

One function for each format; a row is judged by its own columns, so files may mix them. `KINDS`
lists the formats that each kind of training accepts, tried in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lean_trl.data.chat import TemplateError
from lean_trl.data.messages import RowError, is_conversation, read_messages, read_tools
from lean_trl.data.rows import Row
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.types import IGNORE_INDEX


@dataclass
class Piece:
    """One future sequence.

    Scored is what comes after `prompt`; without one, what `spans` cover; without either,
    everything.
    """

    text: str = ""
    # Plain text gets BOS if the tokenizer adds one, and EOS; a template has written its own.
    plain: bool = True
    # The text that the model is given, a prefix of `text` but for odd templates.
    prompt: str | None = None
    spans: list[tuple[int, int]] | None = None  # characters of `text`
    ids: np.ndarray | None = None  # int32 [n]; tokenised by the user, who says what is scored
    scored: np.ndarray | None = None  # bool [n]


@dataclass
class Draft:
    """What one item (a row, as a rule) will train on: one piece, or two for a preference pair."""

    pieces: list[Piece]
    extras: dict[str, Any] = field(default_factory=dict)  # label, margin
    columns: Row | None = None  # the row as it was; kept for prompts, whose rewards read it


@dataclass(frozen=True)
class Reading:
    """How rows are read; part of the fingerprint of the prepared data."""

    kind: str  # key of KINDS
    text_column: str = "text"
    columns: Mapping[str, Any] | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False


def read_row(row: Row, reading: Reading, tokenizer: Tokenizer) -> list[Draft]:
    """The drafts of one row (several when a pair is read as two unpaired answers).

    Raises RowError with the reason why the row cannot be used.
    """
    if reading.columns:
        row = rename_columns(row, reading.columns)
    row = {name: value for name, value in row.items() if value is not None}
    for read in KINDS[reading.kind]:
        try:
            drafts = read(row, reading, tokenizer)
        except TemplateError as error:
            raise RowError(str(error)) from error
        if drafts is not None:
            return drafts
    raise RowError("no known columns")


def rename_columns(row: Row, columns: Mapping[str, Any]) -> Row:
    """The row with more columns: each value names a column, or is a text (list, map) that has
    {column} in it.

    >>> rename_columns({"q": "1+1", "a": 2}, {"prompt": "Q: {q}", "completion": "a"})["prompt"]
    'Q: 1+1'
    """
    return {**row, **{name: _fill(value, row) for name, value in columns.items()}}


def _fill(value: Any, row: Row) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, row) for key, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, row) for item in value]
    if not isinstance(value, str):
        return value
    if value in row:
        return row[value]
    for name, item in row.items():
        value = value.replace("{" + name + "}", item if isinstance(item, str) else str(item))
    return value


# -- supervised fine-tuning --


def _read_tokenised(row: Row, reading: Reading, tokenizer: Tokenizer) -> list[Draft] | None:
    if "input_ids" not in row:
        return None
    ids = _ids(row, "input_ids")
    scored = np.ones(len(ids), bool)
    if "labels" in row:
        labels = _ids(row, "labels")
        if len(labels) != len(ids):
            raise RowError("labels and input_ids differ in length")
        scored = labels != IGNORE_INDEX
        if not np.array_equal(labels[scored], ids[scored]):
            raise RowError(
                "labels differ from input_ids where they are not -100 (they must not be shifted)"
            )
    masks = [
        ("completion_mask", reading.completion_only_loss is not False),
        ("assistant_masks", True),
    ]
    for name, wanted in masks:
        if name in row and wanted:
            mask = _ids(row, name)
            if len(mask) != len(ids):
                raise RowError(f"{name} and input_ids differ in length")
            scored &= mask.astype(bool)
    return [Draft([Piece(ids=ids, scored=scored)])]


def _read_conversation(row: Row, reading: Reading, tokenizer: Tokenizer) -> list[Draft] | None:
    name = next((n for n in ("messages", "conversations") if n in row), None)
    if name is None:
        return None
    messages = read_messages(row[name], name)
    return [Draft([Piece(tokenizer.render_chat(messages, **_variables(row)), plain=False)])]


def _read_prompt_completion(row: Row, reading: Reading, tokenizer: Tokenizer) -> list[Draft] | None:
    if "prompt" not in row or "completion" not in row:
        return None
    piece = _answer(row["prompt"], row["completion"], row, tokenizer, "completion")
    if reading.completion_only_loss is False:
        piece.prompt = None
    return [Draft([piece])]


def _read_text(row: Row, reading: Reading, tokenizer: Tokenizer) -> list[Draft] | None:
    if reading.text_column not in row:
        return None
    text = _text(row[reading.text_column], reading.text_column)
    if not text:
        raise RowError(f"{reading.text_column} is empty")
    return [Draft([Piece(text)])]


# -- shared by all formats --


def _answer(prompt: Any, completion: Any, row: Row, tokenizer: Tokenizer, name: str) -> Piece:
    """Prompt and answer as one piece; both plain texts or both messages."""
    if not is_conversation(prompt) and not is_conversation(completion):
        given = _text(prompt, "prompt")
        answer = _text(completion, name)
        if not given and not answer:
            raise RowError(f"prompt and {name} are empty")
        return Piece(given + answer, prompt=given)
    before = read_messages(prompt, "prompt")
    after = read_messages(completion, name)
    variables = _variables(row)
    return Piece(
        tokenizer.render_chat(before + after, **variables),
        plain=False,
        prompt=tokenizer.render_chat(before, add_generation_prompt=True, **variables),
    )


def _variables(row: Row) -> dict[str, Any]:
    """What the row passes to the template beside its messages."""
    extra = row.get("chat_template_kwargs") or {}
    if not isinstance(extra, dict):
        raise RowError("chat_template_kwargs is not a map")
    return {"tools": read_tools(row.get("tools")), **extra}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} is {type(value).__name__}, expected text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(f"{name} holds half of a surrogate pair") from error
    return value


def _ids(row: Row, name: str) -> np.ndarray:
    value = row[name]
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        raise RowError(f"{name} is not a list of ints")
    if len(array) == 0:
        raise RowError(f"{name} is empty")
    return array.astype(np.int32)


Format = Callable[[Row, Reading, Tokenizer], list[Draft] | None]

KINDS: dict[str, tuple[Format, ...]] = {
    "sft": (_read_tokenised, _read_conversation, _read_prompt_completion, _read_text),
}

# What is asked of a row, in words, for the error that shows the columns found.
ACCEPTED: dict[str, str] = {
    "sft": "text; messages (or conversations with from/value); prompt and completion; "
    "input_ids with labels, completion_mask or assistant_masks",
}
