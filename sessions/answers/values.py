"""Values in the arguments of calls, read from an answer and written as JSON.

JSON is passed on as the model wrote it. Literals of Python, and objects with other marks around
strings, become JSON as they arrive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

import msgspec

from .calls import ARGUMENTS_LEVELS_MAX, json_text
from .source import (
    SHORT_SPACE,
    SPACE_CHARACTERS_MAX,
    AnswerEnded,
    AnswerSource,
    NotACall,
    Reading,
)

Emit = Callable[[str], None]
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^\s,}\]]*")
_WORD = re.compile(r"[^\s,:()\[\]{}]*")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]]*")
_LITERAL_TEXT = {"'": re.compile(r"[^'\\]*"), '"': _IN_STRING}
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_CODES = {"x": 2, "u": 4, "U": 8}
_AFTER_STRING = re.compile(rf"\s{{0,{SPACE_CHARACTERS_MAX}}}(?:[,:)\]}}]|\Z)")
_REFERENCES_MAX = 16
_ALTERNATIVES_MAX = 256
"""Schemas with alternatives that are read to find out whether a value may be a text."""


def read_string(source: AnswerSource) -> Generator[None, None, str]:
    """Read a JSON string and return its value.

    :raises NotACall: it is not one.
    """
    raw: list[str] = []
    yield from _raw_string(source, raw.append)
    try:
        return msgspec.json.decode("".join(raw).encode(), type=str)
    except (msgspec.MsgspecError, ValueError):
        raise NotACall from None


def _raw_string(source: AnswerSource, pass_on: Emit) -> Reading:
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


def pass_json(source: AnswerSource, pass_on: Emit) -> Reading:
    """Read a JSON value by its brackets and strings alone, and pass it on as it is written.

    :raises NotACall: brackets do not match, or are nested too deeply.
    """
    first = yield from source.peek()
    if first == '"':
        yield from _raw_string(source, pass_on)
        return
    if first not in "{[":
        if not (yield from source.run(_SCALAR, pass_on)):
            raise NotACall
        return
    expected: list[str] = []
    while True:
        yield from source.run(_BETWEEN, pass_on)
        character = yield from source.peek()
        if character == '"':
            yield from _raw_string(source, pass_on)
            continue
        if character in "{[":
            expected.append(_CLOSING[character])
        elif expected.pop() != character:
            raise NotACall
        pass_on(source.take(1))
        if len(expected) > ARGUMENTS_LEVELS_MAX:
            raise NotACall
        if not expected:
            return


class LiteralReader:
    """Reads literals from *source*: JSON, Python's, and those with *quote* around strings, or bare
    keys. *emit* gets them as JSON.
    """

    def __init__(self, source: AnswerSource, emit: Emit, quote: str = ""):
        self._source, self._emit, self._quote = source, emit, quote

    def read(self, levels: int = ARGUMENTS_LEVELS_MAX) -> Reading:
        """Read one value.

        :raises NotACall: it is not a literal, or is nested too deeply.
        """
        source = self._source
        first = yield from source.peek()
        if self._quote and (yield from source.starts_with(self._quote)):
            yield from self._quoted()
        elif first in _LITERAL_TEXT:
            self._emit('"')
            yield from self._text(first, self._emit_text)
            self._emit('"')
        elif first in _CLOSING:
            if not levels:
                raise NotACall
            yield from self._items(levels - 1)
        else:
            self._emit(_scalar_json((yield from source.run(_WORD))))

    def _emit_text(self, text: str) -> None:
        self._emit(inner_text(text))

    def _quoted(self) -> Reading:
        """Read the rest of a string between marks."""
        self._emit('"')
        yield from self._source.text_before(self._quote, (), self._emit_text)
        self._emit('"')

    def _items(self, levels: int) -> Reading:
        """Read an object or a list."""
        source, opening = self._source, self._source.take(1)
        closing = _CLOSING[opening]
        self._emit("{" if opening == "{" else "[")
        separator = ""
        while True:
            yield from source.space()
            if (yield from source.starts_with(closing)):
                break
            if separator:
                yield from source.expect(",")
                yield from source.space()
                if (yield from source.starts_with(closing)):
                    break  # after a comma at the end
            self._emit(separator)
            separator = ", "
            if opening == "{":
                yield from self._key()
                yield from source.space()
            yield from self.read(levels)
        self._emit("}" if opening == "{" else "]")

    def _key(self) -> Reading:
        source = self._source
        first = yield from source.peek()
        if (self._quote and (yield from source.comes(self._quote))) or first in _LITERAL_TEXT:
            yield from self.read(0)
        else:
            key = yield from source.run(_BARE_KEY)
            if not key:
                raise NotACall
            self._emit(json_text(key))
        yield from source.space()
        yield from source.expect(":")
        self._emit(": ")

    def _text(self, quote: str, pass_on: Emit) -> Reading:
        """Read a string in quotes. A quote within it that is not escaped is text, unless a
        separator or a bracket follows.
        """
        source = self._source
        source.take(1)
        while True:
            yield from source.run(_LITERAL_TEXT[quote], pass_on)
            character = source.take(1)
            if character == "\\":
                yield from self._escape(pass_on)
            elif (yield from self._ends_here()):
                return
            else:
                pass_on(character)

    def _ends_here(self) -> Generator[None, None, bool]:
        """Return whether a separator, a bracket or the end follows, after white space."""
        source = self._source
        while True:
            space = SHORT_SPACE.match(source.buffer, source.at)
            assert space is not None, "it matches everywhere"
            if space.end() < len(source.buffer) or source.ended:
                return _AFTER_STRING.match(source.buffer, source.at) is not None
            yield

    def _escape(self, pass_on: Emit) -> Reading:
        source = self._source
        kind = yield from source.peek()
        source.take(1)
        if kind not in _CODES:
            known = kind in "\\'\"/\n"
            pass_on(_ESCAPES.get(kind, kind if known else "\\" + kind))
            return
        digits = ""
        while len(digits) < _CODES[kind]:
            if (yield from source.peek()) not in "0123456789abcdefABCDEF":
                raise NotACall
            digits += source.take(1)
        code = int(digits, 16)
        if 0xD800 <= code < 0xDC00:  # JSON writes other characters as two codes
            yield from source.expect("\\u")
            low = ""
            while len(low) < 4:
                yield from source.peek()
                low += source.take(1)
            try:
                pass_on(bytes.fromhex(f"{code:04x}{low}").decode("utf-16-be"))
            except ValueError:
                raise NotACall from None
            return
        if code > 0x10FFFF or 0xDC00 <= code < 0xE000:
            raise NotACall
        pass_on(chr(code))


def inner_text(text: str) -> str:
    """Return *text* as it stands within a JSON string."""
    return json_text(text)[1:-1]


def _scalar_json(word: str) -> str:
    if not word:
        raise NotACall
    if word in _WORDS:
        return _WORDS[word]
    try:
        msgspec.json.decode(word.encode(errors="replace"))
    except (msgspec.MsgspecError, ValueError):
        return json_text(word)
    return word


def json_of_text(text: str) -> str:
    """Return the JSON of a value that a tag has as text: JSON, a literal of Python, or a string."""
    bare = text.strip()
    try:
        return json_text(msgspec.json.decode(bare.encode()))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    if bare in _WORDS:
        return _WORDS[bare]
    source, pieces = AnswerSource(), list[str]()
    source.add_text(bare)
    source.end()
    try:
        for _ in LiteralReader(source, pieces.append).read():
            raise AssertionError("the text has ended")
    except (NotACall, AnswerEnded):
        return json_text(text)
    complete = source.at == len(bare) and bare[0] in _CLOSING
    return "".join(pieces) if complete else json_text(text)


# Schemas.


def resolve_schema(schema: object, root: Mapping[str, Any]) -> object:
    """Return *schema*, or the part of *root* to which it refers."""
    for _ in range(_REFERENCES_MAX):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = root
        for key in reference[2:].split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return None


def property_schema(schema: object, key: str, root: Mapping[str, Any]) -> object:
    """Return the schema of an object's property, or None if it is not known."""
    schema = resolve_schema(schema, root)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return resolve_schema(properties.get(key), root) if isinstance(properties, Mapping) else None


def item_schema(schema: object, root: Mapping[str, Any]) -> object:
    """Return the schema of a list's items, or None if it is not known."""
    return resolve_schema(schema.get("items"), root) if isinstance(schema, Mapping) else None


def may_be_null(schema: object, root: Mapping[str, Any]) -> bool:
    """Return whether a schema names null as one of the types of a value."""
    schema = resolve_schema(schema, root)
    if not isinstance(schema, Mapping):
        return False
    kinds, alternatives = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kinds, list):
        return "null" in kinds
    return isinstance(alternatives, list) and {"type": "null"} in alternatives


def may_be_text(schema: object, root: Mapping[str, Any]) -> bool:
    """Return whether a value of *schema* can be a string."""
    return _may_be_text(schema, root, set())


def _may_be_text(schema: object, root: Mapping[str, Any], seen: set[int]) -> bool:
    """Do the same, unless the schema was *seen*: schemas can refer to themselves."""
    schema = resolve_schema(schema, root)
    if not isinstance(schema, Mapping):
        return True
    kinds, alternatives = schema.get("type"), schema.get("anyOf") or schema.get("oneOf")
    if isinstance(kinds, str | list):
        return "string" in kinds
    if isinstance(alternatives, list):
        if id(schema) in seen or len(seen) >= _ALTERNATIVES_MAX:
            return False
        seen.add(id(schema))
        return any(_may_be_text(part, root, seen) for part in alternatives)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [""])
    return isinstance(values, list) and any(isinstance(value, str) for value in values)
