"""Rules for alternatives, conditions and negations."""

from __future__ import annotations

from typing import Any

from ..document import Schema
from .place import Place, Rule, add_schema, is_true

__all__ = ("LOGIC_RULES",)


_FORBIDDEN_MAX = 8


def _one_of(place: Place) -> None:
    """Write `anyOf` for alternatives that exclude each other."""
    schema, alternatives = place.schema, place.schema["oneOf"]
    added = place.comparison.exclusions(place.original)
    if added is None:
        return
    parts = zip(alternatives, added, strict=True)
    del schema["oneOf"]
    add_schema(
        schema, {"anyOf": [{"allOf": [part, more]} if more else part for part, more in parts]}
    )


def _any_of(place: Place) -> None:
    """Write `allOf` for a single alternative, unless `allOf` has the same reference already:
    llguidance would intersect a schema with itself, which takes long for many values.
    """
    schema, alternatives, parts = place.schema, place.schema["anyOf"], place.schema.get("allOf", [])
    if isinstance(alternatives, list) and len(alternatives) == 1 and isinstance(parts, list):
        del schema["anyOf"]
        if not _is_reference(alternatives[0]) or alternatives[0] not in parts:
            schema["allOf"] = [*parts, *alternatives]


def _is_reference(schema: object) -> bool:
    # Other schemas are not compared, because 1 equals True in Python.
    return isinstance(schema, dict) and list(schema) == ["$ref"]


def _conditional(place: Place) -> None:
    """Remove conditions without consequences, and replace a decided one by its consequences."""
    schema = place.schema
    condition = schema.get("if")
    for branch, applies in (("then", True), ("else", False)):
        if "if" not in schema or is_true(schema.get(branch)):
            schema.pop(branch, None)
        elif condition is applies and branch in schema:
            add_schema(schema, {"allOf": [schema.pop(branch)]})
        elif condition is not applies and isinstance(condition, bool):
            schema.pop(branch, None)
    if "then" not in schema and "else" not in schema:
        schema.pop("if", None)


def _not(place: Place) -> None:
    schema = place.schema
    refused, named = place.original["not"], schema.get("enum")
    if isinstance(refused, dict) and isinstance(named, list) and set(refused) <= {"enum", "const"}:
        values = [refused["const"]] if "const" in refused else refused.get("enum", [])
        if isinstance(values, list):
            schema["enum"] = [v for v in named if not any(_may_equal(v, w) for w in values)]
            del schema["not"]
            return
    opposite = _negated(refused)
    if opposite is not None:
        del schema["not"]
        add_schema(schema, opposite)


def _may_equal(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _negated(schema: object) -> Schema | None:
    """Return a schema whose values do not fit *schema*; None if none is known."""
    if schema is False:
        return {}
    if not isinstance(schema, dict):
        return None
    match list(schema.items()):
        case [("required", [_, *_] as names)] if len(names) <= _FORBIDDEN_MAX and _are_texts(names):
            lacking = [{"properties": {name: False}} for name in names]
            return {"type": "object", **(lacking[0] if len(names) == 1 else {"anyOf": lacking})}
        case [("type", named)]:
            refused = named if isinstance(named, list) else [named]
            refused = [*refused, "number"] if "integer" in refused else refused
            kinds = ("null", "boolean", "number", "string", "array", "object")
            return {"type": [kind for kind in kinds if kind not in refused]}
        case [("anyOf", [_, *_] as parts)]:
            opposites = [_negated(part) for part in parts]
            return None if None in opposites else {"allOf": opposites}
    return None


def _are_texts(values: list[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


LOGIC_RULES: dict[str, Rule] = {
    "anyOf": _any_of,
    "oneOf": _one_of,
    "if": _conditional,
    "then": _conditional,
    "else": _conditional,
    "not": _not,
}
