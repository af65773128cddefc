"""The items of a request, as messages of a chat; functions in the form of a chat."""

from __future__ import annotations

from typing import Any

from .....backends.errors import UnsupportedOperation
from ...fields.table import field_error
from ..messages import ROLES, read_parts


def read_input(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of an `input`.

    :raises InvalidArgument: an item has another form.
    :raises UnsupportedOperation: an item or a part has a type that is not supported.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        place = f"input.{number}"
        match item.get("type", "message"):
            case "message":
                messages.append(_message(place, item))
            case "function_call":
                _add_call(place, item, messages)
            case "function_call_output":
                output = _content(f"{place}.output", item.get("output"))
                call_id = _text(place, item, "call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "reasoning":
                continue
            case kind:
                raise UnsupportedOperation(
                    f"{place}: an item of the type {str(kind)[:40]!r}",
                    hint="docs/gateway-fields.md lists those that are supported",
                    data={"param": place},
                )
    return messages


def _message(place: str, item: dict[str, Any]) -> dict[str, Any]:
    role = _text(place, item, "role")
    return {
        "role": ROLES.get(role, role),
        "content": _content(f"{place}.content", item.get("content")),
    }


def _content(place: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise field_error(place, f"{place} is neither a text nor a list of parts")
    return read_parts(place, content)


def _add_call(place: str, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add a call to the message before it, if that is the assistant's."""
    call = {
        "id": _text(place, item, "call_id"),
        "type": "function",
        "function": {
            "name": _text(place, item, "name"),
            "arguments": _text(place, item, "arguments"),
        },
    }
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _text(place: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise field_error(f"{place}.{name}", f"{place}.{name} is not a text")
    return value


def read_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return functions in the form of a chat.

    :raises UnsupportedOperation: a tool is not a function.
    """
    return [_read_tool(f"tools.{number}", tool) for number, tool in enumerate(tools)]


def _read_tool(place: str, tool: dict[str, Any]) -> dict[str, Any]:
    _check_function(place, tool)
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def read_tool_choice(choice: str | dict[str, Any]) -> Any:
    """Return a choice in the form of a chat.

    :raises UnsupportedOperation: it is not a function.
    """
    if isinstance(choice, str):
        return choice
    _check_function("tool_choice", choice)
    return {"type": "function", "function": {"name": _text("tool_choice", choice, "name")}}


def _check_function(place: str, tool: dict[str, Any]) -> None:
    kind = tool.get("type")
    if kind != "function":
        raise UnsupportedOperation(
            f"{place}: a tool of the type {str(kind)[:40]!r}",
            hint="only functions can be called",
            data={"param": place},
        )
