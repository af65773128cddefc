"""Messages of a chat in OpenAI's form, as the daemon reads them."""

from __future__ import annotations

from typing import Any

from ....backends.errors import InvalidArgument, UnsupportedOperation
from ....backends.params import without_nulls
from ..fields import field_error

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_LEVELS = 3
"""A message, its calls and their functions."""
ROLES = {"developer": "system"}
"""Roles that chat templates do not know, with the roles that replace them."""


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for the daemon.

    :raises InvalidArgument: a message has another form.
    :raises UnsupportedOperation: a part of a message is not text; its type is named.
    """
    messages = without_nulls(messages, _LEVELS)
    return [_read_message(f"messages.{number}", each) for number, each in enumerate(messages)]


def _read_message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise field_error(f"{place}.role", f"{place}: the role is missing")
    read = {**message, "role": ROLES.get(role, role)}
    content = message.get("content")
    if content is None and isinstance(message.get("refusal"), str):
        read["content"] = message["refusal"]
    if isinstance(content, list):
        read["content"] = read_parts(f"{place}.content", content)
    elif content is not None and not isinstance(content, str):
        raise field_error(
            f"{place}.content", f"{place}.content is neither a text nor a list of parts"
        )
    return read


def read_parts(place: str, parts: list[Any]) -> list[dict[str, str]]:
    """Return parts of text; see `read_messages`."""
    return [_read_part(f"{place}.{number}", part) for number, part in enumerate(parts)]


def _read_part(place: str, part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise field_error(place, f"{place} is not a part with a type")
    if kind not in _TEXTS:
        raise UnsupportedOperation(
            f"{place}: a part of the type {kind[:40]!r}",
            hint="the models read only text",
            data={"param": place},
        )
    text = part.get(_TEXTS[kind])
    if not isinstance(text, str):
        raise InvalidArgument(
            f"{place}.{_TEXTS[kind]} is not a text", hint="send a text", data={"param": place}
        )
    return {"type": "text", "text": text}
