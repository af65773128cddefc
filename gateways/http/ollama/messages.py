"""Messages of a chat in Ollama's form, as the daemon reads them."""

from __future__ import annotations

from typing import Any

import msgspec

from ....backends.errors import UnsupportedOperation
from ....backends.params import without_nulls
from ..fields.table import field_error

_NAMES = {"thinking": "reasoning_content", "tool_name": "name"}
_LEVELS = 3
"""A message, its calls and their functions."""


def read_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for the daemon.

    :raises InvalidArgument: a message has another form.
    :raises UnsupportedOperation: a message has images.
    """
    messages = without_nulls(messages, _LEVELS)
    return [_read_message(f"messages.{number}", each) for number, each in enumerate(messages)]


def _read_message(place: str, message: dict[str, Any]) -> dict[str, Any]:
    for name, kind in (("role", str), ("content", str), ("tool_calls", list)):
        if not isinstance(message.get(name) or kind(), kind):
            raise field_error(f"{place}.{name}", f"{place}.{name} has the wrong type")
    if not message.get("role"):
        raise field_error(f"{place}.role", f"{place}: the role is missing")
    if message.get("images"):
        raise UnsupportedOperation(
            f"{place}.images: images",
            hint="the models read only text",
            data={"param": f"{place}.images"},
        )
    read: dict[str, Any] = {"content": ""} | {
        _NAMES.get(name, name): value
        for name, value in message.items()
        if name not in ("images", "tool_calls")
    }
    if calls := message.get("tool_calls"):
        place = f"{place}.tool_calls"
        read["tool_calls"] = [_read_call(f"{place}.{n}", call) for n, call in enumerate(calls)]
    return read


def _read_call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise field_error(place, f"{place} is not a call of a function with a name")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
