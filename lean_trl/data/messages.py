"""Conversations as files hold them -> the messages that a chat template reads."""

from __future__ import annotations

import json
from typing import Any

ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
# The from/value spelling of conversations.
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "observation": "tool",
                  "function_call": "assistant"}  # fmt: skip


class RowError(ValueError):
    """A row that cannot be used. `reason` is the same for all rows with this fault."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def is_conversation(value: Any) -> bool:
    """A non-empty list of objects, as against a plain text."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def read_messages(value: Any, field: str) -> list[dict[str, Any]]:
    """role/content messages, content always a str, without null keys. `field` names the column in
    errors.

    Accepts from/value, content as a list of text parts, and null or missing content, which is the
    same as empty.
    """
    if value == []:
        raise RowError(f"{field} is empty")
    if not is_conversation(value):
        raise RowError(f"{field} is not a list of messages")
    return [_read_message(message, f"{field}[{i}]") for i, message in enumerate(value)]


def _read_message(message: dict[str, Any], field: str) -> dict[str, Any]:
    if "from" in message and "role" not in message:
        role = message["from"]
        role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        message = {**message, "role": role, "content": message.get("value")}
        message.pop("from")
        message.pop("value", None)
    role = message.get("role")
    if role is None:
        raise RowError(f"{_any(field)} has no role")
    if not isinstance(role, str) or role not in ROLES:
        raise RowError(f"{_any(field)} has the unknown role {role!r:.40}")
    kept = {key: item for key, item in message.items() if item is not None}
    kept["content"] = _read_content(message.get("content"), _any(field))
    if kept.get("tool_calls") == []:
        del kept["tool_calls"]
    return kept


def _any(field: str) -> str:
    """messages[3] -> messages[*]: one reason for all rows."""
    return field.partition("[")[0] + "[*]"


def _read_content(content: Any, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError(f"content of {field} is {type(content).__name__}, expected text")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and "text" in part:
            if not isinstance(part["text"], str | None):
                raise RowError(f"content of {field} has a text part that is no text")
            texts.append(part["text"] or "")
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError(
                f"content of {field} has a part of type {kind!r:.40}, only text is supported"
            )
    return "".join(texts)


def check_characters(text: str, name: str) -> None:
    """Raises RowError for a text that cannot be encoded."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(f"{name} holds half of a surrogate pair") from error


def read_tools(value: Any) -> list[Any] | None:
    """The row's `tools`: a list, or its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise RowError("tools is not JSON") from error
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowError("tools is not a list")
    return value
