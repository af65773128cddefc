"""The keywords of JSON schema: which can be kept, which assert nothing, which are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ...params import nearest
from .rules import refusal

__all__ = ("FAMILIES", "TYPES", "check_keywords", "types_of")

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FAMILIES: dict[str, tuple[str, ...]] = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
}
"""What says something of one type alone."""

_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly",
    "$comment", "$schema", "$id", "id", "$anchor", "$defs", "definitions", "discriminator", "xml",
    "externalDocs", "contentMediaType", "contentSchema",
})  # fmt: skip
_REFUSED: dict[str, str] = {
    **dict.fromkeys(("not", "if", "then", "else"), "name what may be, by anyOf"),
    **dict.fromkeys(
        ("patternProperties", "propertyNames"), "name the properties, or use additionalProperties"
    ),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "dependencies"), "name the cases by anyOf"
    ),
    **dict.fromkeys(("contains", "minContains", "maxContains"), "use prefixItems and items"),
    **dict.fromkeys(
        ("unevaluatedProperties", "unevaluatedItems"), "use additionalProperties or items: false"
    ),
    **dict.fromkeys(("$dynamicRef", "$dynamicAnchor", "$recursiveRef"), "use $ref"),
    "contentEncoding": "use a pattern",
    "nullable": 'use "type": ["string", "null"]',
}


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
    """Tell whether *value* is a number that a double can be near to: no integer of 400 digits."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max


def _schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_schema, value))


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _type_names(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return _names(names) and bool(names) and set(names) <= set(TYPES)


def _text(value: Any) -> bool:
    return isinstance(value, str)


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "$ref": ("a text", _text),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), ("a list of schemas, not empty", _schemas)),
    "type": (f"one or several of {', '.join(TYPES)}", _type_names),
    "enum": ("a list, not empty", lambda v: isinstance(v, list) and bool(v)),
    "const": ("a value", lambda _: True),
    **dict.fromkeys(FAMILIES["number"][:4], ("a number of 1.7e308 at most", _number)),
    "multipleOf": ("a number above 0", lambda v: _number(v) and v > 0),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), ("a whole number", _count)),
    **dict.fromkeys(("minProperties", "maxProperties"), ("a whole number", _count)),
    **dict.fromkeys(("pattern", "format"), ("a text", _text)),
    "uniqueItems": ("true or false", lambda v: isinstance(v, bool)),
    "required": ("a list of names", _names),
    "properties": (
        "a map of schemas",
        lambda v: isinstance(v, dict) and all(map(_schema, v.values())),
    ),
    "items": ("a schema", lambda v: _schema(v) or v == [] or _schemas(v)),
    "prefixItems": ("a list of schemas, not empty", _schemas),
    **dict.fromkeys(("additionalProperties", "additionalItems"), ("a schema", _schema)),
}


def check_keywords(schema: Mapping[str, Any], path: str) -> None:
    """Refuse a schema with a keyword that cannot be kept.

    :raises InvalidArgument: it cannot be expressed, is unknown, or its value is of a wrong form.
    """
    for keyword, value in schema.items():
        if keyword in _FORMS:
            form, holds = _FORMS[keyword]
            if not holds(value):
                raise refusal(
                    f"{path}/{keyword}", f"{str(value)[:50]!r} is not {form}", "correct it"
                )
        elif keyword in _REFUSED:
            raise refusal(
                f"{path}/{keyword}", f"a grammar cannot say {keyword!r}", _REFUSED[keyword]
            )
        elif keyword not in _ANNOTATIONS and not keyword.startswith("x-"):
            known = [*_FORMS, *_ANNOTATIONS]
            raise refusal(
                f"{path}/{keyword[:50]}",
                f"{keyword[:50]!r} is no known keyword",
                nearest(keyword, known) or "leave it out; names of your own begin with x-",
            )


def types_of(flat: Mapping[str, Any]) -> list[str]:
    """Return the types that are made for a flat schema: where it names none, those of which it
    says something, else all.
    """
    if "type" in flat:
        named = list(dict.fromkeys(flat["type"]))
        return [t for t in named if t != "integer" or "number" not in named]
    meant = [t for t, family in FAMILIES.items() if any(k in flat for k in family)]
    return meant or [t for t in TYPES if t != "integer"]
