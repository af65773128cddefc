"""The parser of one answer: its text, and its tool calls in parts, as they arrive.

Generators read the answer. They wait, by a yield, only where they cannot continue without the next
piece. So the results at any place do not depend on how the text before it was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from ...backends.tool_formats import FUNCTION_NAME_CHARACTERS_MAX, ToolFormat
from .calls import (
    ANSWER_CALLS_MAX,
    ARGUMENTS_LEVELS_MAX,
    ToolCallPart,
    decode_object,
    json_text,
    merge_parts,
)

CALL_CHARACTERS_MAX = 256 << 10
"""A longer call stays text."""
_SPACE = re.compile(r"\s*")

Reading = Generator[None, None, None]


class NotACall(Exception):
    """The text does not continue as a call."""


class AnswerEnded(Exception):
    """The answer has ended where a call could continue."""


class AnswerSource:
    """The text of one answer. Owned by its parser. *buffer* from *at* on was not read yet.

    To *pass* text is to add it to the text of the answer. White space beside calls is not part of
    that.
    """

    def __init__(self) -> None:
        self.parts: list[ToolCallPart] = []
        """Parts of calls that were not taken yet."""
        self.calls = 0
        """Complete calls so far."""
        self.buffer, self.at = "", 0
        self._ended = False
        self._text: list[str] = []
        self._space = ""
        """White space that is text unless a call follows."""
        self._after_call = False
        self._pending: list[str] = []
        """The text of a possible call so far."""
        self._pending_size = 0
        self._announced = False
        """Whether parts of the pending call were added to `parts`."""

    def add_text(self, text: str) -> None:
        self.buffer, self.at = self.buffer[self.at :] + text, 0

    def end(self) -> None:
        self._ended = True

    def take_text(self) -> str:
        """Return the text that was read and not taken yet."""
        text, self._text = "".join(self._text), []
        return text

    def take_parts(self) -> list[ToolCallPart]:
        """Return the parts of calls that were read and not taken yet."""
        parts, self.parts = self.parts, []
        return parts

    # Text.

    def text_until(self, *marks: str) -> Generator[None, None, str]:
        """Pass text up to the next of *marks*, which becomes pending; return the mark.

        :raises AnswerEnded: the answer has ended without one.
        """
        pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        while True:
            found = pattern.search(self.buffer, self.at)
            end = len(self.buffer)
            if found is not None:
                end = found.start()
            elif not self._ended:
                end -= self._partial_mark(marks)
            self._pass(self.buffer[self.at : end])
            self.at = end
            if found is not None:
                self.take(len(found.group()))
                return found.group()
            if self._ended:
                raise AnswerEnded
            yield

    def _partial_mark(self, marks: tuple[str, ...]) -> int:
        """Return the number of characters at the end that may begin a mark."""
        rest = self.buffer[max(self.at, len(self.buffer) - max(map(len, marks), default=0)) :]
        sizes = range(len(rest), 0, -1)
        return next((n for n in sizes if any(m.startswith(rest[-n:]) for m in marks)), 0)

    def _pass(self, text: str) -> None:
        """Pass *text*, but hold back white space at its end, and drop white space after a call."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._text.append(shown)

    def pass_space(self) -> None:
        """Pass the white space that is held back."""
        self._text.append(self._space)
        self._space = ""

    def pass_rest(self) -> None:
        """Pass all text that was not read, and the white space at its end."""
        self._pass(self.buffer[self.at :])
        self.at = len(self.buffer)
        self.pass_space()

    def pass_pending(self) -> None:
        """Pass the pending text, because it is not a call."""
        if self._announced:
            self.parts.append(ToolCallPart(self.calls, dropped=True))
        pending = "".join(self._pending)
        self.clear_pending()
        self._pass(pending)

    def clear_pending(self) -> None:
        """Clear the pending text: it was passed, has become a call, or is skipped as a mark."""
        self._pending.clear()
        self._pending_size, self._announced = 0, False

    # Calls.

    @contextmanager
    def possible_call(self) -> Iterator[None]:
        """Pass the pending text if the block finds that it is not a call."""
        try:
            yield
        except NotACall:
            self.pass_pending()

    def add_part(self, part: ToolCallPart) -> None:
        self.parts.append(part)
        self._announced = True

    def end_call(self) -> None:
        self.calls += 1
        self.clear_pending()
        self._space, self._after_call = "", True

    def take(self, size: int) -> str:
        """Read the next *size* characters as a part of the pending call.

        :raises NotACall: the call is too long.
        """
        taken = self.buffer[self.at : self.at + size]
        self.at += size
        self._pending.append(taken)
        self._pending_size += size
        if self._pending_size > CALL_CHARACTERS_MAX:
            raise NotACall
        return taken

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it.

        :raises AnswerEnded: there is none.
        """
        while self.at == len(self.buffer):
            if self._ended:
                raise AnswerEnded
            yield
        return self.buffer[self.at]

    def starts_with(self, text: str) -> Generator[None, None, bool]:
        """Read *text* if it comes next; return whether it does."""
        while True:
            found = self.buffer[self.at : self.at + len(text)]
            if found == text:
                self.take(len(text))
                return True
            if self._ended or not text.startswith(found):
                return False
            yield

    def expect(self, text: str) -> Reading:
        """Read *text*.

        :raises NotACall: another text comes next.
        """
        if not (yield from self.starts_with(text)):
            raise NotACall

    def space(self) -> Reading:
        yield from self.run(_SPACE)

    def run(
        self, pattern: re.Pattern[str], pass_on: Callable[[str], None] | None = None
    ) -> Generator[None, None, str]:
        """Read and return the characters that *pattern*, a repeated class of characters, matches;
        *pass_on* gets them as they arrive.

        :raises AnswerEnded: the answer ends with them.
        """
        read = []
        while True:
            found = pattern.match(self.buffer, self.at)
            size = 0 if found is None else found.end() - self.at
            if size:
                read.append(self.take(size))
                if pass_on is not None:
                    pass_on(read[-1])
            if self.at < len(self.buffer):
                return "".join(read)
            yield from self.peek()

    def until(self, mark: str) -> Generator[None, None, str]:
        """Read and return the text up to *mark*, which is read too.

        :raises AnswerEnded: the mark does not come.
        """
        read = []
        while True:
            end = self.buffer.find(mark, self.at)
            if end >= 0:
                read.append(self.take(end - self.at))
                self.take(len(mark))
                return "".join(read)
            read.append(self.take(len(self.buffer) - self._partial_mark((mark,)) - self.at))
            if self._ended:
                raise AnswerEnded
            yield


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


_REASONING_BEGIN, _REASONING_END = "<think>", "</think>"


class ParsedText(NamedTuple):
    """Text that is not part of a call, and parts of calls."""

    text: str
    parts: list[ToolCallPart]


class ToolCallParser:
    """Parses one answer as it arrives; results do not depend on how it is cut into pieces.

    Text that does not continue as a call stays text. In a block of reasoning at the beginning,
    which the prompt may have opened (*opens_reasoning*), nothing is a call.
    """

    def __init__(
        self,
        form: ToolFormat,
        functions: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[int], str],
        *,
        calls_max: int = ANSWER_CALLS_MAX,
        opened: bool = False,
        opens_reasoning: bool = False,
    ):
        self._source = AnswerSource()
        reader = CallReader(self._source, functions, new_id)
        answer = AnswerReader(reader, calls_max, opened=opened)
        self._reading = self._read(answer.read(form), opens_reasoning=opens_reasoning)
        next(self._reading)

    def parse(self, text: str) -> ParsedText:
        """Return the text and the parts of calls that *text*, the next piece, completes."""
        if not text:
            return ParsedText("", [])
        self._source.add_text(text)
        next(self._reading)
        return self._take()

    def finish(self) -> ParsedText:
        self._source.end()
        next(self._reading)
        return self._take()

    def _take(self) -> ParsedText:
        return ParsedText(self._source.take_text(), merge_parts(self._source.take_parts()))

    def _read(self, answer: Reading, *, opens_reasoning: bool) -> Reading:
        source = self._source
        try:
            yield from self._reasoning(opened=opens_reasoning)
            yield from answer
        except AnswerEnded:
            source.pass_pending()
            source.pass_rest()
        yield

    def _reasoning(self, *, opened: bool) -> Reading:
        """Pass a block of reasoning at the beginning."""
        source = self._source
        if not opened:
            with source.possible_call():
                yield from source.space()
                yield from source.expect(_REASONING_BEGIN)
                opened = True
                source.pass_pending()
        if opened:
            yield from source.text_until(_REASONING_END)
            source.pass_pending()
