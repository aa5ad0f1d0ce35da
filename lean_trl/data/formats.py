"""The formats of rows. Each function reads one of them, or says by None that the row is of another.

A row is judged by its own columns, so files may mix formats. Adding one is adding a function here
and a name in examples.KINDS.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lean_trl.data.drafts import Draft, Piece, Reader, read_ids, read_text
from lean_trl.data.messages import RowError, read_messages
from lean_trl.data.rows import Row
from lean_trl.types import IGNORE_INDEX

Drafts = list[Draft] | None

# -- supervised fine-tuning --


def tokenised(row: Row, reader: Reader) -> Drafts:
    """input_ids, with labels, completion_mask or assistant_masks."""
    if "input_ids" not in row:
        return None
    ids = read_ids(row, "input_ids")
    scored = np.ones(len(ids), bool)
    if "labels" in row:
        labels = _as_long(row, "labels", ids)
        scored = labels != IGNORE_INDEX
        if not np.array_equal(labels[scored], ids[scored]):
            raise RowError(
                "labels differ from input_ids where they are not -100 (do not shift them)"
            )
    if "completion_mask" in row and reader.reading.completion_only_loss is not False:
        scored &= _as_long(row, "completion_mask", ids).astype(bool)
    if "assistant_masks" in row:
        scored &= _as_long(row, "assistant_masks", ids).astype(bool)
    return [Draft([Piece(ids=ids, scored=scored)])]


def conversation(row: Row, reader: Reader) -> Drafts:
    """messages, or conversations in the from/value spelling."""
    name = next((n for n in ("messages", "conversations") if n in row), None)
    if name is None:
        return None
    return [Draft([reader.conversation(read_messages(row[name], name), row)])]


def prompt_completion(row: Row, reader: Reader) -> Drafts:
    """prompt and completion."""
    if "prompt" not in row or "completion" not in row:
        return None
    piece = reader.answer(row["prompt"], row["completion"], "completion", row)
    if reader.reading.completion_only_loss is False:
        piece.prompt = None
    return [Draft([piece])]


def text(row: Row, reader: Reader) -> Drafts:
    """One column of plain text."""
    name = reader.reading.text_column
    if name not in row:
        return None
    value = read_text(row[name], name)
    if not value:
        raise RowError(f"{name} is empty")
    return [Draft([Piece(value, bos=True, eos=True)])]


# -- preferences --


def preference(row: Row, reader: Reader) -> Drafts:
    """chosen and rejected, with a prompt or with one that they begin with."""
    if "chosen" not in row or "rejected" not in row:
        return None
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    if prompt is None:
        prompt, chosen, rejected = split_pair(chosen, rejected)
    pieces = [
        reader.answer(prompt, chosen, "chosen", row),
        reader.answer(prompt, rejected, "rejected", row),
    ]
    return [Draft(pieces, {"margin": _margin(row)})]


def split_pair(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """(prompt, chosen, rejected) of a pair that holds its prompt: what both begin with.

    A space before the first difference belongs to the answers. Equal answers keep their last
    character (message).

    >>> split_pair("2+2? 4", "2+2? 5")
    ('2+2?', ' 4', ' 5')
    """
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str | list):
            raise RowError(f"{name} is {type(value).__name__}, expected text or messages")
        if not value:
            raise RowError(f"{name} is empty and there is no prompt")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowError("chosen and rejected are not both text or both messages")
    limit = min(len(chosen), len(rejected)) - 1
    at = next((i for i in range(limit + 1) if chosen[i] != rejected[i]), limit)
    if isinstance(chosen, str) and at > 0 and chosen[at] != rejected[at] and chosen[at - 1] == " ":
        at -= 1
    if at == 0 and not isinstance(chosen, str):
        raise RowError("chosen and rejected have no message in common and there is no prompt")
    return chosen[:at], chosen[at:], rejected[at:]


def tokenised_preference(row: Row, reader: Reader) -> Drafts:
    """chosen_ids and rejected_ids after prompt_ids; without it, after their common prefix."""
    names = [n for n in ("chosen_ids", "chosen_input_ids") if n in row]
    if not names:
        return None
    other = names[0].replace("chosen", "rejected")
    if other not in row:
        raise RowError(f"{names[0]} without {other}")
    chosen, rejected = read_ids(row, names[0]), read_ids(row, other)
    if "prompt_ids" in row:
        prompt = read_ids(row, "prompt_ids")
        start = len(prompt)
        chosen, rejected = np.concatenate([prompt, chosen]), np.concatenate([prompt, rejected])
    else:
        n = min(len(chosen), len(rejected)) - 1
        differ = np.flatnonzero(chosen[:n] != rejected[:n])
        start = int(differ[0]) if len(differ) else n
    pieces = [Piece(ids=ids, scored=np.arange(len(ids)) >= start) for ids in (chosen, rejected)]
    return [Draft(pieces, {"margin": _margin(row)})]


def unpaired(row: Row, reader: Reader) -> Drafts:
    """prompt, completion and whether it is desirable."""
    if "label" not in row or "completion" not in row or "prompt" not in row:
        return None
    piece = reader.answer(row["prompt"], row["completion"], "completion", row)
    return [Draft([piece], {"label": _flag(row["label"], "label")})]


def tokenised_unpaired(row: Row, reader: Reader) -> Drafts:
    """prompt_ids, completion_ids and label."""
    if not {"prompt_ids", "completion_ids", "label"} <= row.keys():
        return None
    prompt, answer = read_ids(row, "prompt_ids"), read_ids(row, "completion_ids")
    ids = np.concatenate([prompt, answer])
    piece = Piece(ids=ids, scored=np.arange(len(ids)) >= len(prompt))
    return [Draft([piece], {"label": _flag(row["label"], "label")})]


def unpaired_from_preference(row: Row, reader: Reader) -> Drafts:
    """A pair read as a desirable answer and an undesirable one."""
    drafts = preference(row, reader) or tokenised_preference(row, reader)
    if drafts is None:
        return None
    pairs = zip(drafts[0].pieces, (True, False), strict=True)
    return [Draft([piece], {"label": label}) for piece, label in pairs]


# -- prompts --


def prompt_only(row: Row, reader: Reader) -> Drafts:
    """A prompt to answer; the other columns are handed to the rewards."""
    if "prompt" not in row:
        return None
    if row["prompt"] == "":
        raise RowError("prompt is empty")
    return [Draft([reader.prompt(row["prompt"], row)], columns=row)]


def prompt_of_conversation(row: Row, reader: Reader) -> Drafts:
    """messages: all before an answer that ends them; rewards read that as `answer`."""
    if "messages" not in row:
        return None
    messages = read_messages(row["messages"], "messages")
    columns = {name: value for name, value in row.items() if name != "messages"}
    if messages[-1]["role"] == "assistant":
        columns["answer"] = messages.pop()["content"]
    if not messages:
        raise RowError("messages asks nothing")
    columns["prompt"] = messages
    return [Draft([reader.prompt(messages, row)], columns=columns)]


def tokenised_prompt(row: Row, reader: Reader) -> Drafts:
    """prompt_ids."""
    if "prompt_ids" not in row:
        return None
    ids = read_ids(row, "prompt_ids")
    return [Draft([Piece(ids=ids, scored=np.zeros(len(ids), bool))], columns=row)]


# -- values --


def _as_long(row: Row, name: str, ids: np.ndarray) -> np.ndarray:
    values = read_ids(row, name, least=IGNORE_INDEX)
    if len(values) != len(ids):
        raise RowError(f"{name} and input_ids differ in length")
    return values


def _margin(row: Row) -> float:
    """0 without one: rows of several files stand in one batch, and all or none must have it."""
    value = row.get("margin", 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"margin is {type(value).__name__}, expected a number")
    if not math.isfinite(value):
        raise RowError("margin is not finite")
    return float(value)


def _flag(value: Any, name: str) -> bool:
    """A bool, also as csv files write it, or as a column of numbers with gaps holds it (1.0)."""
    known = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
    key = str(value).lower()
    if key not in known:
        raise RowError(f"{name} is {value!r:.40}, expected true or false")
    return known[key]
