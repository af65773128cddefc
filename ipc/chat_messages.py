"""Check of the shape of chat messages, before a template renders them."""

from __future__ import annotations

from typing import Any

from ..backends.errors import InvalidArgument
from ..backends.texts import shorten

MESSAGES_MAX = 1000
TOOL_CALLS_MAX = 128
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE_SHAPE = '{"role": "user", "content": "…"}'
_PART_SHAPE = 'only parts of text can be read: {"type": "text", "text": "…"}'
_CALL_SHAPE = '{"type": "function", "function": {"name": "…", "arguments": {…}}}'


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages that all have a role and a text as content. Text parts are joined, and a
    message that has only `tool_calls` gets an empty text.

    :raises InvalidArgument: a message has another shape, or there are none or too many. The
        message and `data.param` name the field, such as ``messages.3.content``.
    """
    if not 0 < len(messages) <= MESSAGES_MAX:
        raise _error("messages", f"there are {len(messages)}; the range is 1 … {MESSAGES_MAX}")
    return [_checked(f"messages.{number}", message) for number, message in enumerate(messages)]


def _error(place: str, problem: str, hint: str = "") -> InvalidArgument:
    return InvalidArgument(f"{place}: {problem}", hint=hint, data={"param": place})


def _checked(place: str, message: dict[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        hint = f"use one of {', '.join(ROLES)}"
        raise _error(f"{place}.role", f"{shorten(role)} is not a role", hint)
    calls = message.get("tool_calls")
    if calls is not None:
        _check_calls(f"{place}.tool_calls", role, calls)
    if content is None and calls:
        return message | {"content": ""}
    place = f"{place}.content"
    if isinstance(content, list) and content:
        parts = [_part_text(f"{place}.{number}", part) for number, part in enumerate(content)]
        return message | {"content": "\n".join(parts)}
    if not isinstance(content, str):
        without = " or tool_calls" if role == "assistant" else ""
        problem = (
            f"a message of the role {role!r} needs a text{without}; this is {shorten(content)}"
        )
        raise _error(place, problem, _MESSAGE_SHAPE)
    return message


def _part_text(place: str, part: Any) -> str:
    """Return the text of a content's part; parts are joined by line breaks, as in llama-server."""
    fields = part if isinstance(part, dict) else {}
    if fields.get("type") != "text" or not isinstance(fields.get("text"), str):
        raise _error(place, f"{shorten(part)} is not a part of text", _PART_SHAPE)
    return str(fields["text"])


def _check_calls(place: str, role: str, calls: Any) -> None:
    if role != "assistant":
        raise _error(
            place,
            f"a message of the role {role!r} has none",
            "only the assistant calls tools; a tool's result has the role tool",
        )
    if not isinstance(calls, list) or len(calls) > TOOL_CALLS_MAX:
        raise _error(place, f"this is not a list of up to {TOOL_CALLS_MAX}", _CALL_SHAPE)
    for number, call in enumerate(calls):
        at = f"{place}.{number}"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _error(at, f"{shorten(call)} is not a tool call", _CALL_SHAPE)
        if not isinstance(function.get("arguments", {}), dict | str):
            raise _error(
                f"{at}.function.arguments",
                f"those of {shorten(function['name'])} are neither a map nor text",
                _CALL_SHAPE,
            )
