"""Check of the shape of chat messages, before a template renders them."""

from __future__ import annotations

from typing import Any

from ...backends.errors import InvalidArgument
from ...backends.texts.shorten import shorten

MESSAGES_MAX = 1000
TOOL_CALLS_MAX = 128
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE_SHAPE = '{"role": "user", "content": "…"}'
_PART_SHAPE = 'only parts of text can be read: {"type": "text", "text": "…"}'
_CALL_SHAPE = '{"type": "function", "function": {"name": "…", "arguments": {…}}}'


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages that all have a role and a text as content. Text parts are joined, and a
    message that has only `tool_calls` gets an empty text.

    :raises InvalidArgument: a message has another shape, or there are none or too many.
    """
    if not 0 < len(messages) <= MESSAGES_MAX:
        raise InvalidArgument(f"{len(messages)} messages; the range is 1 … {MESSAGES_MAX}")
    return [_checked(number, message) for number, message in enumerate(messages)]


def _checked(number: int, message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidArgument(
            f"message {number} has the role {shorten(role)}", hint=f"use one of {', '.join(ROLES)}"
        )
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(number, role, calls)
    if content is None and calls:
        return message | {"content": ""}
    if isinstance(content, list) and content:
        return message | {"content": "\n".join(_part_text(number, part) for part in content)}
    if not isinstance(content, str):
        raise InvalidArgument(f"message {number} has no text content", hint=_MESSAGE_SHAPE)
    return message


def _part_text(number: int, part: Any) -> str:
    """Return the text of a content's part; parts are joined by line breaks, as in llama-server."""
    fields = part if isinstance(part, dict) else {}
    if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
        raise InvalidArgument(
            f"message {number}: {shorten(part)} is not a part of text", hint=_PART_SHAPE
        )
    return str(fields["text"])


def _check_calls(number: int, role: str, calls: Any) -> None:
    if role != "assistant":
        raise InvalidArgument(
            f"message {number} of the role {role!r} has tool_calls",
            hint="only the assistant calls tools; a tool's result has the role tool",
        )
    if not isinstance(calls, list) or len(calls) > TOOL_CALLS_MAX:
        raise InvalidArgument(
            f"message {number}: tool_calls is not a list of up to {TOOL_CALLS_MAX}",
            hint=_CALL_SHAPE,
        )
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidArgument(
                f"message {number}: {shorten(call)} is not a tool call", hint=_CALL_SHAPE
            )
        if not isinstance(function.get("arguments", {}), dict | str):
            raise InvalidArgument(
                f"message {number}: the arguments of {shorten(function['name'])} are neither a map"
                " nor text",
                hint=_CALL_SHAPE,
            )
