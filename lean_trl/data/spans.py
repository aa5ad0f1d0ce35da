"""What the assistant writes in a rendered conversation, for templates that do not mark it.

A turn of the assistant is everything after its header, up to and with the token that closes it; the
header is what the generation prompt writes. The template is rendered once more with a mark in place
of every content. That *skeleton* (the same for all conversations of one shape, so it is remembered)
says what stands between the contents, and the real text is read along it. What differs from the
skeleton inside an assistant's turn (thinking, tool calls) belongs to the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_trl.data.chat import ChatTemplate, Message, TemplateError

Span = tuple[int, int]

_MARK = re.compile("\ufdd2([0-9]+)\ufdd3")


def _mark(index: int) -> str:
    return f"\ufdd2{index}\ufdd3"


@dataclass(frozen=True)
class _Part:
    """A content's place in the skeleton."""

    before: str  # what the template writes between the content before and this one
    index: int  # which message
    header: int  # characters of `before` up to the end of the assistant's header
    fixed: int  # characters of it that every text has; what follows may differ (thinking)


@dataclass(frozen=True)
class _Skeleton:
    parts: tuple[_Part, ...]
    after: str


class AssistantSpans:
    """Finds the assistant's turns.

    specials: the texts of the special tokens, one of which closes a turn. stops: those that end an
    answer whatever the template does.
    """

    def __init__(
        self, chat: ChatTemplate, specials: Sequence[str], stops: Sequence[str] = ()
    ) -> None:
        self._chat = chat
        self._stops = frozenset(stops)
        longest_first = sorted(filter(None, specials), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._skeletons: dict[str, _Skeleton | None] = {}
        self._frames: dict[str, tuple[str, str]] = {}

    def find(self, messages: Sequence[Message], **variables: Any) -> tuple[str, list[Span]]:
        """(text, character spans of the assistant's turns).

        Raises TemplateError when they cannot be told.
        """
        text, spans = self._chat.render_marked(messages, **variables)
        if self._chat.marks_generation:
            return text, spans
        if not any(message["role"] == "assistant" for message in messages):
            return text, []
        found = self._along_skeleton(text, messages, variables)
        if found is None:
            found = self._by_prefixes(text, messages, variables)
        if found is None:
            raise TemplateError(
                "the assistant's turns cannot be told in what the chat template writes: mark them "
                "with "
                "{% generation %}"
            )
        return text, found

    def closing_token(self) -> str | None:
        """The special token that ends the last turn of a conversation."""
        try:
            _, after = self._frame({})
        except TemplateError:
            return None
        match = self._special.search(after)
        return match.group() if match else None

    def _frame(self, variables: Mapping[str, Any]) -> tuple[str, str]:
        """(generation prompt, what follows the last content of the assistant)."""
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._frames:
            question = [{"role": "user", "content": _mark(0)}]
            bare = self._chat.render(question, **variables)
            asked = self._chat.render(question, **{**variables, "add_generation_prompt": True})
            answered = self._chat.render(
                [*question, {"role": "assistant", "content": _mark(1)}], **variables
            )
            prompt = asked[common_characters(bare, asked) :]
            self._frames[key] = prompt, answered.rpartition(_mark(1))[2]
        return self._frames[key]

    def _skeleton(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> _Skeleton | None:
        """None when the template cannot be asked this way."""
        shape = [
            [message["role"], message.get("name"), message.get("tool_call_id")]
            for message in messages
        ]
        key = json.dumps([shape, variables], sort_keys=True, default=str)
        if key not in self._skeletons:
            if len(self._skeletons) > 1024:
                self._skeletons.clear()
            try:
                self._skeletons[key] = self._ask(messages, variables)
            except TemplateError:
                self._skeletons[key] = None
        return self._skeletons[key]

    def _ask(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> _Skeleton | None:
        kept = ("role", "name", "tool_call_id")
        marked = [
            {**{k: m[k] for k in kept if k in m}, "content": _mark(i)}
            for i, m in enumerate(messages)
        ]
        pieces = _MARK.split(self._chat.render(marked, **variables))
        indices = [int(i) for i in pieces[1::2]]
        assistant = {i for i, m in enumerate(messages) if m["role"] == "assistant"}
        needed = {i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")}
        if len(set(indices)) != len(indices) or not needed <= set(indices):
            return None
        prompt, _ = self._frame(variables)
        parts = []
        for before, index in zip(pieces[0::2], indices, strict=False):
            header = fixed = len(before)
            if index in assistant:
                header = self._header_end(before, prompt)
                fixed = self._last_special(before[:header]) or header
                if not prompt:  # the turn begins with what the template writes after the question
                    header = fixed
            parts.append(_Part(before, index, header, fixed))
        return _Skeleton(tuple(parts), pieces[-1])

    def _header_end(self, before: str, prompt: str) -> int:
        """After the longest beginning of the generation prompt that `before` holds."""
        # Special tokens count as a whole: `<|` alone begins any of them.
        found = self._special.finditer(prompt)
        inside = {i for match in found for i in range(match.start() + 1, match.end())}
        for length in range(len(prompt), 0, -1):
            at = -1 if length in inside else before.rfind(prompt[:length])
            if at >= 0:
                return at + length
        return len(before)

    def _last_special(self, text: str) -> int:
        """Where the last special token ends; 0 without one."""
        return max((match.end() for match in self._special.finditer(text)), default=0)

    def _along_skeleton(
        self, text: str, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> list[Span] | None:
        skeleton = self._skeleton(messages, variables)
        if skeleton is None:
            return None
        spans: list[Span] = []
        position = 0
        for number, part in enumerate(skeleton.parts):
            head = part.before[: part.header]
            shared = common_characters(head, text[position : position + len(head)])
            if shared < part.fixed:
                return None
            position += shared
            message = messages[part.index]
            follows = skeleton.parts[number + 1] if number + 1 < len(skeleton.parts) else None
            if message["role"] != "assistant":
                content = next(
                    (c for c in _variants(message) if text.startswith(c, position)), None
                )
                if content is None:
                    return None
                position += len(content)
                continue
            end = _find_end(text, position, follows, skeleton.after, messages)
            if end is None:
                return None
            between = skeleton.after if follows is None else follows.before
            spans.append((position, end + self._closing_end(between, variables)))
            position = end
        return spans if text[position:] == skeleton.after else None

    def _closing_end(self, between: str, variables: Mapping[str, Any]) -> int:
        """How much of what follows a content closes the turn:

        up to its first special token's end.
        """
        _, after = self._frame(variables)
        match = self._special.search(between)
        if match is None:
            return 0
        # A template that ends the last turn with no special token does not close turns: the token
        # found opens the next one. It still is what the model stops at when its files say so.
        closes = self._special.search(after) is not None or match.group() in self._stops
        return match.end() if closes else 0

    def _by_prefixes(
        self, text: str, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> list[Span] | None:
        """For templates that write a conversation's beginning the same whatever follows."""
        spans: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._chat.render(messages[:i], **variables) if i else ""
            asked = self._chat.render(messages[:i], **{**variables, "add_generation_prompt": True})
            until = self._chat.render(messages[: i + 1], **variables)
            start, end = common_characters(asked, text), common_characters(until, text)
            if start < len(before) or end <= start:
                return None
            closing = [m.end() for m in self._special.finditer(text, start, end)]
            spans.append((start, closing[-1] if closing else end))
        return spans


def _variants(message: Message) -> tuple[str, ...]:
    """How templates write a content: as it is, or trimmed."""
    content = message["content"]
    return (content, content.strip())


def _find_end(
    text: str, position: int, follows: _Part | None, after: str, messages: Sequence[Message]
) -> int | None:
    """Where the assistant's turn that starts at `position` gives way to what follows."""
    if follows is None:
        end = len(text) - len(after)
        return end if end >= position and text.endswith(after) else None
    anchor = follows.before[: follows.fixed]
    message = messages[follows.index]
    known = ("",) if message["role"] == "assistant" else _variants(message)
    for content in known:
        end = text.find(anchor + content, position)
        if end >= 0:
            return end
    return None


def common_characters(a: str, b: str) -> int:
    """Length of the common prefix of two texts, by bisection on slices."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
