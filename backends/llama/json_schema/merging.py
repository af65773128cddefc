"""Schemas without references and combinations: what several of them say, said in one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import msgspec

from .keywords import TYPES, check_keywords
from .rules import refusal

__all__ = ("ALTERNATIVES_MAX", "Flat", "Flattener", "key_of", "required_of", "schema_of")

Flat = dict[str, Any]
"""A schema of assertions alone, each known, none of which combines others or refers to one."""

ALTERNATIVES_MAX = 256
"""Of one value: `anyOf` beside `anyOf` multiplies them."""
WORK_MAX = 30_000
"""Schemas looked at and pairs of them merged or compared; a few µs each."""
REFERENCES_MAX = 32
_COMBINE = ("$ref", "allOf", "anyOf", "oneOf")

encode = msgspec.json.Encoder().encode


def key_of(value: Any) -> bytes:
    """Return what two values have in common that JSON schema calls equal: 1 and 1.0, not true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, dict):
        return encode([[k, key_of(v)] for k, v in sorted(value.items())])
    return encode([key_of(v) for v in value]) if isinstance(value, list) else encode(value)


class Flattener:
    """Flattens the schemas of one *document*. What `oneOf` names must be apart by *apart*: of two
    flat schemas, whether no text made for the first one fits the second.
    """

    def __init__(self, document: Any, apart: Callable[[Flat, Flat], bool]):
        self._document, self._apart = document, apart
        self._left = WORK_MAX

    def _spend(self, work: int, path: str) -> None:
        self._left -= work
        if self._left < 0:
            why = f"more than {WORK_MAX} schemas are to be combined"
            raise refusal(
                path, why, "combine less: by fewer allOf, anyOf, oneOf and $ref in each other"
            )

    def flat(self, schema: Any, path: str, seen: frozenset[str] = frozenset()) -> list[Flat]:
        """Return the flat schemas of which a value is to fit one; none where nothing fits.

        :raises InvalidArgument: a keyword cannot be kept, is unknown or wrong, or goes in circles.
        """
        if isinstance(schema, bool):
            return [{}] if schema else []
        self._spend(1, path)
        check_keywords(schema, path)
        own = _asserted(schema)
        found = [own] if own.get("enum") != [] else []
        if "$ref" in schema:
            found = self._product(found, self._referred(schema["$ref"], path, seen), path)
        for number, part in enumerate(schema.get("allOf", ())):
            found = self._product(found, self.flat(part, f"{path}/allOf/{number}", seen), path)
        if "anyOf" in schema:
            branches = self._branches(schema, "anyOf", path, seen)
            found = self._product(found, [one for branch in branches for one in branch], path)
        if "oneOf" in schema:
            found = self._one_of(found, self._branches(schema, "oneOf", path, seen), path)
        return found

    def _referred(self, reference: str, path: str, seen: frozenset[str]) -> list[Flat]:
        target, place = self.resolve(reference, path)
        if place in seen or len(seen) >= REFERENCES_MAX:
            raise refusal(
                path,
                f"$ref {reference[:100]!r} leads back to itself, or over too many others",
                "let there be a property or an item between",
            )
        return self.flat(target, place, seen | {place})

    def resolve(self, reference: str, path: str) -> tuple[Any, str]:
        """Return what a local *reference* names, and its path.

        :raises InvalidArgument: it is not local, or names nothing.
        """
        if reference != "#" and not reference.startswith("#/"):
            raise refusal(
                path,
                f"$ref {reference[:100]!r} is not local",
                "nothing is fetched: put what it names under $defs and refer to #/$defs/NAME",
            )
        target = self._document
        for part in unquote(reference).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            known = _step(target, part)
            if known is None:
                raise refusal(
                    path, f"$ref {reference[:100]!r} names nothing", "see to its spelling"
                )
            target = known
        if not isinstance(target, dict | bool):
            raise refusal(path, f"$ref {reference[:100]!r} names no schema", "see to its spelling")
        return target, reference

    def _branches(
        self, schema: Mapping[str, Any], keyword: str, path: str, seen: frozenset[str]
    ) -> list[list[Flat]]:
        return [
            self.flat(part, f"{path}/{keyword}/{number}", seen)
            for number, part in enumerate(schema[keyword])
        ]

    def _product(self, some: list[Flat], others: list[Flat], path: str) -> list[Flat]:
        self._spend(len(some) * len(others), path)
        merged = (_merged(a, b, path) for a in some for b in others)
        found = [one for one in merged if one is not None]
        if len(found) > ALTERNATIVES_MAX:
            most = f"{ALTERNATIVES_MAX} at most"
            raise refusal(path, f"{len(found)} alternatives; {most}", "combine less at one place")
        return found

    def _one_of(self, found: list[Flat], branches: list[list[Flat]], path: str) -> list[Flat]:
        whole = [self._product(found, branch, path) for branch in branches]
        values = _values_of(branches)
        every = [(i, flat) for i, branch in enumerate(branches) for flat in branch]
        unnamed = [(i, flat) for i, flat in every if "enum" not in flat]
        for number, branch in enumerate(whole):
            for one in branch:
                named = one.get("enum", ())
                others = unnamed if named else every
                if any(values[key_of(v)] - {number} for v in named) or not all(
                    self._are_apart(one, other, path) for i, other in others if i != number
                ):
                    raise refusal(
                        f"{path}/oneOf/{number}",
                        "what fits it may fit another one of oneOf, too",
                        "use anyOf, or tell them apart by a type, a const or a required property",
                    )
        return [one for branch in whole for one in branch]

    def _are_apart(self, one: Flat, other: Flat, path: str) -> bool:
        self._spend(1, path)
        return self._apart(one, other)


def _values_of(branches: list[list[Flat]]) -> defaultdict[bytes, set[int]]:
    """Return the values that are named, each with the numbers of the branches that name it."""
    found: defaultdict[bytes, set[int]] = defaultdict(set)
    for number, branch in enumerate(branches):
        for flat in branch:
            for value in flat.get("enum", ()):
                found[key_of(value)].add(number)
    return found


def _step(target: Any, part: str) -> Any:
    if isinstance(target, dict):
        return target.get(part)
    if isinstance(target, list) and part.isascii() and part.isdecimal() and len(part) < 6:
        return target[int(part)] if int(part) < len(target) else None
    return None


def _asserted(schema: Mapping[str, Any]) -> Flat:
    """Return the assertions of one schema, older spellings in the present one."""
    flat = {k: v for k, v in schema.items() if k not in _COMBINE}
    if isinstance(flat.get("items"), list):
        flat["prefixItems"] = flat.pop("items")
        if "additionalItems" in flat:
            flat["items"] = flat["additionalItems"]
    flat.pop("additionalItems", None)
    if "const" in flat:
        value = flat.pop("const")
        within = flat.get("enum", [value])
        flat["enum"] = [value] if key_of(value) in map(key_of, within) else []
    if "type" in flat:
        flat["type"] = [flat["type"]] if isinstance(flat["type"], str) else flat["type"]
    return {k: v for k, v in flat.items() if not _annotates(k)}


def _annotates(keyword: str) -> bool:
    return keyword not in _ASSERTIONS


def _merged(a: Flat, b: Flat, path: str) -> Flat | None:
    """Return what says both; None where nothing fits both."""
    if not a or not b:
        return a or b
    merged = {**a, **b}
    for keyword in a.keys() & b.keys():
        if keyword in _MERGED and encode(a[keyword]) != encode(b[keyword]):
            merged[keyword] = _MERGED[keyword](a[keyword], b[keyword])
            if merged[keyword] is None:
                raise refusal(
                    path,
                    f"two of {keyword} at once, {str(a[keyword])[:50]} and {str(b[keyword])[:50]}",
                    "say it in one",
                )
    if "properties" in merged or "additionalProperties" in merged:
        merged["properties"] = dict(_properties(a, b))
        merged["additionalProperties"] = _both(_additional(a), _additional(b))
        if not a.keys() & {"additionalProperties"} and not b.keys() & {"additionalProperties"}:
            del merged["additionalProperties"]
    if a.keys() & _ITEMS and b.keys() & _ITEMS:
        merged |= _items(a, b)
    if merged.get("type") == [] or merged.get("enum") == []:
        return None
    return merged


def _both(a: Any, b: Any) -> Any:
    """Return a schema that says both, once it is flattened."""
    if a is True or b is True:
        return b if a is True else a
    if a is False or b is False:
        return False
    return a if encode(a) == encode(b) else {"allOf": [a, b]}


def _additional(flat: Flat) -> Any:
    return flat.get("additionalProperties", True)


def _properties(a: Flat, b: Flat) -> Iterator[tuple[str, Any]]:
    of_a, of_b = a.get("properties", {}), b.get("properties", {})
    for name in dict.fromkeys([*of_a, *of_b]):
        yield name, _both(of_a.get(name, _additional(a)), of_b.get(name, _additional(b)))


_ITEMS = {"items", "prefixItems"}


def _items(a: Flat, b: Flat) -> Flat:
    first, second = a.get("prefixItems", []), b.get("prefixItems", [])
    rest_a, rest_b = a.get("items", True), b.get("items", True)
    prefix = [
        _both(_at(first, i, rest_a), _at(second, i, rest_b))
        for i in range(max(len(first), len(second)))
    ]
    rest = _both(rest_a, rest_b)
    return {"prefixItems": prefix} | ({} if rest is True else {"items": rest})


def _at(items: list[Any], number: int, rest: Any) -> Any:
    return items[number] if number < len(items) else rest


def _types(a: list[str], b: list[str]) -> list[str]:
    both = [t for t in TYPES if t in a and t in b]
    whole = "integer" in a + b and "number" in a + b and "integer" not in both
    return ["integer", *both] if whole else both


def _values(a: list[Any], b: list[Any]) -> list[Any]:
    keys = set(map(key_of, b))
    return [value for value in a if key_of(value) in keys]


def _never(_: Any, __: Any) -> None:
    """Two that cannot be said in one."""


_MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "type": _types,
    "enum": _values,
    "required": lambda a, b: list(dict.fromkeys([*a, *b])),
    "uniqueItems": lambda a, b: a or b,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
    **dict.fromkeys(("multipleOf", "pattern", "format"), _never),
}
_ASSERTIONS = _MERGED.keys() | {"properties", "additionalProperties"} | _ITEMS


def required_of(flat: Flat) -> list[str]:
    """Return the names of properties that an object must have."""
    return list(dict.fromkeys(flat.get("required", ())))


def schema_of(flat: Flat, name: str) -> Any:
    """Return what the property *name* of an object is to fit."""
    return flat.get("properties", {}).get(name, _additional(flat))
