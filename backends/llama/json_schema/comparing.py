"""Whether two flat schemas are apart: nothing that is made for the first one fits the second."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from .keywords import TYPES, types_of
from .merging import Flat, Flattener, key_of, required_of, schema_of
from .numbers import Range

__all__ = ("apart", "range_of", "types_of_value")

_DEPTH_MAX = 4
_LENGTHS = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}


def range_of(flat: Flat) -> Range:
    """Return the numbers between a schema's bounds."""
    lows = [
        (_decimal(flat[k]), k != "minimum") for k in ("minimum", "exclusiveMinimum") if k in flat
    ]
    highs = [
        (_decimal(flat[k]), k == "maximum") for k in ("maximum", "exclusiveMaximum") if k in flat
    ]
    low, low_open = max(lows, default=(None, False))
    high, closed = min(highs, default=(None, True))
    return Range(low, high, low_open, not closed)


def _decimal(number: float) -> Decimal:
    return Decimal(repr(number))


def types_of_value(value: Any) -> set[str]:
    """Return the types that a value is of: a whole number is of two."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case float() if not value.is_integer():
            return {"number"}
        case int() | float():
            return {"integer", "number"}
        case str():
            return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def apart(flattener: Flattener, made: Flat, other: Flat, depth: int = 0) -> bool:
    """Tell whether it is sure that no text made for *made* fits *other*."""
    if "enum" in made and "enum" in other:
        return not set(map(key_of, made["enum"])) & set(map(key_of, other["enum"]))
    common = _kinds(_made(made)) & _kinds(_fitting(other))
    if "enum" in made or "enum" in other:
        return not common
    return all(_apart_as(kind, flattener, made, other, depth) for kind in common)


def _made(flat: Flat) -> Iterable[str]:
    if "enum" not in flat:
        return types_of(flat)
    return {kind for value in flat["enum"] for kind in types_of_value(value)}


def _fitting(flat: Flat) -> Iterable[str]:
    """Return the types of the values that fit: all, where none is named."""
    return _made(flat) if "enum" in flat else flat.get("type", TYPES)


def _kinds(types: Iterable[str]) -> set[str]:
    return {"number" if name == "integer" else name for name in types}


def _apart_as(kind: str, flattener: Flattener, made: Flat, other: Flat, depth: int) -> bool:
    if kind == "number":
        a, b = range_of(made), range_of(other)
        return a.before(b) or b.before(a)
    if kind in _LENGTHS:
        least, most = _LENGTHS[kind]
        return _beyond(made, other, least, most) or _beyond(other, made, least, most)
    return kind == "object" and _objects_apart(flattener, made, other, depth)


def _beyond(a: Flat, b: Flat, least: str, most: str) -> bool:
    return bool(most in b and a.get(least, 0) > b[most])


def _objects_apart(flattener: Flattener, made: Flat, other: Flat, depth: int) -> bool:
    """Tell whether one has, always, what the other never has, or has it otherwise."""
    always = required_of(made)
    named = {*made.get("properties", {}), *always}
    closed = not made.get("additionalProperties", not named)
    if closed and any(name not in named for name in required_of(other)):
        return True
    return depth < _DEPTH_MAX and any(
        _values_apart(flattener, schema_of(made, name), schema_of(other, name), depth + 1)
        for name in always
    )


def _values_apart(flattener: Flattener, made: Any, other: Any, depth: int) -> bool:
    if made is True or other is True:
        return made is False or other is False
    return all(
        apart(flattener, a, b, depth)
        for a in flattener.flat(made, "#")
        for b in flattener.flat(other, "#")
    )
