"""Structural tags: free text with parts that follow a JSON schema, a grammar or an expression.

They are read in the forms of OpenAI-compatible servers: `structures` with `triggers`, as vLLM and
SGLang define them, and the newer `format` of the type `triggered_tags`, as XGrammar defines it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ..texts import shorten
from .chat_options import read_json
from .fitting import Fitting, without_nulls

__all__ = (
    "StructuralTag",
    "StructuralTags",
    "TagPart",
    "read_structural_tag",
    "structural_tag_text",
)

S = TypeVar("S", bound=msgspec.Struct)
TAGS_MAX = 128
TRIGGERS_MAX = 32
MARK_BYTES_MAX = 1024
"""Bytes of one trigger, begin or end."""
PART_LEVELS_MAX = 64
"""Parts within each other."""
TAGS_BYTES_MAX = 256 << 10
"""Bytes of all tags as JSON: as many as those of `tools`."""
_SHAPE = '{"structures": [{"begin": "<f>", "schema": {…}, "end": "</f>"}], "triggers": ["<f"]}'
_CONTENTS = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}
"""By the type of a tag's content, the field with the content."""


class TagPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a tag's content: a *text*, a value of *schema*, a text that *regex* matches, free
    text up to the mark *until*, or else one of the sequences of *any_of*. If *repeated*, these may
    come several times, or not at all.
    """

    text: str = ""
    schema: dict[str, Any] | bool | None = None
    regex: str = ""
    until: str = ""
    any_of: tuple[tuple[TagPart, ...], ...] = ()
    repeated: bool = False


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constrained part of an answer: *begin*, a content that follows *schema*, *regex*, the GBNF
    *grammar* or *parts*, and *end*. *trigger*, the beginning of *begin*, starts the part.
    """

    begin: str
    end: str
    trigger: str
    schema: dict[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    parts: tuple[TagPart, ...] = ()


class StructuralTags(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Free text in which each trigger starts one of its *tags*.

    With *at_least_one* the answer begins with a tag; with *stop_after_first* it ends after one.
    *opened* is the beginning of the triggers, if the text before the answer already ends with it.

    After a tag, others may follow directly: *more* has the begin of each tag there. *closing*
    stands after the last one. *before* may come before a tag that begins the answer.
    """

    tags: tuple[StructuralTag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False
    opened: str = ""
    more: tuple[str, ...] = ()
    closing: str = ""
    before: tuple[TagPart, ...] = ()


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool | None = None


class _Structures(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


class _Tag(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    content: dict[str, Any]
    type: str = "tag"


class _Triggered(msgspec.Struct, forbid_unknown_fields=True):
    triggers: list[str]
    tags: list[_Tag]
    type: str
    at_least_one: bool = False
    stop_after_first: bool = False


def structural_tag_text(tags: StructuralTags) -> str:
    """Return *tags* as the JSON text that `SamplingParams.structural_tag` holds.

    :raises ValueError: no grammar could be made of *tags*, or their JSON is too long.
    """
    _check_tags(tags)
    text = msgspec.json.encode(tags)
    if len(text) > TAGS_BYTES_MAX:
        raise ValueError(f"{len(text)} bytes of JSON; {TAGS_BYTES_MAX} at most")
    return text.decode()


def read_structural_tag(value: Any) -> str:
    """Return structural tags, given as a map or its JSON text, as the text of `StructuralTags`.
    An empty text means no tags.

    :raises ValueError: *value* has another form, or no grammar could be made of the tags.
    """
    if isinstance(value, str) and not value.strip():
        return ""
    tags = read_json(value, TAGS_BYTES_MAX)
    if not isinstance(tags, Mapping):
        raise ValueError(f"{shorten(value)} is not a map; it has the form {_SHAPE}")
    try:
        return structural_tag_text(_tags_of(tags))
    except msgspec.ValidationError as exc:
        raise ValueError(f"{str(exc).lower()}; it has the form {_SHAPE}") from None


def _tags_of(value: Mapping[str, Any]) -> StructuralTags:
    if "tags" in value and "structures" not in value and "type" not in value:
        return msgspec.convert(value, StructuralTags)
    value = without_nulls(value, 1)
    if "format" not in value:
        plain = _converted(value, _Structures)
        tags = tuple(
            StructuralTag(
                begin=s.begin,
                end=s.end,
                trigger=_trigger_of(s.begin, plain.triggers),
                schema={} if s.schema is None else s.schema,
            )
            for s in plain.structures
        )
        _check_triggers(plain.triggers, tags)
        return StructuralTags(tags=tags)
    form = value["format"]
    kind = form.get("type") if isinstance(form, Mapping) else form
    if kind != "triggered_tags":
        raise ValueError(f"format: the type {shorten(kind)} is not supported; use triggered_tags")
    triggered = _converted(form, _Triggered)
    tags = tuple(_with_content(tag, triggered.triggers) for tag in triggered.tags)
    _check_triggers(triggered.triggers, tags)
    return StructuralTags(
        tags=tags,
        at_least_one=triggered.at_least_one,
        stop_after_first=triggered.stop_after_first,
    )


def _converted(value: Any, kind: type[S]) -> S:
    return msgspec.convert(Fitting(nulls_absent=True).fit(value, kind), kind)


def _with_content(tag: _Tag, triggers: Sequence[str]) -> StructuralTag:
    content = without_nulls(tag.content, 1)
    kind = content.get("type")
    field = _CONTENTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        known = ", ".join(_CONTENTS)
        raise ValueError(f"content: the type {shorten(kind)} is not supported; use {known}")
    value, others = content.get(field), set(content) - {"type", field}
    if others:
        raise ValueError(f"content: {shorten(min(others))} is not supported")
    name = "schema" if kind == "json_schema" else str(kind)
    fields = {"begin": tag.begin, "end": tag.end, "trigger": _trigger_of(tag.begin, triggers)}
    return msgspec.convert({**fields, name: value}, StructuralTag)


def _trigger_of(begin: str, triggers: Sequence[str]) -> str:
    found = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
    if found is None:
        raise ValueError(f"begin {shorten(begin)} starts with none of the triggers")
    return found


def _check_triggers(triggers: Sequence[str], tags: Sequence[StructuralTag]) -> None:
    used = {tag.trigger for tag in tags}
    unused = next((trigger for trigger in triggers if trigger not in used), None)
    if unused is not None:
        raise ValueError(f"trigger {shorten(unused)}: no structure begins with it")


def _check_tags(tags: StructuralTags) -> None:
    if not 1 <= len(tags.tags) <= TAGS_MAX:
        raise ValueError(f"{len(tags.tags)} structures; there are 1 … {TAGS_MAX}")
    for tag in tags.tags:
        _check_tag(tag)
        _check_parts(tag.parts, PART_LEVELS_MAX)
    _check_parts(tags.before, PART_LEVELS_MAX)
    if len(tags.more) not in (0, len(tags.tags)):
        raise ValueError(f"more: {len(tags.more)} texts for {len(tags.tags)} structures")
    for mark in (*tags.more, tags.closing):
        _check_mark("more", mark)
    triggers = sorted({tag.trigger for tag in tags.tags}, key=len)
    if len(triggers) > TRIGGERS_MAX:
        raise ValueError(f"{len(triggers)} triggers; {TRIGGERS_MAX} at most")
    for index, trigger in enumerate(triggers):
        longer = next((other for other in triggers[index + 1 :] if trigger in other), None)
        if longer is not None:
            shown = shorten(longer), shorten(trigger)
            raise ValueError("trigger {} contains {}, which would start first".format(*shown))


def _check_tag(tag: StructuralTag) -> None:
    for name, mark in (("begin", tag.begin), ("end", tag.end), ("trigger", tag.trigger)):
        _check_mark(name, mark)
    if not tag.trigger or not tag.begin.startswith(tag.trigger):
        raise ValueError(f"begin {shorten(tag.begin)} does not start with its trigger")
    contents: tuple[Any, ...] = (tag.schema, tag.regex, tag.grammar, tag.parts or None)
    given = [content for content in contents if content is not None]
    if len(given) != 1 or given == [""]:
        raise ValueError(f"begin {shorten(tag.begin)}: give one of schema, regex and grammar")


def _check_mark(name: str, mark: str) -> None:
    if len(mark.encode("utf-8", "surrogatepass")) > MARK_BYTES_MAX:
        raise ValueError(f"{name}: more than {MARK_BYTES_MAX} bytes")
    if "\0" in mark:
        raise ValueError(f"{name}: it contains a NUL")


def _check_parts(parts: Sequence[TagPart], levels: int) -> None:
    if parts and not levels:
        raise ValueError(f"parts: more than {PART_LEVELS_MAX} within each other")
    for part in parts:
        given = (part.text, part.schema is not None, part.regex, part.until, part.any_of)
        if sum(map(bool, given)) != 1:
            raise ValueError("parts: give one of text, schema, regex, until and any_of")
        _check_mark("text", part.text)
        _check_mark("until", part.until)
        for sequence in part.any_of:
            _check_parts(sequence, levels - 1)
