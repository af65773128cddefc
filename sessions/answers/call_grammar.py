"""The grammar of calls in a form, as structural tags whose contents are made of parts.

Marks are written as the chat template writes them. The arguments follow the function's schema, as
far as their encoding can: a raw text in a tag is any text up to the mark after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...backends.answer_form import AnswerForm, Block, CallForm
from ...backends.params import StructuralTag, TagPart
from .calls import json_text
from .parser import is_plain
from .values import may_be_null, may_be_text, resolve_schema

Parts = tuple[TagPart, ...]
NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}
_LEVELS_MAX = 8
"""Levels of objects whose encoding is not JSON; deeper ones are any JSON."""
_VALUES_MAX = 8192
"""Values of arguments in the grammar of all calls, so that making it takes well under a second.
Schemas that refer to themselves, and optional arguments, are written several times.
"""
_ID_REGEX, _INDEX_REGEX = "[a-zA-Z0-9]{9}", "[0-9]{1,3}"
_KEY_REGEX = "[a-zA-Z0-9_-]{1,64}"
_PYTHON_STRING = r"([^'\\\n]|\\[\\'nt])*"
_ITEM = "item"
_DEFINITIONS = ("$defs", "definitions")


class CallTag(NamedTuple):
    """The tag of a function's calls, and its begin after another call."""

    tag: StructuralTag
    again: str


def text(value: str) -> Parts:
    """Return the part of a fixed text, or none if it is empty."""
    return (TagPart(text=value),) if value else ()


def until(mark: str) -> Parts:
    """Return the part of free text up to *mark*. White space before the mark is free text."""
    bare = mark.strip()
    return (TagPart(until=bare), *text(mark[len(mark.rstrip()) :]))


def one_of(*sequences: Parts) -> Parts:
    """Return the part of one of several sequences."""
    return (TagPart(any_of=sequences),)


def call_tags(
    form: AnswerForm, call: CallForm, functions: Mapping[str, dict[str, Any]]
) -> list[CallTag]:
    """Return the tags of the calls of *functions*, whose schemas are given by their names.

    :raises ValueError: the arguments have too many values.
    """
    budget = iter(range(_VALUES_MAX))
    return [_call_tag(form, call, *function, budget) for function in functions.items()]


def closing_of(call: CallForm) -> str:
    """Return the text after the last call of a section."""
    closing = f"{']' if call.array else ''}{call.section_end}"
    return closing.rstrip() if closing.strip() else ""


def before_calls(form: AnswerForm, opened: str, *, thinks: bool = True) -> Parts:
    """Return the reasoning that may come before a required call. *opened* is the mark with which
    the prompt ends. If the model does not *think*, there is none that the prompt has not begun.
    """
    blocks = [block for block in form.reasoning if block.end.strip()]
    begun = [b for b in blocks if opened and b.begin.strip() == opened.strip()]
    if begun or any(not block.begin.strip() for block in blocks):
        return until((begun or blocks)[0].end)
    opens_other = opened and opened not in form.dropped
    # Of a plain form, the model may not reason at all.
    if not (blocks and thinks) or opens_other or is_plain(form):
        return ()
    return one_of(_whole_block(form, blocks[0], opened), ())


def _whole_block(form: AnswerForm, block: Block, opened: str) -> Parts:
    """Return a block of reasoning, in a form with channels with the mark of the next channel."""
    again = opened if block.anywhere and opened in form.dropped else ""
    return (*text(block.begin.lstrip()), *until(block.end), *text(again))


def _call_tag(
    form: AnswerForm, call: CallForm, name: str, schema: dict[str, Any], budget: Iterator[int]
) -> CallTag:
    inner = list(_call_parts(call, name, schema, budget))
    outer = f"{call.section_begin}{'[' if call.array else ''}".lstrip()
    begin, *rest = _merged((*text(call.begin if outer else call.begin.lstrip()), *inner))
    assert begin.text, "a call begins with a mark or a bracket"
    end = rest.pop().text if rest and rest[-1].text else ""
    separator = call.separator or (", " if call.array else "")
    if not closing_of(call):
        bare = end.rstrip()
        separator, end = end[len(bare) :] + separator, bare
    whole = outer + begin.text
    mark = next(iter(call.triggers), whole)
    is_content = any(block.begin.lstrip().startswith(mark) for block in form.content)
    tag = StructuralTag(begin=whole, end=end, trigger=whole if is_content else mark)
    again = separator + begin.text
    if len(rest) == 1 and rest[0].schema is not None:
        return CallTag(_replace(tag, schema=rest[0].schema), again)
    return CallTag(_replace(tag, parts=tuple(rest) or one_of(())), again)


def _replace(tag: StructuralTag, **fields: Any) -> StructuralTag:
    return StructuralTag(begin=tag.begin, end=tag.end, trigger=tag.trigger, **fields)


def _merged(parts: Iterable[TagPart]) -> list[TagPart]:
    """Return *parts* with texts that follow each other joined."""
    merged: list[TagPart] = []
    for part in parts:
        if part.text and merged and merged[-1].text:
            merged[-1] = TagPart(text=merged[-1].text + part.text)
        else:
            merged.append(part)
    return merged


def _call_parts(
    call: CallForm, name: str, schema: dict[str, Any], budget: Iterator[int]
) -> Iterator[TagPart]:
    """Yield the parts of a call after its begin, with its end."""
    if call.layout == "keyed":
        yield from text(f"{{{json_text(name)}: ")
        yield TagPart(schema=schema)
        yield from text("}")
    elif call.layout == "json":
        yield from _object_parts(call, name, schema)
    else:
        if call.id_place == "before_name":
            yield from _id_parts(call)
        yield from text(call.name_begin + name)
        if call.id_place == "after_name" and call.id_begin:
            yield from _id_parts(call)
        yield from text(call.name_end + call.arguments.begin.replace("{name}", name))
        arguments = _Arguments(call, schema, budget)
        if arguments.is_unknown and call.arguments.nested and call.end.strip():
            yield from until(call.arguments.end + call.end)
            return
        yield from arguments.parts()
        yield from text(call.arguments.end)
    yield from text(call.end)


def _id_parts(call: CallForm) -> Iterator[TagPart]:
    yield from text(call.id_begin)
    yield TagPart(regex=_INDEX_REGEX if call.id_index else _ID_REGEX)


def _object_parts(call: CallForm, name: str, schema: dict[str, Any]) -> Iterator[TagPart]:
    """Yield the parts of a call that is a JSON object."""
    path, arguments_key = call.name_key.split("."), call.arguments_key.split(".")[-1]
    inner: list[TagPart] = []
    keys = call.key_order or (path[0], *((arguments_key,) if len(path) == 1 else ()))
    for number, key in enumerate(keys):
        inner += text(f"{', ' if number else ''}{json_text(key)}: ")
        if key == path[0] and len(path) > 1:
            inner += text(f'{{"{path[-1]}": {json_text(name)}, "{arguments_key}": ')
            inner += [TagPart(schema=schema), *text("}")]
        elif key == path[0]:
            inner += text(json_text(name))
        elif key == arguments_key:
            inner.append(TagPart(schema=schema))
        elif key == call.id_key:
            inner += [*text('"'), *_id_parts(call), *text('"')]
        else:
            inner += text(json_text(call.constants.get(key, "")))
    yield from text("{")
    yield from inner
    yield from text("}")


class _Arguments:
    """The arguments of one function in the encoding of a form of calls. Each value takes one item
    of *budget*, which all functions share.
    """

    def __init__(self, call: CallForm, schema: dict[str, Any], budget: Iterator[int]):
        self._call, self._form, self._root = call, call.arguments, schema
        self._budget = budget

    def _count_value(self) -> None:
        if next(self._budget, None) is None:
            raise ValueError(f"more than {_VALUES_MAX} values of arguments")

    @property
    def is_unknown(self) -> bool:
        """Whether the schema names no arguments and allows some."""
        schema = self._root
        return not self._properties(schema) and schema.get("additionalProperties") is not False

    def parts(self) -> Parts:
        """Return the parts of all arguments."""
        form, schema = self._form, self._root
        if form.encoding == "json" and not (form.quote or form.bare_keys):
            return (TagPart(schema=schema),)
        if self.is_unknown:
            return self._free()
        if form.encoding == "tagged":
            return self._tags(schema, _LEVELS_MAX)
        if form.encoding == "python":
            return self._list(schema, ", ", self._keyword)
        return self._quoted_object(schema, _LEVELS_MAX)

    def _free(self) -> Parts:
        """Return arguments of a function without known parameters."""
        form = self._form
        if form.encoding == "tagged" and not form.nested:
            kinds = (*form.text_kinds, *form.json_kinds)
            kind = one_of(*map(text, kinds)) if kinds else ()
            argument = (
                *text(form.key_begin),
                TagPart(regex=_KEY_REGEX),
                *(*text(form.key_end), *kind, *text(form.value_begin), *until(form.value_end)),
            )
            return (TagPart(any_of=(argument,), repeated=True),)
        if form.encoding == "python":
            argument = (TagPart(regex=_KEY_REGEX), *text("="), *self._python({}))
            more = TagPart(any_of=((*text(", "), *argument),), repeated=True)
            return one_of((*argument, more), ())
        return self._quoted_object({}, _LEVELS_MAX)

    # Schemas.

    def _properties(self, schema: object) -> Mapping[str, Any]:
        found = schema.get("properties") if isinstance(schema, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def _arguments(self, schema: object) -> list[tuple[str, object, bool]]:
        """Return the properties of an object with their schemas: those required come first."""
        required = schema.get("required") if isinstance(schema, Mapping) else None
        names = set(required) if isinstance(required, list) else set()
        found = [
            (key, resolve_schema(value, self._root), key in names)
            for key, value in self._properties(schema).items()
        ]
        return sorted(found, key=lambda argument: not argument[2])

    def _json(self, schema: object) -> TagPart:
        """Return a JSON value, with the definitions to which its schema may refer."""
        if not isinstance(schema, Mapping):
            return TagPart(schema={})
        shared = {k: v for k, v in self._root.items() if k in _DEFINITIONS}
        return TagPart(schema={**schema, **shared})

    def _list(
        self,
        schema: object,
        separator: str,
        written: Callable[[str, object], Parts],
    ) -> Parts:
        """Return arguments with a *separator* between them."""
        found, arguments = tuple[TagPart, ...](), self._arguments(schema)
        for number, (key, value, required) in reversed(list(enumerate(arguments))):
            if required:
                found = (*(text(separator) if number else ()), *written(key, value), *found)
            elif any(needed for *_, needed in arguments):
                found = (*one_of((*text(separator), *written(key, value)), ()), *found)
        if arguments and not any(required for *_, required in arguments):
            return self._optional_list(arguments, separator, written)
        return found

    def _optional_list(
        self,
        arguments: Sequence[tuple[str, object, bool]],
        separator: str,
        written: Callable[[str, object], Parts],
    ) -> Parts:
        """Return arguments of which none is required: one of them is the first."""
        sequences: list[Parts] = [()]
        for number, (key, value, _) in enumerate(arguments):
            rest = [
                part
                for other, schema, _ in arguments[number + 1 :]
                for part in one_of((*text(separator), *written(other, schema)), ())
            ]
            sequences.append((*written(key, value), *rest))
        return one_of(*sequences)

    # Tags.

    def _tags(self, schema: object, levels: int) -> Parts:
        parts: list[TagPart] = []
        for key, value, required in self._arguments(schema):
            argument = self._tag(key, value, levels)
            parts += argument if required else one_of(argument, ())
        return tuple(parts)

    def _tag(self, key: str, schema: object, levels: int) -> Parts:
        self._count_value()
        form, is_text = self._form, may_be_text(schema, self._root)
        kind = ""
        if form.text_kinds or form.json_kinds:
            kind = self._kind(schema, is_text=is_text)
        end = form.value_end.replace("{key}", key)
        return (
            *text(f"{form.key_begin}{key}{form.key_end}{kind}{form.value_begin}"),
            *self._tag_value(schema, end, levels, is_text=is_text),
        )

    def _kind(self, schema: object, *, is_text: bool) -> str:
        form = self._form
        if is_text or not form.json_kinds:
            return next(iter(form.text_kinds), "")
        named = str(schema.get("type", "")) if isinstance(schema, Mapping) else ""
        named = "number" if named == "integer" else named
        return named if named in form.json_kinds else form.json_kinds[0]

    def _tag_value(self, schema: object, end: str, levels: int, *, is_text: bool) -> Parts:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if is_text:
            values = schema.get("enum") if isinstance(schema, Mapping) else None
            if isinstance(values, list) and all(isinstance(v, str) and v for v in values):
                return (*one_of(*map(text, values)), *text(end))
            return until(end)
        if self._form.nested and levels and kind == "object" and self._properties(schema):
            return (*self._tags(schema, levels - 1), *text(end))
        if self._form.nested and levels and kind == "array" and isinstance(schema, Mapping):
            items = resolve_schema(schema.get("items"), self._root)
            item = self._tag(_ITEM, items, levels - 1)
            return (TagPart(any_of=(item,), repeated=True), *text(end))
        return (self._json(schema), *text(end))

    # Python.

    def _keyword(self, key: str, schema: object) -> Parts:
        self._count_value()
        return (*text(f"{key}="), *self._python(schema))

    def _python(self, schema: object) -> Parts:
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        values = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return one_of(*(text(_python_text(value)) for value in values))
        string = (*text("'"), TagPart(regex=_PYTHON_STRING), *text("'"))
        if may_be_text(schema, self._root):
            others = [text("None")] if may_be_null(schema, self._root) else []
            return one_of(string, *others) if others else string
        if kind == "boolean":
            return one_of(text("True"), text("False"))
        return text("None") if kind == "null" else (self._json(schema),)

    # Objects with other quotes.

    def _quoted_object(self, schema: object, levels: int) -> Parts:
        def member(key: str, value: object) -> Parts:
            quote = "" if self._form.bare_keys else self._form.quote
            return (*text(f"{quote}{key}{quote}:"), *self._quoted(value, levels - 1))

        if self._properties(schema):
            return (*text("{"), *self._list(schema, ",", member), *text("}"))
        if isinstance(schema, Mapping) and schema.get("additionalProperties") is False:
            return text("{}")
        key = (TagPart(regex=_KEY_REGEX), *text(":"))
        any_value = one_of(
            self._string(), (TagPart(schema={"type": ["number", "boolean", "null"]}),)
        )
        more = TagPart(any_of=((*text(","), *key, *any_value),), repeated=True)
        return (*text("{"), *one_of((*key, *any_value, more), ()), *text("}"))

    def _string(self) -> Parts:
        return (*text(self._form.quote), TagPart(until=self._form.quote))

    def _quoted(self, schema: object, levels: int) -> Parts:
        self._count_value()
        if not isinstance(schema, Mapping) or not levels:
            return one_of(
                self._string(), (TagPart(schema={"type": ["number", "boolean", "null"]}),)
            )
        kind, values, quote = schema.get("type"), schema.get("enum"), self._form.quote
        if isinstance(values, list) and all(isinstance(value, str) for value in values):
            return one_of(*(text(f"{quote}{value}{quote}") for value in values))
        if may_be_text(schema, self._root):
            return self._string()
        if kind == "object":
            return self._quoted_object(schema, levels)
        if kind == "array":
            item = self._quoted(resolve_schema(schema.get("items"), self._root), levels - 1)
            more = TagPart(any_of=((*text(","), *item),), repeated=True)
            return (*text("["), *one_of((*item, more), ()), *text("]"))
        return (self._json(schema),)


def _python_text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"
