"""The table of keywords of JSON schemas: how their grammars treat each one, with examples.

`make docs` writes the table of docs/json-schema.md from it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = ("KEYWORDS", "SchemaKeyword", "Treatment")

Treatment = Literal["kept", "narrowed", "refused"]
"""*kept*: answers that fit are allowed, in their layout. *narrowed*: some of them are not allowed.
*refused*: the schema is refused.
"""


class SchemaKeyword(msgspec.Struct, frozen=True, kw_only=True):
    """A keyword with an *example*, a schema; with answers that this allows, and that do not fit."""

    name: str
    treatment: Treatment
    example: Any
    allowed: tuple[Any, ...] = ()
    unfit: tuple[Any, ...] = ()
    lost: tuple[Any, ...] = ()
    """Answers that fit the example and are not allowed."""
    refused: Any = None
    """A schema that is refused because of the keyword."""
    remark: str = ""


def _kept(
    name: str, example: Any, allowed: Any, unfit: Any, remark: str = "", refused: Any = None
) -> SchemaKeyword:
    return SchemaKeyword(
        name=name, treatment="kept", example=example, allowed=tuple(allowed), unfit=tuple(unfit),
        remark=remark, refused=refused,
    )  # fmt: skip


def _narrowed(
    name: str, example: Any, allowed: Any, unfit: Any, lost: Any, remark: str, refused: Any = None
) -> SchemaKeyword:
    return SchemaKeyword(
        name=name, treatment="narrowed", example=example, allowed=tuple(allowed),
        unfit=tuple(unfit), lost=tuple(lost), remark=remark, refused=refused,
    )  # fmt: skip


def _refused(name: str, example: Any, remark: str = "") -> SchemaKeyword:
    return SchemaKeyword(
        name=name, treatment="refused", example=example, refused=example, remark=remark
    )


_NULL, _INTEGER = {"type": "null"}, {"type": "integer"}
_ONLY_AB = {"properties": {"a": {}, "b": {}}, "additionalProperties": False}
_A, _B, _AB = {"a": 1}, {"b": 1}, {"a": 1, "b": 1}

KEYWORDS: tuple[SchemaKeyword, ...] = (
    _kept("type", {"type": ["null", "integer"]}, [None, 3], ["a", []]),
    _kept("enum", {"enum": [1, "a", [2]]}, [1, "a", [2]], [2, "b", []]),
    _kept("const", {"const": {"a": [1]}}, [{"a": [1]}], [{"a": [2]}, {}]),
    _kept("$ref", {"$ref": "#/$defs/a", "$defs": {"a": _NULL}}, [None], [1],
          "within the document; it may be recursive", {"$ref": "https://example.org/a.json"}),
    _kept("$defs", {"$ref": "#/$defs/a", "$defs": {"a": _NULL, "b": {"not": {}}}}, [None], [1],
          "or `definitions`; those that nothing refers to may have any keywords"),
    _kept("allOf", {"allOf": [_INTEGER, {"minimum": 3}]}, [3], [2, "a"]),
    _kept("anyOf", {"anyOf": [_NULL, _INTEGER]}, [None, 1], ["a"]),
    _narrowed("oneOf", {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
              [_A, _B], [_AB, {}], [{"c": 1, "a": 1}],
              "refused unless the alternatives exclude each other by their types, values, ranges of"
              " numbers, or by properties that an object must have",
              {"oneOf": [_INTEGER, {"type": "number"}]}),
    _narrowed("not", {"type": ["integer", "string"], "not": _INTEGER}, ["a"], [1], [],
              "refused unless it names types, required properties, or values of the `enum` beside",
              {"not": {"minLength": 3}}),
    _refused("if", {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
             "without `then` and `else` it has no effect"),
    _kept("minimum", {"type": "integer", "minimum": 3}, [3, 40], [2, -4]),
    _kept("maximum", {"type": "integer", "maximum": 3}, [3, -4], [4, 30]),
    _kept("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, [4], [3]),
    _kept("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 3}, [2], [3]),
    _kept("multipleOf", {"type": "integer", "multipleOf": 3}, [0, 9], [1, 10]),
    _kept("minLength", {"type": "string", "minLength": 2}, ["ab", "\u00e9\u00e9"], ["", "a"]),
    _kept("maxLength", {"type": "string", "maxLength": 2}, ["", "ab"], ["abc"]),
    _narrowed("pattern", {"type": "string", "pattern": "^\\d+$"}, ["12"], ["a", ""], [],
              "without `^` or `$`, any text may precede or follow a match; `\\d` and `\\w` match"
              " ASCII only; lookahead, lookbehind and backreferences are refused",
              {"pattern": "(?=a)b"}),
    _narrowed("format", {"type": "string", "format": "date"}, ["2026-11-23"], ["2026-11-32", "x"],
              [], "the usual forms; see below", {"type": "string", "format": "regex"}),
    _kept("items", {"type": "array", "items": _NULL}, [[], [None, None]], [[1]]),
    _kept("prefixItems", {"type": "array", "prefixItems": [_NULL]}, [[], [None, 1]], [[1]]),
    _kept("additionalItems", {"items": [_NULL], "additionalItems": False}, [[None]], [[None, 1]],
          "of older drafts, as is a list of `items`"),
    _kept("minItems", {"type": "array", "minItems": 1}, [[1]], [[]]),
    _kept("maxItems", {"type": "array", "maxItems": 1}, [[], [1]], [[1, 1]]),
    _kept("uniqueItems", {"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]],
          "refused unless `maxItems` is at most 1", {"type": "array", "uniqueItems": True}),
    _refused("contains", {"type": "array", "contains": _NULL},
             "with `minContains` 0 it has no effect"),
    _kept("unevaluatedItems", {"prefixItems": [{}], "unevaluatedItems": False}, [[1]], [[1, 1]],
          "refused beside keywords such as `$ref` and `anyOf`",
          {"allOf": [{"prefixItems": [{}]}], "unevaluatedItems": False}),
    _narrowed("properties", {"type": "object", "properties": {"a": _INTEGER, "b": _INTEGER}},
              [_A, _AB, {"b": 1, "c": 2}], [{"a": "x"}], [{"b": 1, "a": 1}], "in this order"),
    _kept("required", {"type": "object", "required": ["a"]}, [_A], [{}, _B]),
    _kept("additionalProperties", {"type": "object"} | _ONLY_AB, [{}, _AB], [{"c": 1}]),
    _kept("patternProperties", {"type": "object", "patternProperties": {"^a": _NULL}},
          [{"ab": None}, {"b": 1}], [{"ab": 1}], "patterns that may overlap are refused",
          {"patternProperties": {"^a": _NULL, "b$": _INTEGER}}),
    _kept("minProperties", {"type": "object", "required": ["a", "b"], "minProperties": 2}, [_AB],
          [_A, {}], "refused above 1, unless as many properties are required; and beside properties"
          " that are not required", {"type": "object", "minProperties": 2}),
    _kept("maxProperties", {"type": "object", "maxProperties": 1}, [{}, _A], [_AB],
          "refused beside properties that are not required",
          {"properties": {"a": {}, "b": {}}, "maxProperties": 1}),
    _kept("propertyNames", {"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, _AB],
          [{"c": 1}], "refused unless it is an `enum`, or a `pattern` without `properties`",
          {"propertyNames": {"minLength": 3}}),
    _kept("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}} | _ONLY_AB,
          [{}, _B, _AB], [_A], "and `dependentSchemas`; refused with more than 4 properties", None),
    _kept("unevaluatedProperties", {"properties": {"a": {}}, "unevaluatedProperties": False},
          [_A, {}], [_B], "refused beside keywords such as `$ref` and `anyOf`",
          {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}),
    _refused("$dynamicRef", {"$dynamicRef": "#a"}),
)  # fmt: skip
