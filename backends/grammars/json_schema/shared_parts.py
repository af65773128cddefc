"""Equal parts of a document, as one definition.

llguidance compiles each part of a document, and an object with alternatives, with everything in it,
once for each alternative. It compiles a definition once, however many references it has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from .document import Schema

__all__ = ("share_parts",)

_NAME = "shared-part-"
_REFERENCE = re.compile(r"#(/(\$defs|definitions|patternProperties|properties)/[^/]+)?")
"""References that stay right, because they lead into no part that becomes a definition."""
_BASES = frozenset(("$anchor", "$dynamicAnchor", "$dynamicRef", "$id", "$recursiveRef", "id"))
"""Keywords because of which references may start elsewhere."""
_SHARED = frozenset(("additionalProperties", "anyOf", "items", "patternProperties", "properties"))
"""Keywords of parts that are worth a definition."""


def share_parts(document: Schema, schemas: Sequence[Schema]) -> bool:
    """Write parts that are equal, or that all alternatives of an object have, once as definitions.
    Return whether *document* was changed. *schemas* are the document and those within it, each one
    behind those that contain it.

    The language stays the same. llguidance refuses a few documents only if they have shared parts:
    those with a property that may be missing and that no value fits.
    """
    definitions = document.get("$defs", {})
    if not isinstance(definitions, dict) or any(n.startswith(_NAME) for n in definitions):
        return False
    if not all(map(_has_whole_reference, schemas)) or any(map(_BASES.intersection, schemas[1:])):
        return False
    numbers, uses = dict[bytes, int](), Counter[int]()
    places: list[tuple[dict[str, Any], str, Schema, int]] = []
    for schema in reversed(schemas):  # so that those within a part were replaced before
        times = 2 if _has_plain_alternatives(schema) else 1
        for holder, name, part in _parts(schema):
            number = numbers.setdefault(msgspec.json.encode(part), len(numbers))
            uses[number] += times
            places.append((holder, name, part, number))
            holder[name] = {"$ref": f"#/$defs/{_NAME}{number}"}
    shared: Schema = {}
    for holder, name, part, number in places:
        if uses[number] > 1:
            shared[f"{_NAME}{number}"] = part
        else:
            holder[name] = part
    if shared:
        document["$defs"] = definitions | shared
    return bool(shared)


def _has_whole_reference(schema: Schema) -> bool:
    reference = schema.get("$ref", "#")
    return isinstance(reference, str) and _REFERENCE.fullmatch(reference) is not None


def _parts(schema: Schema) -> list[tuple[dict[str, Any], str, Schema]]:
    """Return the parts of *schema* that are worth a definition, each with its holder and its name
    there.
    """
    holders = [
        h for k in ("properties", "patternProperties") if isinstance(h := schema.get(k), dict)
    ]
    named = [(holder, name, part) for holder in holders for name, part in holder.items()]
    named += [(schema, k, schema[k]) for k in ("items", "additionalProperties") if k in schema]
    return [
        place for place in named if isinstance(place[2], dict) and not _SHARED.isdisjoint(place[2])
    ]


def _has_plain_alternatives(schema: Schema) -> bool:
    """Return whether *schema* has alternatives, and they do not change its properties."""
    if "patternProperties" in schema or ("anyOf" not in schema and "allOf" not in schema):
        return False
    beside = {keyword: schema[keyword] for keyword in ("anyOf", "allOf") if keyword in schema}
    return any(len(parts) > 1 for parts in _alternatives(beside)) and _is_plain(beside)


def _alternatives(schema: object) -> Iterator[list[Any]]:
    if isinstance(schema, dict):
        parts = schema.get("anyOf")
        if isinstance(parts, list):
            yield parts
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) else ():
            yield from _alternatives(part)


def _is_plain(schema: object) -> bool:
    """Return whether *schema* only requires and forbids properties of objects."""
    if not isinstance(schema, dict):
        return False
    for keyword, value in schema.items():
        match keyword, value:
            case (("allOf" | "anyOf"), list()):
                plain = all(map(_is_plain, value))
            case "properties", dict():
                plain = all(part is False for part in value.values())
            case _:
                plain = keyword in ("required", "type")
        if not plain:
            return False
    return True
