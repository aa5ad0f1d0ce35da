"""Chat templates: Jinja in a sandbox, with what the templates that ship with models use.

A template sees `messages`, `tools`, `documents`, `add_generation_prompt`, the special tokens and
any further variables of the row. `{% generation %} ... {% endgeneration %}` marks what the
assistant writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

# Unicode reserves these for internal use: no text that may be interchanged holds them.
GENERATION_START, GENERATION_END = "\ufdd0", "\ufdd1"
RESERVED = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


# Where messages keep what the assistant thought before it answered.
REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateError(ValueError):
    """The template refuses these messages, or fails on them."""


class _Generation(Extension):
    """`{% generation %}`: its body between two marks, which render() takes out again."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def mark(text: str) -> nodes.Node:
            return nodes.Output([nodes.TemplateData(text)], lineno=line)

        return [mark(GENERATION_START), *body, mark(GENERATION_END)]


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes < > & ' for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """One compiled template.

    >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    >>> ChatTemplate(source, {"eos_token": "."}).render([{"role": "user", "content": "hi"}])
    '<user>hi.'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        try:
            self._compiled = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template does not parse: {error} (line {error.lineno})"
            ) from error

    @cached_property
    def marks_generation(self) -> bool:
        """The template says itself what the assistant writes."""
        names = (token[2] for token in _environment().lex(self.source) if token[1] == "name")
        return "endgeneration" in names

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The text of a conversation. Raises TemplateError when the template refuses it."""
        return self.render_marked(messages, **variables)[0]

    def render_marked(
        self, messages: Sequence[Message], **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character spans that the template marks as the assistant's."""
        context = {
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
            **self.special_tokens,
            **variables,
        }
        messages = [_name_reasoning(message) for message in messages]
        try:
            text = self._compiled.render(messages=messages, **context)
        except jinja2.TemplateError as error:
            raise TemplateError(
                f"the chat template refuses these messages: {error.message}"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise TemplateError(f"the chat template fails on these messages: {error}") from error
        return _take_marks(text)


def _name_reasoning(message: Message) -> Message:
    """The message with its reasoning under the names that templates look for."""
    given = [message[name] for name in REASONING if message.get(name) is not None]
    return {"thinking": given[0], **message, "reasoning_content": given[0]} if given else message


def _take_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    if GENERATION_START not in text:
        return text, []
    spans, parts, length = [], [], 0
    for piece in text.split(GENERATION_START):
        inside, mark, after = piece.partition(GENERATION_END)
        if mark:
            spans.append((length, length + len(inside)))
        parts += [inside, after]
        length += len(inside) + len(after)
    return "".join(parts), spans
