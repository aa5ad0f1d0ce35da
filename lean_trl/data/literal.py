"""Contents that spell special tokens: kept from becoming them.

`<|im_end|>` inside a message is text that somebody wrote, not the end of a turn. Such texts are
marked before the template runs and encoded as ordinary characters after it. Added tokens that are
not special (`<think>`) are left alone: templates and models give them a meaning inside contents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lean_trl.data.chat import RESERVED, TemplateError
from lean_trl.data.messages import RowError

_RESERVED = re.compile("[" + "".join(RESERVED) + "]")

Span = tuple[int, int]

START, END = "\ufdd4", "\ufdd5"


class Literals:
    """Marks what looks like special tokens in messages."""

    def __init__(self, specials: Sequence[str]) -> None:
        longest_first = sorted(filter(None, specials), key=len, reverse=True)
        # Two characters tell nearly all contents apart at the speed of a plain search.
        self._heads = tuple({text[:2] for text in longest_first})
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def mark(self, value: Any) -> Any:
        """`value` (text, list or map) with every special token's text between marks.

        Raises RowError for a text that holds the characters that we mark with.
        """
        if isinstance(value, str):
            if not value.isascii() and _RESERVED.search(value):
                raise RowError(
                    "a message holds a character reserved for internal use (U+FDD0-U+FDEF)"
                )
            if any(head in value for head in self._heads):
                return self._special.sub(lambda match: START + match.group() + END, value)
            return value
        if isinstance(value, dict):
            return {key: item if key == "role" else self.mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        return value


def take_marks(text: str, spans: Sequence[Span] = ()) -> tuple[str, list[Span], list[Span]]:
    """(text without marks, spans moved along, where the marked texts are).

    >>> take_marks("a\\ufdd4<s>\\ufdd5b", [(5, 7)])
    ('a<s>b', [(4, 5)], [(1, 4)])
    """
    if START not in text:
        return text, list(spans), []
    places = [i for i, character in enumerate(text) if character in (START, END)]
    if len(places) % 2:
        raise TemplateError("the chat template cuts a content inside a special token's text")
    literal = [
        (start - 2 * n, end - 2 * n - 1)
        for n, (start, end) in enumerate(zip(places[0::2], places[1::2], strict=True))
    ]

    def moved(position: int) -> int:
        return position - sum(place < position for place in places)

    clean = text.replace(START, "").replace(END, "")
    return clean, [(moved(a), moved(b)) for a, b in spans], literal
