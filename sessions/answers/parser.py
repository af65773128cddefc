"""The parser of one answer: its text, its reasoning, and its tool calls in parts, as they arrive.

The form of the model's answers, which is data, says which marks stand around them. Generators read
the answer; see `source`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...backends.answer_form import (
    PLAIN_ANSWERS,
    AnswerForm,
    ArgumentsForm,
    Block,
    CallForm,
    is_strong,
)
from ...backends.tool_formats import FUNCTION_NAME_CHARACTERS_MAX
from .calls import ANSWER_CALLS_MAX, ToolCallPart, decode_object, json_text, merge_parts
from .source import (
    SHORT_SPACE,
    SPACE,
    SPACE_CHARACTERS_MAX,
    AnswerEnded,
    AnswerSource,
    NotACall,
    Reading,
    common_prefix,
    common_suffix,
)
from .values import (
    LiteralReader,
    inner_text,
    item_schema,
    json_of_text,
    may_be_null,
    may_be_text,
    pass_json,
    property_schema,
    read_string,
)

_SKIPPED_MAX = 64
"""Characters between a name and the arguments that `skips_to_arguments` allows."""
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_ID = re.compile(r"[A-Za-z0-9_-]*")
_ID_CHARACTERS_MAX = 64
_KEY = re.compile(r'[^<>"\n]*')
_KEYWORD = re.compile(r"\w*")
_NAME_KEY, _ARGUMENTS_KEYS, _FUNCTION_KEY = "name", ("arguments", "parameters"), "function"
_OTHER_KEYS = ("type", "id")
_ITEM, _NULLS = "item", ("null", "None")
_EMPTY = {"array": "[]", "object": "{}"}
"""Values in nested tags that have no tags within them."""
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
NO_FUNCTIONS: Mapping[str, Mapping[str, Any]] = {}
_LEVELS_MAX = 16
"""Levels of nested tags."""


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
        self._id = ""
        self._ids = set[str]()
        """The ids that the answer's calls have."""
        self._arguments: list[str] = []

    # Parts.

    def _begin(self) -> None:
        self._name, self._id = None, ""
        self._arguments.clear()

    def _set_name(self, name: str, *, declared: bool) -> None:
        """Set the call's name; with *declared* it must be that of a known function.

        :raises NotACall: this cannot be the name of a function.
        """
        known = name in self.functions
        if not known and (declared or not name or not _NAME.fullmatch(name)):
            raise NotACall
        if self._name is not None or len(name) > FUNCTION_NAME_CHARACTERS_MAX:
            raise NotACall
        self._name = name
        index = self.source.calls
        if not self._id or self._id in self._ids:
            self._id = self._new_id(index)
        arguments = "".join(self._arguments)
        self.source.add_part(ToolCallPart(index, self._id, name, arguments))

    def _add_arguments(self, text: str) -> None:
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

    def _finish(self) -> None:
        """End the call.

        :raises NotACall: it has no name, or its arguments are not an object.
        """
        if self._name is None or decode_object("".join(self._arguments)) is None:
            raise NotACall
        self._ids.add(self._id)
        self.source.end_call()

    # Layouts.

    def read_call(self, form: CallForm, mark: str) -> Reading:
        """Read a call in this *form* after *mark*, one of its marks before calls, or nothing.

        :raises NotACall: there is none.
        """
        self._begin()
        source, begin, name_begin = self.source, form.begin.strip(), form.name_begin.strip()
        yield from source.space()
        begun = mark == begin or mark == name_begin != ""
        if begin and not begun:
            begun = yield from source.starts_with(begin)
            yield from source.space()
        if form.layout == "json":
            yield from self._json_call(form)
        elif form.layout == "keyed":
            yield from self._keyed_call(form)
        else:
            if name_begin and mark != name_begin:
                if form.id_place == "before_name":
                    yield from self._read_id(form)
                yield from source.expect(name_begin)
            elif begin and not begun:
                raise NotACall
            yield from self._named_call(form)

    def _json_call(self, form: CallForm) -> Reading:
        yield from self._members(form, whole=True)
        if not self._arguments and not form.whole:
            self._add_arguments("{}")
        self._finish()

    def _members(self, form: CallForm, *, whole: bool) -> Reading:
        """Read a call's object, or the object in it that has the name and the arguments."""
        source, seen = self.source, set[str]()
        yield from source.expect("{")
        yield from source.space()
        more = not (yield from source.starts_with("}"))
        while more:
            key = yield from read_string(source)
            if key in seen:
                raise NotACall
            seen.add(key)
            yield from source.space()
            yield from source.expect(":")
            yield from source.space()
            yield from self._member(form, key, whole=whole)
            yield from source.space()
            more = yield from source.starts_with(",")
            if more:
                yield from source.space()
            else:
                yield from source.expect("}")

    def _member(self, form: CallForm, key: str, *, whole: bool) -> Reading:
        path = form.name_key.split(".")
        wraps = key == _FUNCTION_KEY or (len(path) > 1 and key == path[0])
        if whole and wraps and (yield from self.source.comes("{")):
            yield from self._members(form, whole=False)
        elif key in (_NAME_KEY, path[-1]):
            name = yield from read_string(self.source)
            self._set_name(name, declared=form.declared)
        elif key in (*_ARGUMENTS_KEYS, form.arguments_key.split(".")[-1]):
            if self._arguments:
                raise NotACall
            yield from self._arguments_value()
        elif key in (*_OTHER_KEYS, form.id_key, *form.key_order, *form.constants) or (
            not form.whole
        ):
            yield from pass_json(self.source, lambda _: None)
        else:
            raise NotACall

    def _keyed_call(self, form: CallForm) -> Reading:
        source = self.source
        yield from source.expect("{")
        yield from source.space()
        name = yield from read_string(source)
        self._set_name(name, declared=form.declared)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        yield from self._arguments_value()
        yield from source.space()
        yield from source.expect("}")
        self._finish()

    def _arguments_value(self) -> Reading:
        """Read the arguments, as an object or as a text with its JSON."""
        if (yield from self.source.peek()) == '"':
            text = yield from read_string(self.source)
            if decode_object(text) is None:
                raise NotACall
            self._add_arguments(text)
        else:
            yield from pass_json(self.source, self._add_arguments)

    def _named_call(self, form: CallForm) -> Reading:
        """Read the rest of a call from its name on."""
        source, arguments = self.source, form.arguments
        name = yield from source.run(_NAME)
        if form.id_place == "after_name":
            yield from self._read_id(form)
        begin = arguments.begin.replace("{name}", name).strip()
        if form.skips_to_arguments:
            yield from self._skip_to(begin)
        elif form.name_end.strip():
            yield from source.space()
            yield from source.expect(form.name_end.strip())
        elif form.name_end and not (yield from source.run(SPACE)):
            raise NotACall
        yield from source.space()
        begun = begin != "" and (yield from source.starts_with(begin))
        yield from source.space()
        object_follows = (yield from source.peek()) == "{"
        if not object_follows and arguments.encoding == "json":
            raise NotACall
        if begin and not begun and (self._id or not object_follows):
            raise NotACall
        self._set_name(name, declared=form.declared)
        if arguments.encoding == "python":
            yield from self._keywords(arguments)
        elif arguments.encoding == "tagged" and not (object_follows and not begun):
            yield from self._tags(form, self.functions.get(name, {}))
        elif arguments.quote or arguments.bare_keys:
            yield from LiteralReader(source, self._add_arguments, arguments.quote).read()
        else:
            yield from pass_json(source, self._add_arguments)
        self._finish()

    def _read_id(self, form: CallForm) -> Reading:
        """Read the call's id, if there is one."""
        source, begin = self.source, form.id_begin.strip()
        yield from source.space()
        if begin and not (yield from source.starts_with(begin)):
            return
        yield from source.space()
        found = yield from source.run(_ID)
        if not form.id_index and len(found) <= _ID_CHARACTERS_MAX:
            self._id = found

    def _skip_to(self, begin: str) -> Reading:
        """Read a few characters up to *begin*, which stays."""
        source, most = self.source, _SKIPPED_MAX + len(begin)
        while True:
            rest = source.buffer[source.at : source.at + most]
            place = rest.find(begin)
            if place >= 0 and "\n" not in rest[:place]:
                source.take(place)
                return
            if "\n" in rest or len(rest) == most:
                raise NotACall
            if source.ended:
                raise AnswerEnded
            yield

    # Arguments in other encodings.

    def _keywords(self, form: ArgumentsForm) -> Reading:
        """Read `key=value, …` up to the arguments' end."""
        source, end, opening = self.source, form.end.strip(), "{"
        reader = LiteralReader(source, self._add_arguments, form.quote)
        while not (yield from source.starts_with(end)):
            key = yield from source.run(_KEYWORD)
            yield from source.space()
            yield from source.expect("=")
            yield from source.space()
            if not key:
                raise NotACall
            self._add_arguments(f"{opening}{json_text(key)}: ")
            yield from reader.read()
            opening = ", "
            yield from source.space()
            if not (yield from source.starts_with(",")):
                yield from source.expect(end)
                break
            yield from source.space()
        self._add_arguments("{}" if opening == "{" else "}")

    def _tags(self, form: CallForm, schema: Mapping[str, Any]) -> Reading:
        """Read arguments in tags up to the end of the call."""
        source, arguments, opening = self.source, form.arguments, "{"
        tags = _TagReader(self, form, schema)
        ends = _pieces(arguments.end, form.end, form.section_end)
        try:
            while not (yield from source.one_of(ends)):
                if not (yield from source.starts_with(tags.key_begin)):
                    if ends:
                        raise NotACall
                    break
                key = yield from tags.read_key()
                self._add_arguments(f"{opening}{json_text(key)}: ")
                yield from tags.read_value(key, property_schema(schema, key, schema), _LEVELS_MAX)
                opening = ", "
                yield from source.space()
        except AnswerEnded:
            if opening == "{" or tags.within or source.cut:
                raise
        self._add_arguments("{}" if opening == "{" else "}")


class _TagReader:
    """Reads arguments in tags for *reader*. *schema* is that of all the call's arguments."""

    def __init__(self, reader: CallReader, form: CallForm, schema: Mapping[str, Any]):
        self._source, self._emit = reader.source, reader._add_arguments
        self._form, self._schema = form.arguments, schema
        self.key_begin = self._form.key_begin.strip()
        self._followers = (self.key_begin, *_pieces(self._form.end, form.end, form.section_end))
        self.within = 0
        """Arguments that have begun and not ended."""
        begin = self._form.value_begin
        space = begin if begin.strip() else self._form.key_end + begin
        self._lead = space[len(space.rstrip()) :]
        self._trail = self._form.value_end[: -len(self._form.value_end.lstrip()) or None]

    def read_key(self) -> Generator[None, None, str]:
        """Read a key up to its end."""
        self.within += 1
        key = yield from self._source.run(_KEY)
        yield from self._source.expect(self._form.key_end.strip())
        return key.strip()

    def read_value(self, key: str, schema: object, levels: int) -> Reading:
        """Read a value of *schema* and its end."""
        source, form = self._source, self._form
        is_text = may_be_text(schema, self._schema)
        if form.nested and schema is None:  # a number is hardly ever a text
            is_text = False
        if form.text_kinds or form.json_kinds:
            yield from source.space()
            kind = yield from source.run(_ID)
            if kind in (*form.text_kinds, *form.json_kinds):
                is_text = kind in form.text_kinds
        if begin := form.value_begin.strip():
            yield from source.space()
            yield from source.expect(begin)
        end = form.value_end.strip().replace("{key}", key)
        if form.nested and levels and (yield from self._has_elements()):
            yield from self._elements(schema, levels - 1)
            yield from source.space()
            yield from source.expect(end)
        elif is_text:
            yield from self._text(end, may_be_null(schema, self._schema))
        else:
            pieces: list[str] = []
            yield from source.text_before(end, self._ends_after(end), pieces.append)
            value = self._without_space("".join(pieces))
            named = schema.get("type") if isinstance(schema, Mapping) else None
            empty = _EMPTY.get(str(named)) if form.nested and not value.strip() else None
            self._emit(empty or json_of_text(value))
        self.within -= 1

    def _ends_after(self, end: str) -> tuple[str, ...]:
        """Return the marks of which one follows the *end* of a value, if they are known."""
        return () if self._form.nested else self._followers

    def _without_space(self, text: str) -> str:
        text = text[common_prefix(text, self._lead) :]
        return text[: len(text) - common_suffix(text, self._trail)]

    def _text(self, end: str, nullable: bool) -> Reading:
        """Read a value that is a text, and emit it as it arrives. It may be null if *nullable*."""
        source, held, at_start, opening = self._source, "", True, '"'

        def pass_on(text: str) -> None:
            nonlocal held, at_start, opening
            text = held + text
            if at_start:
                size = common_prefix(text, self._lead)
                if size == len(text) < len(self._lead):
                    held = text
                    return
                text, at_start = text[size:], False
            shown = text[: max(len(text.rstrip()), len(text) - len(self._trail))]
            undecided = nullable and opening and len(text) <= SPACE_CHARACTERS_MAX
            if undecided and any(word.startswith(text.strip()) for word in _NULLS):
                held = text
                return
            held = text[len(shown) :]
            if shown:
                self._emit(opening + inner_text(shown))
                opening = ""

        if self._form.cdata and (yield from source.starts_with(_CDATA)):
            self._emit(opening)
            yield from source.text_before(_CDATA_END, (), lambda t: self._emit(inner_text(t)))
            yield from source.space()
            yield from source.expect(end)
            self._emit('"')
            return
        yield from source.text_before(end, self._ends_after(end), pass_on)
        if at_start:  # all of it is white space of the marks
            held = ""
        held = held[: len(held) - common_suffix(held, self._trail)]
        is_null = opening and nullable and held in _NULLS
        self._emit("null" if is_null else opening + inner_text(held) + '"')

    def _has_elements(self) -> Generator[None, None, bool]:
        """Return whether tags follow, instead of a value or its end."""
        source = self._source
        while True:  # the white space stays, because it may belong to a text
            space = SHORT_SPACE.match(source.buffer, source.at)
            assert space is not None, "it matches everywhere"
            rest = source.buffer[space.end() :]
            if source.ended or not self.key_begin.startswith(rest):
                after = rest[len(self.key_begin) :]
                return rest.startswith(self.key_begin) and not after.startswith("/")
            yield

    def _elements(self, schema: object, levels: int) -> Reading:
        """Read an object or a list in tags."""
        source, opening, closing = self._source, "{", "}"
        first = True
        while True:
            yield from source.space()
            if (yield from source.comes(self.key_begin + "/")) or not (
                yield from source.starts_with(self.key_begin)
            ):
                break
            key = yield from self.read_key()
            if first and key == _ITEM:
                opening, closing = "[", "]"
            is_list = opening == "["
            self._emit((opening if first else ", ") + ("" if is_list else json_text(key) + ": "))
            first = False
            inner = (
                item_schema(schema, self._schema)
                if is_list
                else property_schema(schema, key, self._schema)
            )
            yield from self.read_value(key, inner, levels)
        if first:
            raise NotACall
        self._emit(closing)


def _pieces(*marks: str) -> tuple[str, ...]:
    """Return the parts of *marks* between white space."""
    return tuple(dict.fromkeys(piece for mark in marks for piece in mark.split()))


class _OpenBlock(NamedTuple):
    """A block that has begun."""

    ends: tuple[str, ...] = ()
    is_reasoning: bool = False


_OUTSIDE = _OpenBlock()


class AnswerReader:
    """Reads an answer in *form* with up to *calls_max* calls; later ones are text. Unless it
    *splits_reasoning*, reasoning is text with its marks.
    """

    def __init__(
        self, form: AnswerForm, reader: CallReader, calls_max: int, *, splits_reasoning: bool
    ):
        self._form, self._reader, self._source = form, reader, reader.source
        self._calls_max, self._splits = calls_max, splits_reasoning
        self._block = _OUTSIDE

    def read(self) -> Reading:
        """Read the answer until all that follows is text.

        :raises AnswerEnded: the answer has ended.
        """
        source = self._source
        yield from self._first_reasoning()
        if self._block.is_reasoning:
            source.holds_space = self._splits and _begins_with_space(self._block.ends)
            self._close((yield from source.text_until(self._block.ends)))
        yield from self._beginning()
        while marks := self._marks():
            calls = self._calls and not self._block.is_reasoning
            source.holds_space = bool(calls) or _begins_with_space(self._block.ends)
            yield from self._read_mark((yield from source.text_until(marks)))
        yield from source.rest()

    @property
    def _calls(self) -> tuple[CallForm, ...]:
        return self._form.calls if self._source.calls < self._calls_max else ()

    def _marks(self) -> tuple[str, ...]:
        """Return the marks that count at this place."""
        blocks = (*self._form.reasoning, *self._form.content)
        begins = [b.begin for b in blocks if b.anywhere and b.begin.strip()]
        triggers = [trigger for call in self._calls for trigger in call.triggers]
        return tuple(dict.fromkeys((*self._block.ends, *begins, *triggers, *self._form.dropped)))

    def _read_mark(self, mark: str) -> Reading:
        """Read on after *mark*, which is pending."""
        form, channels = self._form, {False: self._form.content, True: self._form.reasoning}
        if _named(mark, self._block.ends):
            self._close(mark)
            return
        for is_reasoning, blocks in channels.items():
            found = tuple(b for b in blocks if b.anywhere and b.begin.strip() == mark)
            if found:
                self._open(found, is_reasoning=is_reasoning)
                return
        if dropped := _named(mark, form.dropped):
            self._source.skip_mark(dropped)
            return
        before = self._source.calls
        yield from self._read_calls(mark, [call for call in self._calls if mark in call.triggers])
        if self._source.calls > before and self._block.is_reasoning:
            self._block, self._source.in_reasoning = _OUTSIDE, False

    # Blocks.

    def _first_reasoning(self) -> Reading:
        """Read the beginning of a block of reasoning at the beginning of the answer."""
        blocks = tuple(b for b in self._form.reasoning if b.end.strip() and not b.anywhere)
        if not blocks:
            return
        if unmarked := tuple(b for b in blocks if not b.begin.strip()):
            self._open(unmarked, is_reasoning=True)
            return
        source = self._source
        ends = () if is_plain(self._form) else tuple(b.end for b in blocks)
        begins = tuple(b.begin.strip() for b in blocks)
        with self._possible_call():
            space = yield from self._short_space()
            mark = yield from source.one_of((*begins, *(end.strip() for end in ends)))
            if not mark:
                raise NotACall
            if mark in begins:
                found = tuple(b for b in blocks if b.begin.strip() == mark)
                self._open(found, is_reasoning=True, before=space)
            elif self._splits:  # the end of reasoning without its begin
                source.skip_mark(_named(mark, ends), space)
            else:
                source.pass_pending()

    def _beginning(self) -> Reading:
        """Read calls and marks of content that only count before other content."""
        source = self._source
        whole = [call for call in self._calls if call.whole]
        if whole:
            before = source.calls
            yield from self._read_calls("", whole)
            if source.calls > before:
                return
        blocks = tuple(b for b in self._form.content if not b.anywhere)
        if not blocks:
            return
        with self._possible_call():
            space = yield from self._short_space()
            mark = yield from source.one_of(tuple(b.begin.strip() for b in blocks))
            if not mark:
                raise NotACall
            found = tuple(b for b in blocks if b.begin.strip() == mark)
            self._open(found, is_reasoning=False, before=space)

    def _short_space(self) -> Generator[None, None, str]:
        """Read white space before a block. Longer white space is not held back.

        :raises NotACall: there is more than `SPACE_CHARACTERS_MAX`.
        """
        size = 0

        def count(space: str) -> None:
            nonlocal size
            size += len(space)
            if size > SPACE_CHARACTERS_MAX:
                raise NotACall

        return (yield from self._source.run(SPACE, count))

    @contextmanager
    def _possible_call(self) -> Iterator[None]:
        """Read the pending text again if the block finds that it is not what was sought."""
        try:
            yield
        except NotACall:
            self._source.rewind(0)

    def _open(self, blocks: Sequence[Block], *, is_reasoning: bool, before: str = "") -> None:
        """Begin one of *blocks*, which have the same begin. It is pending, after white space."""
        ends = tuple(block.end for block in blocks if block.end.strip())
        if is_reasoning and not self._splits:
            self._source.pass_pending()
        else:
            self._source.skip_mark(blocks[0].begin, before)
            self._source.in_reasoning = is_reasoning
        self._block = _OpenBlock(ends, is_reasoning)

    def _close(self, mark: str) -> None:
        """End the open block by *mark*, which is pending."""
        if self._block.is_reasoning and not self._splits:
            self._source.pass_pending()
        else:
            self._source.skip_mark(_named(mark, self._block.ends))
        self._block, self._source.in_reasoning = _OUTSIDE, False

    # Calls.

    def _read_calls(self, mark: str, forms: Sequence[CallForm]) -> Reading:
        """Read calls after *mark*, which is pending, in the first of *forms* that they have."""
        source = self._source
        before, size_max = source.calls, 0
        for form in forms:
            is_last = form is forms[-1]
            try:
                yield from self._read_section(form, mark)
                return
            except NotACall:
                size_max = max(size_max, source.pending_size)
                if is_last or source.calls > before:
                    # Text that was read in any form is not read again, however many marks it has.
                    source.extend_pending(size_max)
                    if is_strong(mark):
                        source.pass_failed(mark)
                    else:  # it may be a word
                        source.pass_pending()
                    return
            except AnswerEnded:
                if source.cut and not source.has_announced and is_strong(mark):
                    source.clear_pending()  # the beginning of a call without a name yet
                if is_last or source.calls > before or source.cut:
                    raise
            source.rewind(len(mark))

    def _read_section(self, form: CallForm, mark: str) -> Reading:
        """Read calls, and the marks after them."""
        source, section = self._source, form.section_begin.strip()
        inner, in_list = "" if mark == section else mark, False
        if mark == section and is_strong(form.section_end):
            yield from source.space()
            if (yield from source.starts_with(form.section_end.strip())):
                source.clear_pending()  # a section without calls
                return
        if form.array and mark == section:
            yield from source.space()
            in_list = yield from source.starts_with("[")
        arguments_end = "" if form.arguments.encoding == "python" else form.arguments.end
        ends = _pieces(arguments_end, form.end, form.section_end)
        while True:
            yield from self._reader.read_call(form, inner)
            yield from source.skip_marks(ends)
            if source.calls >= self._calls_max:
                break
            if in_list:
                if not (yield from source.starts_with(",")):
                    break
                inner = ""
            elif (yield from self._next_comes(form)):
                inner = form.begin.strip()
            else:
                source.pass_pending()
                return
        if in_list and (yield from source.starts_with("]")):
            source.clear_pending()
            yield from source.skip_marks(ends)
        source.pass_pending()

    def _next_comes(self, form: CallForm) -> Generator[None, None, bool]:
        """Read up to the next call of the same section, if it begins with no trigger; return
        whether there is one.
        """
        source, begin = self._source, form.begin.strip() or form.name_begin.strip()
        if form.layout == "named":
            if not begin or begin in form.triggers:
                return False
            yield from source.one_of((",", ";"))
            yield from source.space()
            return (yield from source.comes(begin))
        yield from source.one_of((",", ";"))
        yield from source.space()
        return (yield from source.comes("{"))


def is_plain(form: AnswerForm) -> bool:
    """Return whether text and reasoning of an answer in this form, without its calls, tell the
    whole answer.
    """
    plain = PLAIN_ANSWERS
    parts = (form.reasoning, form.content, form.dropped)
    return parts == (plain.reasoning, plain.content, plain.dropped)


def _named(mark: str, marks: Iterable[str]) -> str:
    """Return *mark* with its white space, as it is among *marks*; empty if it is not."""
    return next((found for found in marks if found.strip() == mark), "")


def _begins_with_space(marks: Iterable[str]) -> bool:
    return any(mark[:1].isspace() for mark in marks)


class ParsedText(NamedTuple):
    """Text that is not part of a call, parts of calls, and reasoning."""

    text: str
    parts: list[ToolCallPart]
    reasoning: str = ""


class AnswerParser:
    """Parses one answer in *form* as it arrives; results do not depend on how it is cut into
    pieces. *prompt* is the text before the answer, or its end.

    Text that does not continue as a call stays text, and nothing in a block of reasoning at the
    beginning is a call. Without *reasoning*, reasoning stays in the text with its marks; without
    *finds_calls*, calls do.
    """

    def __init__(
        self,
        form: AnswerForm,
        functions: Mapping[str, Mapping[str, Any]] = NO_FUNCTIONS,
        new_id: Callable[[int], str] = str,
        *,
        calls_max: int = ANSWER_CALLS_MAX,
        prompt: str = "",
        reasoning: bool = False,
        finds_calls: bool = True,
    ):
        self._source, self._form = AnswerSource(), form
        self._source.add_prompt(opened_by(form, prompt))
        self.finds_calls = finds_calls and form.calls != ()
        self.changes_text = (
            self.finds_calls
            or (reasoning and not is_plain(form))
            or bool(form.content or form.dropped)
        )
        """Whether text and reasoning do not tell the whole answer."""
        self.rest_is_text = False
        """Whether all that follows is text."""
        reader = CallReader(self._source, functions, new_id)
        calls_max = calls_max if finds_calls else 0
        answer = AnswerReader(form, reader, calls_max, splits_reasoning=reasoning)
        self._reading = self._read(answer)
        next(self._reading)

    def parse(self, text: str) -> ParsedText:
        """Return the text and the parts of calls that *text*, the next piece, completes."""
        if self.rest_is_text or not text:
            return ParsedText(text, [])
        self._source.add_text(text)
        next(self._reading)
        return self._take()

    def finish(self, *, cut: bool = False) -> ParsedText:
        """Return the rest of an answer that has ended. If a limit has *cut* it, a call that it has
        begun ends with a part of its arguments.
        """
        self._source.end(cut=cut)
        next(self._reading)
        return self._take()

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning that is split off."""
        return self._source.in_reasoning

    @property
    def held(self) -> str:
        """The text that is held back, because it may become a mark."""
        return self._source.unread

    def _take(self) -> ParsedText:
        source = self._source
        parts = merge_parts(source.take_parts())
        return ParsedText(source.take_text(), parts, source.take_reasoning())

    def _read(self, answer: AnswerReader) -> Reading:
        source = self._source
        try:
            yield from answer.read()
        except AnswerEnded:
            source.settle(tuple(filter(is_strong, self._form.marks)))
        self.rest_is_text = True
        while True:
            yield


def opened_by(form: AnswerForm, prompt: str) -> str:
    """Return the mark of *form* with which a prompt ends, and which belongs to the answer."""
    prompt = prompt.rstrip()
    return max((o for o in form.opens if prompt.endswith(o.strip())), key=len, default="")
