"""What a row is to become, still as text, and the tools that every format uses to say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lean_trl.data.chat import Message
from lean_trl.data.literal import Literals, take_marks
from lean_trl.data.messages import (
    RowError,
    check_characters,
    is_conversation,
    read_messages,
    read_tools,
)
from lean_trl.data.rows import Row
from lean_trl.data.spans import AssistantSpans
from lean_trl.data.tokenizer import Tokenizer
from lean_trl.types import MAX_ID

Span = tuple[int, int]


@dataclass
class Piece:
    """One future sequence.

    Scored is what comes after `prompt`; without one, what `spans` cover; without either,
    everything.
    """

    text: str = ""
    bos: bool = False  # put the tokenizer's BOS first; a chat template writes its own
    eos: bool = False  # end with EOS
    # The text that the model is given, a prefix of `text` but for odd templates.
    prompt: str | None = None
    spans: list[Span] | None = None  # characters of `text`
    literal: list[Span] = field(default_factory=list)  # characters that are no special tokens
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

    kind: str  # key of examples.KINDS
    text_column: str = "text"
    columns: Mapping[str, Any] | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False


class Reader:
    """How to read, and the tokenizer's part in it."""

    def __init__(self, reading: Reading, tokenizer: Tokenizer) -> None:
        self.reading = reading
        self.tokenizer = tokenizer
        self._literals = Literals(tokenizer.special_texts)
        chat = tokenizer.chat
        marks = (tokenizer.special_texts, tokenizer.stop_texts)
        self._spans = None if chat is None else AssistantSpans(chat, *marks)

    def conversation(self, messages: Sequence[Message], row: Row) -> Piece:
        """A whole conversation, scored as the settings say."""
        if not self.reading.assistant_only_loss or self._spans is None:
            return self._render(messages, row)
        found = self._spans.find(self._literals.mark(list(messages)), **self.variables(row))
        text, spans, literal = take_marks(*found)
        check_characters(text, "the conversation")
        return Piece(text, spans=spans, literal=literal)

    def _render(self, messages: Sequence[Message], row: Row, *, asks: bool = False) -> Piece:
        text, _, literal = take_marks(
            self.tokenizer.render_chat(
                self._literals.mark(list(messages)),
                add_generation_prompt=asks,
                **self.variables(row),
            )
        )
        check_characters(text, "the conversation")
        return Piece(text, literal=literal)

    def prompt(self, prompt: Any, row: Row) -> Piece:
        """What a model is given to answer."""
        if is_conversation(prompt):
            return self._render(read_messages(prompt, "prompt"), row, asks=True)
        return Piece(read_text(prompt, "prompt"), bos=True)

    def answer(self, prompt: Any, completion: Any, name: str, row: Row) -> Piece:
        """Prompt and answer, the answer scored; both are plain texts or both messages."""
        if is_conversation(prompt) != is_conversation(completion) and completion != []:
            raise RowError(f"prompt and {name} are not both text or both messages")
        if not is_conversation(prompt):
            given, answer = read_text(prompt, "prompt"), read_text(completion, name)
            if not given and not answer:
                raise RowError(f"prompt and {name} are empty")
            return Piece(given + answer, bos=True, eos=True, prompt=given)
        before, after = read_messages(prompt, "prompt"), read_messages(completion, name)
        piece = self._render(before + after, row)
        piece.prompt = self._render(before, row, asks=True).text
        return piece

    def variables(self, row: Row) -> dict[str, Any]:
        """What the row passes to the template beside its messages."""
        extra = row.get("chat_template_kwargs") or {}
        if not isinstance(extra, dict):
            raise RowError("chat_template_kwargs is not a map")
        for name in ("messages", "add_generation_prompt"):
            if name in extra:
                raise RowError(f"chat_template_kwargs has {name}, which is set for each row anyway")
        return {"tools": read_tools(row.get("tools")), **extra}


def read_text(value: Any, name: str) -> str:
    """`value` when it is a text that can be encoded."""
    if not isinstance(value, str):
        raise RowError(f"{name} is {type(value).__name__}, expected text")
    check_characters(value, name)
    return value


def read_ids(row: Row, name: str, least: int = 0) -> np.ndarray:
    """int32 [n], n >= 1: a column of token ids, labels or flags, none below `least`."""
    try:
        array = np.asarray(row[name])
    except (ValueError, OverflowError) as error:  # lists of different lengths
        raise RowError(f"{name} is not a list of ints") from error
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iub"):
        raise RowError(f"{name} is not a list of ints")
    if len(array) == 0:
        raise RowError(f"{name} is empty")
    if array.min() < least or array.max() > MAX_ID:
        raise RowError(f"{name} has values that are not from {least} to {MAX_ID}")
    return array.astype(np.int32)
