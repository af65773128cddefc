"""The items of a request as messages of a chat; functions in the form of chat completions.

A response's id has a hash of the instructions with which its history began, by which a response
that continues it is checked to have the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from .....backends.errors import UnsupportedOperation
from .....backends.params import without_nulls
from .....ipc.chat_messages import LOW_DETAIL_TOKENS
from .....ipc.chat_messages import ROLES as ALL_ROLES
from ...fields import field_error
from ...media import RequestMedia
from ..chat_fields import ROLES, read_parts

_START = "resp_"
_MARK_CHARACTERS = 16


def mark_of(instructions: str | None) -> str:
    """Return the hash of instructions."""
    digest = hashlib.sha256((instructions or "").encode(errors="replace")).hexdigest()
    return digest[:_MARK_CHARACTERS]


def mark_in(response_id: str) -> str:
    """Return the hash in a response's id."""
    return response_id.removeprefix(_START)[:_MARK_CHARACTERS]


def item_id(kind: str, response_id: str, number: int) -> str:
    """Return the id of an input item of a response, which is the same in each list of them."""
    digest = hashlib.sha256(f"{response_id} {number}".encode()).hexdigest()
    return f"{kind}_{digest[:24]}"


IMAGE = "input_image"
NAMESPACE = "namespace"
_ALLOWED = "allowed_tools"
_LEVELS = 2
"""An item and its parts, or a namespace and its tools."""
_SEARCHES = ("web_search", "web_search_preview")


def read_input(items: str | list[dict[str, Any]], media: RequestMedia) -> list[dict[str, Any]]:
    """Return the messages of an `input`, and add its images and sounds to *media*.

    :raises InvalidArgument: an item has another form.
    :raises UnsupportedOperation: an item or a part has a type that is not supported.
    :raises TooLarge: there are too many images and sounds.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(without_nulls(items, _LEVELS)):
        place = f"input.{number}"
        match item.get("type", "message"):
            case "message":
                messages.append(_message(place, item, media))
            case "function_call":
                _add_call(place, item, messages)
            case "function_call_output":
                output = _content(f"{place}.output", item.get("output"), media)
                call_id = _text(place, item, "call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case "reasoning":
                continue
            case kind:
                raise UnsupportedOperation(
                    f"{place}: an item of the type {str(kind)[:40]!r}",
                    hint="send message, function_call, function_call_output and reasoning",
                    data={"param": place},
                )
    return messages


def _message(place: str, item: dict[str, Any], media: RequestMedia) -> dict[str, Any]:
    role = _text(place, item, "role")
    if role not in ALL_ROLES:
        raise field_error(f"{place}.role", f"{place}.role is none of {', '.join(ALL_ROLES)}")
    return {
        "role": ROLES.get(role, role),
        "content": _content(f"{place}.content", item.get("content"), media),
    }


def _content(place: str, content: Any, media: RequestMedia) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise field_error(place, f"{place} is neither a text nor a list of parts")
    return read_parts(place, content, media)


def _add_call(place: str, item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add a call to the previous message if that is the assistant's, else as a new message."""
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


def input_items(response_id: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat as the items of a response's input."""
    found: list[dict[str, Any]] = []

    def add(kind: str, **fields: Any) -> None:
        id_start, type_ = kind.split(" ")
        made = {"id": item_id(id_start, response_id, len(found)), "type": type_}
        found.append({**made, "status": "completed", **fields})

    for message in messages:
        role, content = message["role"], message.get("content")
        text = _whole_text(content)
        calls = message.get("tool_calls") or ()
        if role == "tool":
            output = _input_parts(content) if _has_media(content) else text
            add("fco function_call_output", call_id=message.get("tool_call_id", ""), output=output)
        elif role != "assistant":
            add("msg message", role=role, content=_input_parts(content))
        elif text or not calls:
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
            add("msg message", role=role, content=[part])
        for call in calls:
            function, arguments = call["function"], call["function"]["arguments"]
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            named = {"call_id": call.get("id", ""), "name": function["name"]}
            add("fc function_call", **named, arguments=arguments)
    return found


def _whole_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def _has_media(content: Any) -> bool:
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def _input_parts(content: Any) -> list[dict[str, Any]]:
    """Return a content as parts of an input. Images and sounds are named by their hashes; the path
    of the session's media has them, too.
    """
    if not _has_media(content):
        return [{"type": "input_text", "text": _whole_text(content)}]
    found: list[dict[str, Any]] = []
    for part in content:
        match part["type"]:
            case "text":
                found.append({"type": "input_text", "text": part["text"]})
            case "image":
                nothing = {"image_url": None, "file_id": None}
                detail = "low" if 0 < part.get("tokens_max", 0) <= LOW_DETAIL_TOKENS else "auto"
                found.append({"type": IMAGE, "detail": detail, **nothing, **_hash_of(part)})
            case _:
                found.append({"type": "input_audio", **_hash_of(part)})
    return found


def _hash_of(part: dict[str, Any]) -> dict[str, Any]:
    return {"sha256": part["sha256"]} if "sha256" in part else {}


def image_parts(items: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the images of stored messages among the parts of *items*, in their order."""
    for item in items:
        parts = item.get("content") or item.get("output")
        for part in parts if isinstance(parts, list) else ():
            if part["type"] == IMAGE and "sha256" in part:
                yield part


def read_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return functions in the form of chat completions, including those in namespaces.

    A search of the web is left out, because a tool is only an offer, which a model need not take.

    :raises InvalidArgument: a namespace has another form.
    :raises UnsupportedOperation: a tool is not a function.
    """
    found = []
    for number, tool in enumerate(without_nulls(tools, _LEVELS)):
        place = f"tools.{number}"
        if tool.get("type") == NAMESPACE:
            members = _members(place, tool)
            found += [_read_tool(f"{place}.tools.{n}", each) for n, each in enumerate(members)]
        elif tool.get("type") not in _SEARCHES:
            found.append(_read_tool(place, tool))
    return found


def namespaces_of(tools: list[dict[str, Any]]) -> dict[str, str]:
    """Return a map from function name to namespace; *tools* have passed `read_tools`."""
    spaces = [tool for tool in tools if tool.get("type") == NAMESPACE]
    return {each["name"]: str(tool.get("name", "")) for tool in spaces for each in tool["tools"]}


def _members(place: str, tool: dict[str, Any]) -> list[dict[str, Any]]:
    members = tool.get("tools")
    if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
        raise field_error(f"{place}.tools", f"{place}.tools is not a list of tools")
    return members


def _read_tool(place: str, tool: dict[str, Any]) -> dict[str, Any]:
    _check_function(place, tool)
    _text(place, tool, "name")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def read_tool_choice(choice: str | dict[str, Any]) -> Any:
    """Return a choice in the form of chat completions.

    :raises InvalidArgument: the choice has another form.
    :raises UnsupportedOperation: a tool of the choice is not a function.
    """
    if isinstance(choice, str):
        return choice
    if choice.get("type") == _ALLOWED:
        return _read_allowed(choice)
    return _named("tool_choice", choice)


def _read_allowed(choice: dict[str, Any]) -> Any:
    """Return the choice of some of the tools. A search of the web is left out, because it is not
    offered to the model.
    """
    tools = choice.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise field_error("tool_choice.tools", "tool_choice.tools is not a list of tools")
    functions = [
        _named(f"tool_choice.tools.{number}", tool)
        for number, tool in enumerate(tools)
        if tool.get("type") not in _SEARCHES
    ]
    if tools and not functions and choice.get("mode") == "auto":
        return "none"
    return {"type": _ALLOWED, _ALLOWED: {"mode": choice.get("mode"), "tools": functions}}


def _named(place: str, tool: dict[str, Any]) -> dict[str, Any]:
    _check_function(place, tool)
    return {"type": "function", "function": {"name": _text(place, tool, "name")}}


def _check_function(place: str, tool: dict[str, Any]) -> None:
    kind = tool.get("type")
    if kind != "function":
        raise UnsupportedOperation(
            f"{place}: a tool of the type {str(kind)[:40]!r}",
            hint="only functions can be called",
            data={"param": place},
        )
