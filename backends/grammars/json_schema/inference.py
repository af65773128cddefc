"""Keywords that a schema leaves out, inferred for the generation of answers (`schema-infer`).

llama.cpp's converter (`common/json-schema-to-grammar.cpp`) infers them too. By the standard, a
schema without `type` allows values of all types, and an object without `additionalProperties` any
other properties, which models invent until their tokens are spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

from .document import Schema, resolve, schemas_of

__all__ = ("infer_keywords",)

_BASES = frozenset(("$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef", "id"))
"""Keywords because of which a reference may lead elsewhere than its pointer says."""
_TYPES = {
    "object": frozenset(("properties", "patternProperties", "additionalProperties")),
    "array": frozenset(("items", "prefixItems")),
    "string": frozenset(("pattern",)),
}
"""By type, the keywords that concern its values alone."""
_VALUES = frozenset(("$dynamicRef", "$recursiveRef", "$ref", "const", "enum", "type"))
"""Keywords that may say the type of a value."""
_OBJECTS = frozenset(
    ("dependencies", "dependentRequired", "patternProperties", "properties", "required")
)
_OTHERS = frozenset(
    (
        *("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords because of which the names that schemas list may not be all."""
_UNCLOSED = _OTHERS.difference(("patternProperties", "unevaluatedProperties"))
_UNCLOSED |= {"const", "enum"}
"""Keywords of a schema that stays as it is."""
_MAPS = ("patternProperties", "properties")
_WITHIN = (
    *("additionalItems", "additionalProperties", "items", "prefixItems", "unevaluatedItems"),
    *("unevaluatedProperties", *_MAPS),
)
"""Keywords whose schemas concern the items and properties of a value."""
_IN_PLACE = (
    *("$ref", "allOf", "anyOf", "oneOf", "then", "else", "dependencies", "dependentSchemas"),
)
"""Keywords whose schemas concern the value itself."""
_EXACT = ("if", "not", "contains", "propertyNames")


class _Use(IntEnum):
    """The use of a schema. The highest one counts for a schema with several uses."""

    WHOLE = 1
    """Each value that fits it may stand in the answer, so it may be narrowed."""
    PART = 2
    """Its values also fit other schemas. It stays as it is, but its items and properties do not."""
    EXACT = 3
    """With fewer values, it or others would allow answers that the document does not allow."""


def infer_keywords(document: Schema, infer: str) -> None:
    """Add keywords to *document* that it leaves out. *infer* is the value of `schema-infer`.

    `types`: a schema with keywords about objects, lists or texts alone has that type. `closed`: in
    addition, an object that lists properties has no others, as with `additionalProperties: false`,
    unless it says something about others.
    """
    _, *others = schemas_of(document)
    if infer == "none" or any(map(_BASES.intersection, others)):
        return
    for schema, use in _uses(document, _parts_for_types).values():
        if use is _Use.WHOLE:
            _add_type(schema)
    if infer == "closed":
        uses = _uses(document, _parts_for_closing)
        for schema, use in uses.values():
            if use is _Use.WHOLE and not _is_closed_by_parts(schema, document, uses):
                _close(schema, document)


_Uses = dict[int, tuple[Schema, _Use]]
"""Schemas with their uses, by their `id`."""
_Parts = Iterator[tuple[Any, _Use]]


def _uses(document: Schema, parts_of: Callable[[Schema, _Use, Schema], _Parts]) -> _Uses:
    """Return the schemas of *document* that have a use. *parts_of* yields those within or beside a
    schema, with their uses by this one, which is not exact.
    """
    found: _Uses = {}
    waiting: list[tuple[Any, _Use]] = [(document, _Use.WHOLE)]
    while waiting:
        schema, use = waiting.pop()
        if not isinstance(schema, dict) or found.get(id(schema), ({}, 0))[1] >= use:
            continue
        found[id(schema)] = schema, use
        if use is _Use.EXACT:
            waiting += ((part, use) for _, part in _parts(schema, document))
        else:
            waiting += parts_of(schema, use, document)
    return found


def _parts(schema: Schema, document: Schema) -> Iterator[tuple[str, Any]]:
    """Yield the schemas within or beside *schema*, each with its keyword, except definitions."""
    if "$ref" in schema:
        yield "$ref", resolve(document, schema["$ref"])
    for keyword in (*_WITHIN, *_IN_PLACE[1:], *_EXACT):
        value = schema.get(keyword)
        if isinstance(value, list):
            yield from ((keyword, part) for part in value)
        elif isinstance(value, dict) and keyword in (*_MAPS, "dependencies", "dependentSchemas"):
            yield from ((keyword, part) for part in value.values())
        elif value is not None:
            yield keyword, value


def _parts_for_types(schema: Schema, use: _Use, document: Schema) -> _Parts:
    alone = use if len(schema.get("allOf", ())) == 1 else _Use.PART
    # If an alternative of a `oneOf` has fewer values, another one may alone have the rest.
    uses = {"$ref": use, "allOf": alone, "anyOf": _Use.PART}
    for keyword, part in _parts(schema, document):
        yield part, _Use.WHOLE if keyword in _WITHIN else uses.get(keyword, _Use.EXACT)


def _add_type(schema: Schema) -> None:
    if _says_type(schema):
        return
    parts = [schema, *(part for part in schema.get("allOf", ()) if isinstance(part, dict))]
    names = [
        name
        for name, keywords in _TYPES.items()
        if any(not keywords.isdisjoint(part) for part in parts)
    ]
    if names:
        schema["type"] = names[0] if len(names) == 1 else names


def _says_type(schema: object) -> bool:
    """Return whether *schema* or a schema in place may say the type of a value."""
    if not isinstance(schema, dict):
        return False
    parts = (part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, ()))
    return not _VALUES.isdisjoint(schema) or any(map(_says_type, parts))


def _parts_for_closing(schema: Schema, use: _Use, document: Schema) -> _Parts:
    combined = _is_combined(schema)
    beside = _Use.PART if combined else use
    for keyword, part in _parts(schema, document):
        in_place = beside if keyword in _IN_PLACE else _Use.EXACT
        yield part, _Use.WHOLE if keyword in _WITHIN else in_place
    if combined and use is _Use.WHOLE:
        yield from ((part, _Use.PART) for part in _Properties(schema, document).shared)


def _is_combined(schema: Schema) -> bool:
    """Return whether *schema* has properties of its own, or those of several schemas."""
    in_place = [keyword for keyword in _IN_PLACE if keyword in schema]
    several = len(in_place) > 1 or len(schema.get("allOf", ())) > 1
    return several or not _OBJECTS.isdisjoint(schema)


def _is_closed_by_parts(schema: Schema, document: Schema, uses: _Uses) -> bool:
    if _is_combined(schema):
        return False
    _, use = uses.get(id(resolve(document, schema.get("$ref"))), ({}, _Use.WHOLE))
    return use is _Use.WHOLE


class _Properties:
    """The properties that a *schema*, and the schemas that its values fit too, name."""

    def __init__(self, schema: Schema, document: Schema):
        self.names = dict[str, list[Any]]()
        """By name, the schemas of a property."""
        self.are_listed = False
        """Whether some schema lists properties, and does not only require some."""
        self.are_all = True
        """Whether there are no others: no patterns, and no schemas of other documents."""
        self.are_certain = True
        """Whether no schema that names some applies only to some values."""
        self._document, self._seen = document, set[int]()
        self._add(schema)
        self.are_listed |= "patternProperties" in schema

    @property
    def shared(self) -> list[Any]:
        """The schemas of properties that several schemas describe."""
        return [part for parts in self.names.values() if len(parts) > 1 for part in parts]

    def _add(self, schema: Any) -> None:
        if schema is None:
            self.are_all = False
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        if self._seen and any(schema.get(keyword, False) is not False for keyword in _OTHERS):
            self.are_all = False
        self._seen.add(id(schema))
        self.are_listed |= "properties" in schema
        for name in _named_by(schema):
            self.names.setdefault(name, [])
        for name, part in schema.get("properties", {}).items():
            self.names[name].append(part)
        for keyword, part in _parts(schema, self._document):
            if keyword in _IN_PLACE:
                self.are_certain &= keyword in ("$ref", "allOf")
                self._add(part)


def _named_by(schema: Schema) -> Iterator[str]:
    yield from schema.get("properties", ())
    yield from schema.get("required", ())
    for keyword in ("dependentRequired", "dependencies"):
        for name, need in schema.get(keyword, {}).items():
            yield name
            yield from need if isinstance(need, list) else ()


def _close(schema: Schema, document: Schema) -> None:
    """Forbid the properties that neither *schema* nor the schemas that its values fit too name."""
    found, own = _Properties(schema, document), schema.get("properties", {})
    others = dict.fromkeys((name for name in found.names if name not in own), True)
    open_ended = "patternProperties" in schema
    if not (found.are_listed and found.are_all) or not _UNCLOSED.isdisjoint(schema):
        return
    if not found.are_certain and "unevaluatedProperties" in schema:
        return  # it forbids the names of schemas that do not apply
    if schema.get("unevaluatedProperties", False) is not False or (open_ended and others):
        return
    if not open_ended and schema.get("minProperties", 0) > len(found.names):
        return
    if "$ref" in schema:  # in older drafts, keywords beside it have no effect
        schema["allOf"] = [*schema.get("allOf", ()), {"$ref": schema.pop("$ref")}]
    if others:
        schema["properties"] = own | others
    schema["additionalProperties"] = False
