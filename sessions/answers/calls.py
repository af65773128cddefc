"""Tool calls, whole and in the parts in which a stream sends them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, NamedTuple

import msgspec

from ...backends.answer_form import PLAIN_ANSWERS, AnswerForm
from ...backends.params.json_texts import check_containers, nests_deeper
from ...backends.tool_formats import named_form

ANSWER_CALLS_MAX = 128
"""Calls of one answer; later ones stay text."""
ID_CHARACTERS = 9
"""Characters of an id: Mistral's chat templates refuse any other number."""
ARGUMENTS_LEVELS_MAX = 48
"""Levels of a call's arguments; a frame to the worker, which contains them, may nest 64 deep."""
_ALPHABET = ascii_letters + digits


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answers to a prompt, and the greatest number of tool calls in one. If *names*
    has any, only these functions may be called. Older versions stored the name of the form.
    """

    form: AnswerForm | str = PLAIN_ANSWERS
    calls_max: int = ANSWER_CALLS_MAX
    names: tuple[str, ...] = ()

    @property
    def answers(self) -> AnswerForm:
        return named_form(self.form) if isinstance(self.form, str) else self.form

    @property
    def allows_calls(self) -> bool:
        """Whether an answer may have calls."""
        return self.calls_max > 0 and self.answers.calls != ()

    @property
    def form_name(self) -> str:
        """The name of the form of calls, as clients see it."""
        return self.answers.shown_name if self.allows_calls else "none"

    @property
    def shown_marks(self) -> tuple[str, ...]:
        """The marks whose special tokens an answer has to show."""
        form = self.answers
        return (form if self.allows_calls else msgspec.structs.replace(form, calls=())).marks


NO_TOOLS = ToolUse(calls_max=0)


class ToolCall(NamedTuple):
    """A call of the function *name*; *arguments* is the JSON text of an object."""

    id: str
    name: str
    arguments: str


class ToolCallPart(msgspec.Struct, frozen=True):
    """A part of the call number *index*. The first part has the call's id and name, each part the
    next piece of its arguments. If *dropped*, it is not a call after all: its source follows as
    text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    dropped: bool = False


def merge_parts(parts: Iterable[ToolCallPart]) -> list[ToolCallPart]:
    """Return *parts* with consecutive parts of the same call joined."""
    merged: list[ToolCallPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if last is not None and last.index == part.index and not (last.dropped or part.dropped):
            arguments = last.arguments + part.arguments
            merged[-1] = msgspec.structs.replace(last, arguments=arguments)
        else:
            merged.append(part)
    return merged


def join_parts(parts: Iterable[ToolCallPart]) -> list[ToolCall]:
    """Return the calls that *parts* make up."""
    calls: dict[int, ToolCall] = {}
    for part in parts:
        if part.dropped:
            del calls[part.index]
        elif part.index in calls:
            call = calls[part.index]
            calls[part.index] = call._replace(arguments=call.arguments + part.arguments)
        else:
            calls[part.index] = ToolCall(part.id, part.name, part.arguments)
    return list(calls.values())


def call_id(context: bytes, index: int) -> str:
    """Return the id of the call number *index* in an answer to *context*. It is always the same,
    because the stream of a resumed turn has it again.
    """
    number = int.from_bytes(blake2b(context, digest_size=16, salt=b"%d" % index).digest())
    digits_of_id = []
    for _ in range(ID_CHARACTERS):
        number, digit = divmod(number, len(_ALPHABET))
        digits_of_id.append(_ALPHABET[digit])
    return "".join(digits_of_id)


def decode_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object of *text*, or None if it is not one, or is nested too deeply."""
    try:
        found = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return None if nests_deeper(found, ARGUMENTS_LEVELS_MAX) else found


def template_arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments for a chat template: as an object, or as *text* if that has more
    values or longer numbers than messages may have.
    """
    found = decode_object(text)
    if found is None:
        return text
    try:
        check_containers(text.encode())
        msgspec.msgpack.encode(found)
    except (ValueError, OverflowError, msgspec.MsgspecError):
        return text
    return found


def json_text(value: object) -> str:
    """Return the JSON text of a value in the form that chat templates give it."""
    return json.dumps(value, ensure_ascii=False)
