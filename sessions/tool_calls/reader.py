"""Reading of one tool call: its name, its arguments, its JSON object."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec

from ...backends.tool_formats import FUNCTION_NAME_CHARACTERS_MAX
from .calls import ARGUMENTS_LEVELS_MAX, ToolCallPart, decode_object
from .source import AnswerSource, NotACall, Reading

__all__ = ("NAME", "CallReader")

NAME = re.compile(r"[A-Za-z0-9_.-]*")
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^\s,}\]]*")
_CLOSING = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)


class CallReader:
    """Reads calls from *source* and adds their parts to it. *functions* has the schema of each
    function's arguments by its name. *new_id* returns the id of a call by its number.
    """

    def __init__(
        self,
        source: AnswerSource,
        functions: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[int], str],
    ):
        self.source, self.functions = source, functions
        self._new_id = new_id
        self._name: str | None = None
        self._arguments: list[str] = []

    # Parts.

    def begin(self) -> None:
        """Begin a call, whose name is not known yet."""
        self._name = None
        self._arguments.clear()

    def set_name(self, name: str, *, declared: bool = False) -> None:
        """Set the call's name; with *declared* it must be that of a known function.

        :raises NotACall: this cannot be the name of a function.
        """
        known = name in self.functions
        if not known and (declared or not name or not NAME.fullmatch(name)):
            raise NotACall
        if len(name) > FUNCTION_NAME_CHARACTERS_MAX:
            raise NotACall
        self._name = name
        index = self.source.calls
        arguments = "".join(self._arguments)
        self.source.add_part(ToolCallPart(index, self._new_id(index), name, arguments))

    def add_arguments(self, text: str) -> None:
        """Add the next part of the arguments' JSON text.

        :raises NotACall: it is not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise NotACall from None
        self._arguments.append(text)
        if self._name is not None:
            self.source.add_part(ToolCallPart(self.source.calls, arguments=text))

    def finish(self) -> None:
        """End the call.

        :raises NotACall: it has no name, or its arguments are not an object.
        """
        if self._name is None or decode_object("".join(self._arguments)) is None:
            raise NotACall
        self.source.end_call()

    # Forms.

    def arguments(self) -> Reading:
        """Read the call's arguments as a JSON object, and end the call."""
        yield from self.source.space()
        if (yield from self.source.peek()) != "{":
            raise NotACall
        yield from self._value(self.add_arguments)
        self.finish()

    def json_call(self, *, strict: bool = False) -> Reading:
        """Read a call that is one JSON object. A *strict* one must have arguments, the name of a
        known function, and no key that calls do not have.
        """
        source, seen = self.source, set[str]()
        self.begin()
        yield from source.expect("{")
        yield from source.space()
        more = not (yield from source.starts_with("}"))
        while more:
            key = yield from self._string()
            if key in seen or (strict and key not in _KEYS):
                raise NotACall
            seen.add(key)
            yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            yield from self._member(key, strict=strict)
            yield from source.space()
            more = yield from source.starts_with(",")
            if more:
                yield from source.space()
            else:
                yield from source.expect("}")
        if not self._arguments and not strict:
            self.add_arguments("{}")
        self.finish()

    def _member(self, key: str, *, strict: bool) -> Reading:
        if key == "name":
            self.set_name((yield from self._string()), declared=strict)
        elif key in _ARGUMENTS:
            if self._arguments:
                raise NotACall
            yield from self._arguments_value()
        else:
            yield from self._value(lambda _: None)

    def _arguments_value(self) -> Reading:
        """Read the arguments, as an object or as a text with its JSON."""
        if (yield from self.source.peek()) == '"':
            text = yield from self._string()
            if decode_object(text) is None:
                raise NotACall
            self.add_arguments(text)
        else:
            yield from self._value(self.add_arguments)

    # JSON.

    def _string(self) -> Generator[None, None, str]:
        """Read a JSON string and return its value."""
        raw: list[str] = []
        yield from self._raw_string(raw.append)
        try:
            return msgspec.json.decode("".join(raw).encode(), type=str)
        except (msgspec.MsgspecError, ValueError):
            raise NotACall from None

    def _raw_string(self, pass_on: Callable[[str], None]) -> Reading:
        source = self.source
        yield from source.expect('"')
        pass_on('"')
        while True:
            yield from source.run(_IN_STRING, pass_on)
            character = yield from source.peek()
            pass_on(source.take(1))
            if character == '"':
                return
            yield from source.peek()
            pass_on(source.take(1))

    def _value(self, pass_on: Callable[[str], None]) -> Reading:
        """Read a JSON value by its brackets and strings alone; `finish` checks the arguments."""
        source, first = self.source, (yield from self.source.peek())
        if first == '"':
            yield from self._raw_string(pass_on)
            return
        if first not in _CLOSING:
            if not (yield from source.run(_SCALAR, pass_on)):
                raise NotACall
            return
        expected: list[str] = []
        while True:
            yield from source.run(_BETWEEN, pass_on)
            character = yield from source.peek()
            if character == '"':
                yield from self._raw_string(pass_on)
                continue
            if character in _CLOSING:
                expected.append(_CLOSING[character])
            elif expected.pop() != character:
                raise NotACall
            pass_on(source.take(1))
            if len(expected) > ARGUMENTS_LEVELS_MAX:
                raise NotACall
            if not expected:
                return
