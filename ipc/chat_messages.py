"""Check of the shape of chat messages, before a template renders them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from ..backends.errors import InvalidArgument, TooLarge
from ..backends.media import MEDIA_KINDS
from ..backends.texts import shorten

MESSAGES_MAX = 1000
TOOL_CALLS_MAX = 128
MEDIA_PARTS_MAX = 64
"""Images and sounds of one request."""
MEDIA_TOKENS_MAX = 1 << 20
ALT_CHARACTERS_MAX = 1000
"""Characters of the text that describes an image or a sound."""
LOW_DETAIL_TOKENS = 256
"""The tokens that an image of low `detail` may have."""
DETAILS = ("auto", "low", "high")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE_SHAPE = '{"role": "user", "content": "…"}'
_PART_SHAPE = (
    'parts are {"type": "text", "text": "…"}, {"type": "image", "data": …} and'
    ' {"type": "audio", "data": …}'
)
_DATA_SHAPE = 'send the bytes of the file as bin, or in a descriptor: {"fd": 0}'
_CALL_SHAPE = '{"type": "function", "function": {"name": "…", "arguments": {…}}}'


class PassedData(msgspec.Struct):
    """The data of a part in the descriptor *fd*, which came with the request. No message that was
    decoded has such an object: a number that a client wrote is never used as a descriptor.
    """

    fd: int


class MediaPart(NamedTuple):
    """An image or a sound in a message: number *item* of the request, at a *place* such as
    ``messages.0.content.1``. `message` is the number of the message, `position` that of the part.
    """

    item: int
    place: str
    message: int
    position: int
    fields: dict[str, Any]

    def error_data(self) -> dict[str, Any]:
        """Return the data of an error that concerns this part."""
        return {"item": self.item, "param": self.place}


def passed_data(messages: Iterable[Any]) -> list[PassedData]:
    """Return the data of parts that are in descriptors, in their order. Each becomes an object in
    its part, whose `fd` is still the value that the client wrote.
    """
    found: list[PassedData] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            data = part.get("data") if isinstance(part, dict) else None
            fd = data.get("fd") if isinstance(data, dict) else None
            if type(fd) is int and fd >= 0:
                part["data"] = PassedData(fd)
                found.append(part["data"])
    return found


def media_parts(messages: Iterable[dict[str, Any]]) -> Iterator[MediaPart]:
    """Yield the images and sounds of messages that were checked, in their order."""
    item = 0
    for number, message in enumerate(messages):
        content = message["content"]
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] != "text":
                place = f"messages.{number}.content.{index}"
                yield MediaPart(item, place, number, index, part)
                item += 1


def checked_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages that all have a role, and as content a text, or a list of parts if some
    are images or sounds. Parts of text alone are joined, and a message that has only `tool_calls`
    gets an empty text.

    :raises InvalidArgument: a message has another shape, or there are none or too many. The
        message and `data.param` name the field, such as ``messages.3.content``.
    :raises TooLarge: there are more than `MEDIA_PARTS_MAX` images and sounds.
    """
    if not 0 < len(messages) <= MESSAGES_MAX:
        raise _error("messages", f"there are {len(messages)}; the range is 1 … {MESSAGES_MAX}")
    checked = [_checked(f"messages.{number}", message) for number, message in enumerate(messages)]
    for part in media_parts(checked):
        if checked[part.message]["role"] == "assistant":
            raise _error(
                part.place,
                "a message of the role 'assistant' has no images and sounds",
                "send them in a message of the user, or of a tool",
                item=part.item,
            )
        if part.item >= MEDIA_PARTS_MAX:
            raise TooLarge(
                f"the request has more than {MEDIA_PARTS_MAX} images and sounds",
                hint="send the others with the next message",
                data=part.error_data() | {"media_parts_max": MEDIA_PARTS_MAX},
            )
        _check_media(part)
    return checked


def tokens_max_of(part: dict[str, Any]) -> int:
    """Return the most tokens that an image may have by its part; 0 is the model's own bound."""
    tokens_max = part.get("tokens_max") or 0
    if part.get("detail") != "low":
        return int(tokens_max)
    return min(LOW_DETAIL_TOKENS, tokens_max or LOW_DETAIL_TOKENS)


def _error(place: str, problem: str, hint: str = "", **data: Any) -> InvalidArgument:
    return InvalidArgument(f"{place}: {problem}", hint=hint, data={"param": place, **data})


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
        return message | {"content": _checked_parts(place, content)}
    if not isinstance(content, str):
        without = " or tool_calls" if role == "assistant" else ""
        problem = (
            f"a message of the role {role!r} needs a text{without}; this is {shorten(content)}"
        )
        raise _error(place, problem, _MESSAGE_SHAPE)
    return message


def _checked_parts(place: str, content: list[Any]) -> str | list[dict[str, Any]]:
    """Return a content's parts; those of text alone are joined by line breaks, as in
    llama-server.
    """
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        is_text = kind == "text" and isinstance(part.get("text"), str)
        if not is_text and kind not in MEDIA_KINDS:
            raise _error(
                f"{place}.{number}",
                f"{shorten(part)} is not a part of text, an image or a sound",
                _PART_SHAPE,
            )
    if all(part["type"] == "text" for part in content):
        return "\n".join(part["text"] for part in content)
    return content


def _check_media(part: MediaPart) -> None:
    fields, data = part.fields, part.fields.get("data")
    if not isinstance(data, bytes | PassedData):
        hint = _DATA_SHAPE
        problem = f"its data is {shorten(data)}"
        if data is None and "sha256" in fields:
            problem, hint = "it has no data", f"{hint}; session_media returns that of a stored part"
        raise _error(part.place, problem, hint, item=part.item)
    tokens_max = fields.get("tokens_max")
    is_number = isinstance(tokens_max, int) and not isinstance(tokens_max, bool)
    if tokens_max is not None and not (is_number and 0 <= tokens_max <= MEDIA_TOKENS_MAX):
        problem = f"{shorten(tokens_max)} is out of range"
        hint = f"use 1 … {MEDIA_TOKENS_MAX}, or 0 for the model's own bound"
        raise _error(f"{part.place}.tokens_max", problem, hint, item=part.item)
    if fields.get("detail") not in (None, *DETAILS):
        problem = f"{shorten(fields['detail'])} is not a level of detail"
        hint = f"use one of {', '.join(DETAILS)}"
        raise _error(f"{part.place}.detail", problem, hint, item=part.item)
    for name in ("media_type", "alt"):
        text = fields.get(name)
        if text is not None and not (isinstance(text, str) and len(text) <= ALT_CHARACTERS_MAX):
            problem = f"this is not a text of up to {ALT_CHARACTERS_MAX} characters"
            raise _error(f"{part.place}.{name}", problem, item=part.item)


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
