"""The forms of tool calls: one generator each, which reads a whole answer."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any

import msgspec

from ...backends.tool_formats import ToolFormat
from .calls import json_text
from .reader import NAME, CallReader
from .source import NotACall, Reading

__all__ = ("AnswerReader",)

_TAG_NAME = re.compile(r"[^<>\n]*")
_CALL_ID = re.compile(r"[^\[\]\s]*")


class AnswerReader:
    """Reads an answer with up to *calls_max* calls. The prompt may have *opened* its first call or
    text, by the mark that begins each of them.
    """

    def __init__(self, reader: CallReader, calls_max: int, *, opened: bool = False):
        self._reader, self._source = reader, reader.source
        self._calls_max, self._opened = calls_max, opened

    def read(self, form: ToolFormat) -> Reading:
        """Read an answer in this form; all that follows its last allowed call is text."""
        yield from {
            ToolFormat.HERMES: self._hermes,
            ToolFormat.MISTRAL: self._mistral,
            ToolFormat.MISTRAL_ARGS: self._mistral,
            ToolFormat.LLAMA: self._llama,
            ToolFormat.FUNCTIONARY: self._functionary,
            ToolFormat.FUNCTION_TAGS: self._function_tags,
            ToolFormat.JSON: self._json,
            ToolFormat.NONE: self._rest,
        }[form]()

    def _rest(self) -> Reading:
        yield from self._source.text_until()

    def _mark(self, *marks: str) -> Generator[None, None, str]:
        """Pass text up to the next mark and return it. If no more calls are allowed, pass all."""
        more = self._source.calls < self._calls_max
        return (yield from self._source.text_until(*(marks if more else ())))

    def _skip(self, text: str) -> Reading:
        """Skip *text* after a call, with white space before it, if it comes next."""
        yield from self._source.space()
        if (yield from self._source.starts_with(text)):
            self._source.clear_pending()
        else:
            self._source.pass_pending()

    # JSON objects after a mark.

    def _hermes(self) -> Reading:
        while True:
            yield from self._mark("<tool_call>")
            with self._source.possible_call():
                yield from self._source.space()
                yield from self._reader.json_call()
                yield from self._skip("</tool_call>")

    def _mistral(self) -> Reading:
        while True:
            yield from self._mark("[TOOL_CALLS]")
            with self._source.possible_call():
                yield from self._source.space()
                first = yield from self._source.peek()
                if first == "[":
                    self._source.take(1)
                    yield from self._source.space()
                    yield from self._calls(",")
                    yield from self._skip("]")
                elif first == "{":
                    yield from self._reader.json_call()
                else:
                    yield from self._named_call()

    def _named_call(self) -> Reading:
        """Read `name[ARGS]{…}`, with `[CALL_ID]` and an id before `[ARGS]` in some versions."""
        source, reader = self._source, self._reader
        reader.begin()
        name = yield from source.run(NAME)
        if (yield from source.starts_with("[CALL_ID]")):
            yield from source.run(_CALL_ID)
            yield from source.expect("[ARGS]")
        elif not (yield from source.starts_with("[ARGS]")):
            yield from source.space()
            if (yield from source.peek()) != "{":
                raise NotACall
        reader.set_name(name)
        yield from reader.arguments()

    def _calls(self, separator: str, *, strict: bool = False) -> Reading:
        """Read calls that the *separator* separates."""
        while True:
            yield from self._reader.json_call(strict=strict)
            if self._source.calls >= self._calls_max:
                return
            yield from self._source.space()
            if not (yield from self._source.starts_with(separator)):
                self._source.pass_pending()
                return
            yield from self._source.space()

    # The whole answer.

    def _llama(self) -> Reading:
        with self._source.possible_call():
            yield from self._source.space()
            if (yield from self._source.peek()) != "{":
                raise NotACall
            yield from self._calls(";", strict=True)
        while True:
            yield from self._mark("<|python_tag|>")
            with self._source.possible_call():
                yield from self._source.space()
                yield from self._calls(";")

    def _json(self) -> Reading:
        with self._source.possible_call():
            yield from self._source.space()
            yield from self._reader.json_call(strict=True)
        yield from self._rest()

    # Names in tags.

    def _functionary(self) -> Reading:
        reader, source, opened = self._reader, self._source, self._opened
        while True:
            if not opened:
                yield from self._mark(">>>")
            opened = False
            with source.possible_call():
                reader.begin()
                name = yield from source.run(NAME)
                yield from source.expect("\n")
                if name == "all":
                    source.clear_pending()
                    source.pass_space()
                else:
                    reader.set_name(name, declared=True)
                    yield from reader.arguments()

    def _function_tags(self) -> Reading:
        reader, source = self._reader, self._source
        while True:
            mark = yield from self._mark("<tool_call>", "<function=")
            with source.possible_call():
                wrapped = mark == "<tool_call>"
                if wrapped:
                    yield from source.space()
                    yield from source.expect("<function=")
                reader.begin()
                name = yield from source.run(NAME)
                yield from source.expect(">")
                reader.set_name(name)
                yield from source.space()
                if (yield from source.peek()) == "{":
                    yield from reader.arguments()
                    yield from self._skip("</function>")
                else:
                    yield from self._parameters(reader.functions.get(name, {}))
                if wrapped:
                    yield from self._skip("</tool_call>")

    def _parameters(self, schema: Mapping[str, Any]) -> Reading:
        """Read arguments in tags up to the end of the function's tag, and end the call."""
        source, opening = self._source, "{"
        while not (yield from source.starts_with("</function>")):
            yield from source.expect("<parameter=")
            key = yield from source.run(_TAG_NAME)
            yield from source.expect(">")
            text = yield from source.until("</parameter>")
            value = _tag_value(text, _property(schema, key))
            self._reader.add_arguments(f"{opening}{json_text(key)}: {json_text(value)}")
            opening = ", "
            yield from source.space()
        self._reader.add_arguments("{}" if opening == "{" else "}")
        self._reader.finish()


def _property(schema: Mapping[str, Any], key: str) -> object:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def _tag_value(text: str, schema: object) -> object:
    """Return the value of a parameter's tag: its text, if the parameter may be a text or if this
    is not JSON, otherwise the JSON value.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    if _may_be_text(schema):
        return text
    try:
        return msgspec.json.decode(text.encode())
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return text


def _may_be_text(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return True
    kinds, alternatives = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kinds, str | list):
        return "string" in kinds
    if isinstance(alternatives, list):
        return any(map(_may_be_text, alternatives))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [""])
    return isinstance(values, list) and any(isinstance(value, str) for value in values)
