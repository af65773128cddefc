"""Proofs, from their keywords, that the alternatives of a `oneOf` exclude each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import combinations
from typing import Any

from .document import Schema, resolve, schemas_of

__all__ = ("SchemaComparison",)

_ATOMS = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
"""Types without common values: a number is an integer or a fraction."""
_DEPTH_MAX = 6
COMPARISONS_MAX = 20_000
"""Schemas that are compared in one document, in 5 us each."""
_IGNORES_SIBLINGS = ("draft-03", "draft-04", "draft-06", "draft-07")
"""Drafts in which keywords beside `$ref` have no effect."""


class SchemaComparison:
    """Compares schemas of one *document*, with a bound on the work."""

    def __init__(self, document: Schema):
        self._document, self._left = document, COMPARISONS_MAX
        draft = str(document.get("$schema", ""))
        self._siblings = not any(name in draft for name in _IGNORES_SIBLINGS)

    @cached_property
    def _resolves(self) -> bool:
        """Whether all references start at the document. Within a schema with an id of its own they
        start at that schema.
        """
        _, *within = schemas_of(self._document)
        return not any("$id" in schema or "id" in schema for schema in within)

    def exclusions(self, schema: Schema) -> list[Schema] | None:
        """Return a schema to add to each alternative of the `oneOf` of *schema*, so that no value
        fits two of the alternatives with these additions.

        The added schemas forbid properties that other alternatives require, where this separates
        them. Return None if no way is known.
        """
        alternatives = schema["oneOf"]
        if not isinstance(alternatives, list) or not alternatives:
            return None
        if _are_distinct_values(alternatives):
            return [{} for _ in alternatives]
        outer = {"type": schema["type"]} if "type" in schema else {}
        whole = [{"allOf": [outer, part]} for part in alternatives]
        added: list[Schema] = [{} for _ in alternatives]
        for (i, one), (j, other) in combinations(enumerate(whole), 2):
            if not self.disjoint(one, other):
                a, b = self._parting(one, other), self._parting(other, one)
                if a is None or b is None:
                    return None
                added[i], added[j] = _both(added[i], a), _both(added[j], b)
        return added

    def _parting(self, schema: Schema, other: Schema) -> Schema | None:
        """Return a schema such that no value that fits it and *schema* fits *other*; None if no
        such schema is known.
        """
        own, theirs = list(self._parts(schema)), list(self._parts(other))
        shared = _types(own) & _types(theirs)
        name = next((name for name in _required(theirs) if name not in _required(own)), None)
        if name is None or shared not in ({"object"}, _ATOMS):
            return None
        forbidden = {"properties": {name: False}}
        # Values of other types than objects fit both.
        return forbidden | {"type": "object"} if shared == _ATOMS else forbidden

    def disjoint(self, one: object, other: object, depth: int = _DEPTH_MAX) -> bool:
        """Return whether it is certain that no value fits both schemas."""
        if one is False or other is False:
            return True
        if self._left < 0 or not depth:
            return False
        a, b = list(self._parts(one)), list(self._parts(other))
        if any(part is False for part in (*a, *b)):
            return True
        shared = _types(a) & _types(b)
        return (
            not shared
            or _values_differ(a, b)
            or _values_differ(b, a)
            or (shared <= {"integer", "fraction"} and _ranges_differ(a, b))
            or (shared == {"object"} and self._properties_differ(a, b, depth - 1))
            or self._all_alternatives_differ(a, other, depth - 1)
            or self._all_alternatives_differ(b, one, depth - 1)
        )

    def _parts(self, schema: object, depth: int = _DEPTH_MAX) -> Iterator[Any]:
        """Yield schemas without references; each value of *schema* fits all of them."""
        self._left -= 1
        if schema is False:
            yield False
        if not isinstance(schema, dict) or not depth or self._left < 0:
            return
        if "$ref" in schema:
            if self._resolves:
                yield from self._parts(resolve(self._document, schema["$ref"]), depth - 1)
            if not self._siblings:
                return
        yield schema
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            yield from self._parts(part, depth - 1)

    def _properties_differ(self, a: list[Any], b: list[Any], depth: int) -> bool:
        return any(
            self.disjoint({"allOf": _at(a, name)}, {"allOf": _at(b, name)}, depth)
            for name in dict.fromkeys((*_required(a), *_required(b)))
        )

    def _all_alternatives_differ(self, parts: list[Any], other: object, depth: int) -> bool:
        lists = [part[key] for part in parts for key in ("anyOf", "oneOf") if key in part]
        return any(
            all(self.disjoint(part, other, depth) for part in found)
            for found in lists
            if isinstance(found, list) and found
        )


def _both(one: Schema, other: Schema) -> Schema:
    """Return a schema that forbids the properties of both."""
    forbidden = one.get("properties", {}) | other["properties"]
    return one | other | {"properties": forbidden}


def _are_distinct_values(alternatives: list[Any]) -> bool:
    """Return whether all alternatives name their values, and no value occurs twice."""
    named = [_values(p) for p in alternatives if isinstance(p, dict) and "$ref" not in p]
    values = [_key(value) for found in named if found is not None for value in found]
    return len(named) == len(alternatives) and None not in named and len(set(values)) == len(values)


def _types(parts: list[Any]) -> frozenset[str]:
    found = _ATOMS
    for part in parts:
        named = part.get("type") if isinstance(part, dict) else None
        if named is not None:
            names = named if isinstance(named, list) else [named]
            found &= {atom for name in names for atom in _atoms(name)}
        values = _values(part)
        if values is not None:
            found &= {atom for value in values for atom in _atoms_of_value(value)}
    return frozenset(found)


def _atoms(name: object) -> tuple[str, ...]:
    return ("integer", "fraction") if name == "number" else (str(name),)


def _atoms_of_value(value: Any) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int():
            return ("integer",)
        case float():  # whether 2.0 is an integer depends on the draft
            return ("integer", "fraction") if value.is_integer() else ("fraction",)
        case str():
            return ("string",)
    return ("array",) if isinstance(value, list) else ("object",)


def _values(part: object) -> list[Any] | None:
    """Return the only values of a schema, if it names them."""
    if not isinstance(part, dict):
        return None
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _values_differ(a: list[Any], b: list[Any]) -> bool:
    """Return whether no value that *a* names fits *b*, judged by the values and types of *b*."""
    named = next((found for part in a if (found := _values(part)) is not None), None)
    if named is None:
        return False
    types, lists = _types(b), [found for part in b if (found := _values(part)) is not None]
    allowed = [set(map(_key, found)) for found in lists]
    return not any(
        types.intersection(_atoms_of_value(value)) and all(_key(value) in keys for keys in allowed)
        for value in named
    )


def _key(value: Any) -> object:
    """Return a hashable form, which is the same for equal values of JSON."""
    if isinstance(value, list):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return frozenset((name, _key(item)) for name, item in value.items())
    return isinstance(value, bool), value


def _ranges_differ(a: list[Any], b: list[Any]) -> bool:
    (low_a, high_a), (low_b, high_b) = _range(a), _range(b)
    return low_a > high_b or low_b > high_a


def _range(parts: list[Any]) -> tuple[tuple[float, int], tuple[float, int]]:
    """Return the low and the high bound of a number. The second number of a bound is 0, or 1 or -1
    if the bound itself is excluded.
    """
    low, high = [(-math.inf, 0)], [(math.inf, 0)]
    for part in parts:
        low += [(value, 0) for value in _numbers(part, "minimum")]
        low += [(value, 1) for value in _numbers(part, "exclusiveMinimum")]
        high += [(value, 0) for value in _numbers(part, "maximum")]
        high += [(value, -1) for value in _numbers(part, "exclusiveMaximum")]
    return max(low), min(high)


def _numbers(part: Schema, keyword: str) -> list[float]:
    value: object = part.get(keyword)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    return [value]


def _required(parts: list[Any]) -> list[str]:
    lists = [part.get("required") for part in parts if isinstance(part, dict)]
    names = [name for found in lists if isinstance(found, list) for name in found]
    return [name for name in names if isinstance(name, str)]


def _at(parts: list[Any], name: str) -> list[Any]:
    """Return the schemas of a property in each of *parts*."""
    found = []
    for part in parts:
        named = part.get("properties")
        if isinstance(named, dict) and name in named:
            found.append(named[name])
        elif not part.get("patternProperties"):
            found.append(part.get("additionalProperties", True))
    return found
