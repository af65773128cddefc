"""Errors in JSON schemas: keywords whose values are malformed, references to nothing, the keyword
that causes a schema's refusal, which llguidance's errors do not name, and the constraints that no
grammar keeps, which `schema-lenient` leaves out.
"""

from __future__ import annotations

import re
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ...errors import InvalidArgument
from ...params.json_texts import PATH_CHARACTERS_MAX, escaped_name
from ...params.reading import nearest
from ...texts import shorten
from .document import Keyword, Schema, keywords_of, resolve, schema_refusal, schemas_of
from .rewriting import unkept_keywords

__all__ = (
    "Compiles",
    "DROPPED_MAX",
    "check_keywords",
    "leave_out_constraints",
    "refusal_of",
    "refused_keyword",
    "removable_keywords",
)


_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_ANCHORS = ("$anchor", "$dynamicAnchor", "$id", "id")
"""Keywords that name a schema; older drafts write an anchor as an id."""
_BOOLEAN_BOUNDS = "draft-04"
"""The draft in which `exclusiveMinimum` is a boolean."""
_HINT = "correct it"
_TYPES_HINT = f"types are {', '.join(_TYPES)}; leave `type` out for values of any type"


def check_keywords(document: Schema) -> None:
    """Check the values of all keywords that are not annotations, the patterns, and the references.

    Unlike a constraint that no grammar keeps, an error in a schema is never left out.

    :raises InvalidArgument: a value is malformed, or nothing is where a reference points to.
    """
    anchors = _Anchors(document)
    for keyword in _all_keywords(document):
        value = keyword.schema[keyword.keyword]
        if keyword.keyword == "type":
            _check_type(keyword.path, value)
        elif form := _form_of(keyword.keyword, value, str(document.get("$schema"))):
            _check_form(form, keyword.path, value)
        if keyword.keyword == "pattern":
            _check_pattern(keyword.path, value)
        elif keyword.keyword == "patternProperties":
            for pattern in value:
                _check_pattern(f"{keyword.path}/{escaped_name(pattern)}", pattern)
        elif keyword.keyword == "$ref" and not anchors.has_target(value):
            raise schema_refusal(
                keyword.path,
                f"nothing is at {shorten(value)}",
                "define it, or correct the reference",
            )


def _check_type(path: str, value: object) -> None:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise schema_refusal(path, "it names no type", _TYPES_HINT)
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            question = nearest(name, _TYPES) if isinstance(name, str) else ""
            cause = f"{shorten(name)} is not a type"
            raise schema_refusal(path, f"{cause}; {question}" if question else cause, _TYPES_HINT)


class _Anchors:
    """The places in a document to which references may point."""

    def __init__(self, document: Schema):
        self._document, schemas = document, schemas_of(document)
        names = (schema.get(keyword) for schema in schemas for keyword in _ANCHORS)
        self._names = {str(name).rpartition("#")[2] for name in names}
        bases = (s for s in schemas[1:] if isinstance(s.get("$id", s.get("id")), str))
        self._roots = [document, *bases]

    def has_target(self, reference: str) -> bool:
        """Return whether a reference has a target, which is certain for other documents."""
        if reference in ("", "#") or not reference.startswith("#"):
            return True
        if not reference.startswith("#/"):
            return reference[1:] in self._names
        # Within a schema with an id of its own, references start at that schema.
        found = (resolve(root, reference) for root in self._roots)
        return any(isinstance(target, dict | bool) for target in found)


def _all_keywords(document: Schema) -> Iterator[Keyword]:
    """Yield the keywords of *document*, and of schemas elsewhere in it that references name."""
    seen = set[int]()
    waiting: list[tuple[Schema, str]] = [(document, "#")]
    while waiting:
        schema, path = waiting.pop()
        if id(schema) in seen:
            continue
        seen.update(map(id, schemas_of(schema)))
        for keyword in keywords_of(schema):
            yield Keyword(keyword.schema, keyword.keyword, path + keyword.path[1:])
            if keyword.keyword == "$ref":
                target = resolve(document, keyword.schema["$ref"])
                if isinstance(target, dict):
                    waiting.append((target, keyword.schema["$ref"]))


def _is_schema(value: object) -> bool:
    return isinstance(value, dict | bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


class _Form(NamedTuple):
    """The form of a value: one that passes a *test*, or a *container* of such items."""

    test: Callable[[Any], bool]
    words: str
    """The name of such a value or item in messages."""
    container: type[list[Any]] | type[dict[str, Any]] | None = None
    least: int = 0
    """The minimum number of items."""


def _check_form(form: _Form, path: str, value: Any) -> None:
    items: dict[str, Any] = {path: value}
    if form.container is not None:
        if not isinstance(value, form.container) or len(value) < form.least:
            kind = "an object" if form.container is dict else "a list"
            more = f" with at least {form.least} item" if form.least else ""
            raise schema_refusal(path, f"{shorten(value)} is not {kind}{more}", _HINT)
        named = value.items() if isinstance(value, dict) else enumerate(value)
        items = {f"{path}/{escaped_name(str(name))}": item for name, item in named}
    for at, item in items.items():
        if not form.test(item):
            raise schema_refusal(at, f"{shorten(item)} is not {form.words}", _HINT)


_SCHEMA = _Form(_is_schema, "a schema, which is an object or a boolean")
_SCHEMAS = _SCHEMA._replace(container=list)
_SCHEMA_MAP = _SCHEMA._replace(container=dict)
_NUMBER, _TEXT = _Form(_is_number, "a number"), _Form(_is_text, "a text")
_COUNT = _Form(_is_count, "a whole number of at least 0")
_FORMS: dict[str, _Form] = {
    **dict.fromkeys(("additionalItems", "additionalProperties", "contains", "else", "if"), _SCHEMA),
    **dict.fromkeys(("items", "not", "propertyNames", "then"), _SCHEMA),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _SCHEMA),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS._replace(least=1)),
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas"), _SCHEMA_MAP),
    **dict.fromkeys(("patternProperties", "properties"), _SCHEMA_MAP),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef", "format", "pattern"), _TEXT),
    "enum": _Form(lambda _: True, "", list),
    "multipleOf": _Form(lambda value: _is_number(value) and value > 0, "a number above 0"),
    "required": _Form(_is_text, "the name of a property", list),
    "uniqueItems": _Form(lambda value: isinstance(value, bool), "true or false"),
    "dependentRequired": _Form(_are_names, "a list of names", dict),
    "dependencies": _Form(
        lambda value: _is_schema(value) or _are_names(value), "a schema or a list of names", dict
    ),
}
"""The forms of the keywords of draft 2020-12, and of those of older drafts that are read."""


def _form_of(keyword: str, value: object, draft: str) -> _Form | None:
    """Return the form that *value* must have; None for annotations."""
    if keyword == "items" and isinstance(value, list):
        return _SCHEMAS
    if keyword.startswith("exclusive") and isinstance(value, bool) and _BOOLEAN_BOUNDS in draft:
        return None
    return _FORMS.get(keyword)


_CONSTRUCTS = re.compile(
    r"\\(?:u\{[0-9a-fA-F]+\}|[pP]\{[\w=]+\}|k<\w+>|[1-9][0-9]*|[dDsSwW]-|.)"
    r"|-\\[dDsSwW]|\[\^?\]|\(\?<[=!]?",
    re.DOTALL,
)
"""Constructs of ECMA-262 that Python reads otherwise, and escapes."""


def _check_pattern(path: str, pattern: str) -> None:
    """Check the syntax of a regular expression of ECMA-262, by Python's parser. llguidance does not
    notice brackets that only those around its own copy of the pattern close.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of constructs that a later Python may read otherwise
        try:
            re.compile(_CONSTRUCTS.sub(_in_python, pattern))
        except re.error as exc:
            cause = f"{shorten(pattern)} is not a regular expression: {exc.msg}"
            raise schema_refusal(path, cause, _HINT) from None
        except OverflowError:
            return  # a number of repetitions


def _in_python(construct: re.Match[str]) -> str:
    """Return a construct that Python reads as a similar one that it reads as ECMA-262 does."""
    text = construct[0]
    match text[0], text[1]:
        case "[", _:
            return "[^a]"
        case "(", _:
            return {"(?<=": "(?=", "(?<!": "(?!"}.get(text, "(?P<")
        case "-", _:
            return rf"\-{text[1:]}"
        case _, "d" | "D" | "s" | "S" | "w" | "W":
            return rf"{text[:2]}\-" if text[2:] else text
        case _, second if (second.isalnum() and second not in "0bBnrtfvux") or len(text) > 2:
            return "a"
    return text


Compiles = Callable[[Schema], bool]

_NEVER_REMOVED = ("$defs", "definitions", "$schema", "$id", "$anchor")
"""Removing them would make references fail."""
_OVERLAP = "its alternatives may overlap; anyOf allows that"
_ORDER = {"type": 1, "$ref": 2} | dict.fromkeys(
    ("properties", "patternProperties", "items", "prefixItems", "allOf", "anyOf"), 3
)


def refusal_of(document: Schema, cause: str, compiles: Compiles) -> InvalidArgument:
    """Return the error for *document*, which does not compile because of *cause*."""
    unkept = unkept_keywords(document)
    if unkept:
        cause = _OVERLAP if unkept[0].keyword == "oneOf" else "it is not supported"
        return schema_refusal(unkept[0].path, cause)
    removable = removable_keywords(document)
    index = refused_keyword(document, removable, compiles)
    cause = "it is not supported" if cause.startswith("Unimplemented keys") else cause
    return schema_refusal("#" if index is None else removable[index].path, cause)


def removable_keywords(document: Schema) -> list[Keyword]:
    """Return the keywords in the order in which they are removed."""
    removable = [k for k in keywords_of(document) if k.keyword not in _NEVER_REMOVED]
    return sorted(removable, key=_rank)


def refused_keyword(
    document: Schema, removable: Sequence[Keyword], compiles: Compiles
) -> int | None:
    """Return the index of a keyword that is refused in *document*, which does not compile.

    Keywords are removed in order until the rest compiles: the last one removed is refused. A binary
    search finds it, so that *compiles* is called only a few times. Return None if no removal helps.
    """

    def compiles_without(count: int) -> bool:
        before = [(keyword.schema, dict(keyword.schema)) for keyword in removable[:count]]
        for keyword in removable[:count]:
            del keyword.schema[keyword.keyword]
        try:
            return compiles(document)
        finally:
            for schema, keywords in before:  # in their order, which is that of the answers
                schema.clear()
                schema |= keywords

    count = bisect_left(range(len(removable) + 1), True, key=compiles_without)
    return count - 1 if 0 < count <= len(removable) else None


def _rank(keyword: Keyword) -> int:
    """Return the order of removal: keywords that narrow values of one type are removed first."""
    return _ORDER.get(keyword.keyword, 0)


DROPPED_MAX = 100
SEARCH_S_MAX = 0.5
"""CPU time after which no further keyword is searched for. A search in the largest schemas takes up
to a second on slow machines, and the process may take two.
"""
_TOO_MANY_HINT = "remove some of them"


def leave_out_constraints(document: Schema, compiles: Compiles) -> list[str]:
    """Remove keywords from *document* until it compiles; return their paths.

    A `oneOf` becomes `anyOf`.

    :raises InvalidArgument: more than `DROPPED_MAX` keywords would have to be removed, or more than
        are found in `SEARCH_S_MAX`; or no removal helps.
    """
    dropped: list[str] = []
    moved: list[tuple[str, str]] = []

    def leave_out(found: Keyword) -> None:
        path = found.path
        for new, old in reversed(moved):
            path = old + path.removeprefix(new) if path.startswith(f"{new}/") else path
        if len(dropped) == DROPPED_MAX:
            raise schema_refusal(
                path, f"{DROPPED_MAX} other constraints cannot be kept either", _TOO_MANY_HINT
            )
        dropped.append(path[:PATH_CHARACTERS_MAX])
        place = _remove(found)
        if place:
            moved.append((place, path))

    for found in unkept_keywords(document):
        leave_out(found)
    started = time.process_time()
    while not compiles(document):
        if time.process_time() - started > SEARCH_S_MAX:
            raise schema_refusal("#", "too many constraints cannot be kept", _TOO_MANY_HINT)
        removable = removable_keywords(document)
        index = refused_keyword(document, removable, compiles)
        if index is None:
            raise schema_refusal("#", "it cannot be compiled without its constraints either")
        leave_out(removable[index])
    return dropped


def _remove(found: Keyword) -> str:
    """Remove a keyword; return the new path of its alternatives, if it has any."""
    schema, value = found.schema, found.schema.pop(found.keyword)
    if found.keyword != "oneOf" or not isinstance(value, list) or not value:
        return ""
    parts = schema.get("allOf")
    schema["allOf"] = [*(parts if isinstance(parts, list) else ()), {"anyOf": value}]
    return f"{found.path.removesuffix('oneOf')}allOf/{len(schema['allOf']) - 1}/anyOf"
