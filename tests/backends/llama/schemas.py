"""JSON schemas by kind, generated systematically, as inputs of `json-schema`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ("REFUSED", "SCHEMAS")

Schema = dict[str, Any]
FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "uuid",
    "ipv4",
    "ipv6",
    "hostname",
    "email",
    "uri",
)

STRING, INTEGER, NUMBER, BOOLEAN, NULL = (
    {"type": name} for name in ("string", "integer", "number", "boolean", "null")
)
SHORT = {"type": "string", "maxLength": 4}


def _object(required: list[str] | None = None, **properties: Any) -> Schema:
    found: Schema = {"type": "object", "properties": properties}
    return found if required is None else found | {"required": required}


def _types() -> Iterator[Schema]:
    names = ("null", "boolean", "integer", "number", "string", "array", "object")
    for name in names:
        yield {"type": name}
        yield {"type": [name, "null"], "description": "one or none"}
    yield {}
    yield {"type": ["integer", "number"]}
    yield {"type": ["string", "integer", "boolean"]}
    yield {"title": "anything", "$schema": "https://json-schema.org/draft/2020-12/schema"}


def _enums() -> Iterator[Schema]:
    values = [0, 1.5, -3, "", "a", 'a "b"', "back\\slash", "line\nbreak", "é😀", True, None]
    values += [[], [1, 2], {}, {"a": 1}, {"b": [None, {"c": "d"}]}]
    for value in values:
        yield {"const": value}
    yield {"enum": values}
    yield {"enum": ["red", "green", "blue"]}
    yield {"type": "string", "enum": ["a", 1, None]}
    yield {"type": "integer", "enum": [1, 2.0, 2.5, "3"]}
    yield {"type": ["string", "null"], "enum": ["x", None, 4]}
    yield {"enum": [f"value number {i}" for i in range(100)]}
    yield {"enum": [1, 2, 3], "const": 2}


def _integers() -> Iterator[Schema]:
    for low, high in ((0, 0), (0, 9), (1, 12), (5, 105), (-5, 5), (-120, -7), (99, 1001), (17, 17)):
        yield {"type": "integer", "minimum": low, "maximum": high}
    for bound in (-101, -1, 0, 1, 10, 4711):
        yield {"type": "integer", "minimum": bound}
        yield {"type": "integer", "maximum": bound}
    yield {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}
    yield {"type": "integer", "minimum": 0.5, "maximum": 2.5}
    yield {"type": "integer", "minimum": 0, "exclusiveMinimum": 0, "maximum": 7}
    yield {"type": "integer", "minimum": 123456789012345678}
    yield {"type": "integer", "multipleOf": 7}
    yield {"type": "integer", "multipleOf": 10, "minimum": 0, "maximum": 100}
    yield {"type": "integer", "multipleOf": 2.0}


def _numbers() -> Iterator[Schema]:
    for low, high in ((0, 1), (-1, 1), (0.25, 0.75), (0.5, 3.7), (-2.5, -0.001), (10, 1000.5)):
        yield {"type": "number", "minimum": low, "maximum": high}
        yield {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
    for bound in (-0.5, 0, 3.25, 1e6):
        yield {"type": "number", "minimum": bound}
        yield {"type": "number", "exclusiveMinimum": bound}
        yield {"type": "number", "maximum": bound}
        yield {"type": "number", "exclusiveMaximum": bound}
    yield {"type": "number", "multipleOf": 25, "minimum": -100, "maximum": 100}
    yield {"minimum": 3, "maximum": 4}


def _strings() -> Iterator[Schema]:
    for low, high in ((0, 0), (0, 1), (1, 1), (3, 5), (0, 64), (65, 65), (2, 70), (100, 150)):
        yield {"type": "string", "minLength": low, "maxLength": high}
    yield {"type": "string", "minLength": 2}
    yield {"minLength": 1, "maxLength": 3}
    for name in FORMATS:
        yield {"type": "string", "format": name}
    yield {"type": "string", "format": "uuid", "minLength": 36, "maxLength": 36}


PATTERNS = (
    "^$", "^a$", "^abc$", "a", "^a", "a$", "^a|b$", "^(a|b)$", "^[a-z]+$", "^[^a-z]{2}$",
    r"^\d{3}$", r"^\d{3}-\d{4}$", r"^\w+@\w+$", r"^[\w.-]{1,8}$", r"^\S{3}$", r"^\D\W$",
    r"^.{2,4}$", "^x?y*z+$", r"^[\"\\]{3}$", r'^"quoted"$', r"^a\\b$", r"^\t\n$",
    r"^\u00e9[\u4e00-\u4e03]$", r"^(?:ab){2,3}$", "^(?<year>[12][0-9]{3})$", "^(a(b(c(d)?)?)?)e$",
    r"^[+-]?\d+(\.\d+)?$", "^[A-Z][a-z]*( [A-Z][a-z]*)*$", r"^#([0-9a-f]{3}){1,2}$", "^a{0,2}?b$",
    "^[-a]$", "^[a-]$", r"^[\]\[^]$", "^(GET|POST) /[a-z]{1,9}$", r"^\/\.\*\+\?$", "^a{70}$",
    "^[ab]{60,130}$", "^x{2}(,y{1,2})*$", "^é$", r"^[^\d]$", r"^\x41$",
)  # fmt: skip


def _patterns() -> Iterator[Schema]:
    for pattern in PATTERNS:
        if "(?<" in pattern:
            continue  # the validator's dialect differs here
        yield {"type": "string", "pattern": pattern}
    yield {"pattern": "^[a-z]{2,4}$", "minLength": 1, "maxLength": 4}


def _arrays() -> Iterator[Schema]:
    for low, high in ((0, 0), (0, 1), (0, 3), (1, 1), (1, 3), (2, 5), (70, 72)):
        yield {"type": "array", "items": BOOLEAN, "minItems": low, "maxItems": high}
    yield {"type": "array", "items": INTEGER}
    yield {"type": "array", "items": SHORT, "minItems": 2}
    yield {"items": NULL, "maxItems": 2}
    yield {"type": "array", "maxItems": 2}
    yield {"type": "array", "items": False}
    yield {
        "type": "array",
        "items": {"type": "array", "items": BOOLEAN, "maxItems": 2},
        "maxItems": 2,
    }
    yield {"type": "array", "prefixItems": [INTEGER, SHORT]}
    yield {"type": "array", "prefixItems": [INTEGER, SHORT], "items": BOOLEAN, "maxItems": 4}
    yield {"type": "array", "prefixItems": [INTEGER], "items": False, "minItems": 1}
    yield {"type": "array", "prefixItems": [INTEGER], "minItems": 3, "maxItems": 3}
    yield {"type": "array", "items": [INTEGER, NULL], "additionalItems": False}


def _objects() -> Iterator[Schema]:
    for required in ([], ["a"], ["b"], ["a", "b"], ["b", "c"], ["a", "b", "c"]):
        yield _object(required, a=INTEGER, b=SHORT, c=BOOLEAN)
    yield _object(
        ["name", "age"], name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 150}
    )
    yield _object(None, deep=_object(["deeper"], deeper=_object(["deepest"], deepest=NULL)))
    yield _object(["a"], a=INTEGER) | {"additionalProperties": False}
    yield _object(["a"], a=INTEGER) | {"additionalProperties": BOOLEAN}
    yield _object([], ab=INTEGER, abc=INTEGER, b=INTEGER) | {"additionalProperties": NULL}
    yield {"type": "object", "additionalProperties": SHORT}
    yield {"type": "object", "additionalProperties": INTEGER, "minProperties": 1}
    yield {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2}
    yield {"type": "object", "additionalProperties": False}
    yield {"type": "object", "required": ["it"]}
    yield _object(["a", "b"], a=INTEGER, b=INTEGER) | {"minProperties": 2, "maxProperties": 2}
    yield {"type": "object", "patternProperties": {"^[a-c]{1,2}$": INTEGER, "^x": NULL}}
    yield _object(["a"], a=INTEGER) | {"patternProperties": {"^b": NULL, "^a": {"minimum": 0}}}
    yield _object(['quote"d'], **{'quote"d': NULL, "é": NULL, "a b": NULL, "": NULL})
    yield _object(["never"], never=NULL, ever=False)
    yield _object([f"p{i}" for i in range(0, 30, 3)], **{f"p{i}": BOOLEAN for i in range(30)})
    yield {"properties": {"a": INTEGER}, "additionalProperties": True}


def _combined() -> Iterator[Schema]:
    yield {"anyOf": [INTEGER, SHORT, NULL]}
    yield {"anyOf": [_object(["a"], a=INTEGER), _object(["b"], b=SHORT)]}
    yield {"type": "integer", "anyOf": [{"maximum": -10}, {"minimum": 10, "maximum": 99}]}
    yield {"oneOf": [INTEGER, SHORT, {"type": "array", "items": NULL}]}
    yield {"oneOf": [{"const": 1}, {"const": 2}, {"const": "1"}]}
    yield {"type": "string", "oneOf": [{"const": "a"}, {"const": "b"}]}
    yield {
        "oneOf": [
            _object(["kind", "size"], kind={"const": "circle"}, size=INTEGER),
            _object(["kind", "side"], kind={"const": "square"}, side=NUMBER),
            _object(["kind"], kind={"enum": ["none", "all"]}),
        ]
    }
    yield {"oneOf": [{"const": "a", "title": "A"}, {"enum": ["b", None, True]}, {"const": 1}]}
    yield {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 5}]}
    yield {
        "allOf": [
            _object(["a"], a=INTEGER),
            _object(["b"], b=SHORT, a={"minimum": 0, "maximum": 9}),
        ]
    }
    yield {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}
    yield {"allOf": [{"type": ["integer", "string"]}, {"type": "number"}], "maximum": 3}
    yield _object(["a"], a=INTEGER) | {"anyOf": [_object(["b"], b=NULL), _object(["c"], c=NULL)]}
    yield {"allOf": [{"items": INTEGER, "maxItems": 3}, {"items": {"minimum": 0}, "minItems": 1}]}
    yield {
        "allOf": [{"prefixItems": [INTEGER]}, {"items": {"minimum": 0, "maximum": 4}}],
        "minItems": 2,
        "maxItems": 2,
    }
    yield {"anyOf": [{"anyOf": [INTEGER, NULL]}, {"allOf": [SHORT, {"minLength": 1}]}]}
    yield {"anyOf": [True, INTEGER]}
    yield {"anyOf": [False, INTEGER]}


def _referring() -> Iterator[Schema]:
    yield {"$ref": "#/$defs/a", "$defs": {"a": INTEGER}}
    yield {"$ref": "#/definitions/a~1b", "definitions": {"a/b": SHORT}}
    yield {"$ref": "#/$defs/a%20b", "$defs": {"a b": BOOLEAN}}
    yield _object(["a", "b"], a=INTEGER, b={"$ref": "#/properties/a"})
    yield {"$ref": "#/$defs/a", "maximum": 9, "$defs": {"a": {"type": "integer", "minimum": 0}}}
    yield _object(["value"], value=INTEGER, next={"$ref": "#"})
    yield _object(["value", "next"], value=INTEGER, next={"anyOf": [{"$ref": "#"}, NULL]})
    yield {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": _object(
                ["name"],
                name=SHORT,
                children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
            )
        },
    }
    yield {
        "$ref": "#/$defs/even",
        "$defs": {
            "even": {"type": "array", "items": {"$ref": "#/$defs/odd"}, "maxItems": 1},
            "odd": _object([], rest={"$ref": "#/$defs/even"}),
        },
    }
    yield {
        "anyOf": [{"$ref": "#/$defs/sum"}, INTEGER],
        "$defs": {
            "sum": _object(
                ["plus"],
                plus={"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 2},
            )
        },
    }


def _used() -> Iterator[Schema]:
    """Return schemas that programs use."""
    yield _object(
        ["name", "arguments"],
        name={"enum": ["get_weather", "get_time"]},
        arguments=_object(["city"], city=SHORT, unit={"enum": ["celsius", "fahrenheit"]}),
    ) | {"additionalProperties": False}
    yield _object(
        ["id", "created", "tags"],
        id={"type": "string", "format": "uuid"},
        created={"type": "string", "format": "date-time"},
        tags={"type": "array", "items": SHORT, "maxItems": 3},
        note={"type": ["string", "null"], "maxLength": 10},
    )
    yield _object(
        ["sentiment", "score"],
        sentiment={"enum": ["positive", "negative", "neutral"]},
        score={"type": "number", "minimum": 0, "maximum": 1},
    ) | {"title": "Judgement", "$schema": "http://json-schema.org/draft-07/schema#"}
    yield {
        "title": "Steps",
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "items": {"$ref": "#/$defs/Step"},
                "minItems": 1,
                "maxItems": 2,
            },
            "answer": {"title": "Answer", "type": "string", "default": "", "maxLength": 8},
        },
        "required": ["steps", "answer"],
        "additionalProperties": False,
        "$defs": {"Step": _object(["output"], output=SHORT) | {"x-note": "ours", "examples": []}},
    }


_KINDS = {
    "types": _types, "enums": _enums, "integers": _integers, "numbers": _numbers,
    "strings": _strings, "patterns": _patterns, "arrays": _arrays, "objects": _objects,
    "combined": _combined, "referring": _referring, "used": _used,
}  # fmt: skip
SCHEMAS: dict[str, Schema] = {
    f"{kind}-{number}": schema
    for kind, make in _KINDS.items()
    for number, schema in enumerate(make())
}

_NESTED: Schema = INTEGER
for _ in range(200):
    _NESTED = {"type": "array", "items": _NESTED}

REFUSED: list[tuple[Schema, str]] = [
    ({"not": {"minLength": 1}}, "#/not"),
    ({"if": STRING, "then": {"minLength": 1}}, "#/if"),
    (_object([], a={"propertyNames": {"minLength": 2}}), "#/properties/a/propertyNames"),
    ({"contains": INTEGER}, "#/contains"),
    ({"dependentRequired": {name: ["e"] for name in "abcdf"}}, "#/dependentRequired"),
    ({"anyOf": [True], "unevaluatedProperties": False}, "#/unevaluatedProperties"),
    ({"$dynamicRef": "#a"}, "#/$dynamicRef"),
    ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, "#/items/uniqueItems"),
    ({"enum": []}, "#/enum"),
    ({"type": "array", "minItems": 1, "items": {"enum": []}}, "#/minItems"),
    ({"type": "string", "format": "regex"}, "#/format"),
    ({"type": "object", "additionalProperties": NULL, "minProperties": 2}, "#/minProperties"),
    (_object([], a=NULL, b=NULL) | {"maxProperties": 1}, "#/maxProperties"),
    (_object([], **{"a/b": {"x~y": 1, "oneOf": [INTEGER, NUMBER]}}), "#/properties/a~1b/oneOf"),
    ({"oneOf": [_object([], a=INTEGER), _object([], b=INTEGER)]}, "#/oneOf"),
    ({"oneOf": [{"const": 1}, {"enum": ["a", 1.0]}]}, "#/oneOf"),
    ({"oneOf": [{"const": 1}, {"const": 1}]}, "#/oneOf"),
    ({"$ref": "https://example.org/schema"}, "#/$ref"),
    ({"properties": {"a": {"$ref": "other.json#/a"}}}, "#/properties/a/$ref"),
    ({"$ref": "#"}, "#/$ref"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [STRING, {"not": {}}]}}},
        "#/$defs/a/allOf/1/not",
    ),
    (_NESTED, "#"),
    ({"allOf": [INTEGER, STRING]}, "#/allOf/0/type"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "#/minimum"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "#/minLength"),
    (_object(["a"], a=False), "#/required"),
    ({"type": "string", "const": 3}, "#/const"),
    ({"oneOf": [{"type": "integer", "maximum": 0}, {"type": "integer", "minimum": 0}]}, "#/oneOf"),
    *(
        ({"type": "string", "pattern": pattern}, "#/pattern")
        for pattern in ("(?=a)b", "a(?!b)", r"^(a)\1$", r"(?<n>a)\k<n>", "(?<=a+)b", "[^]", r"\cA")
    ),
]
"""Schemas with the path of the keyword because of which they are refused."""
