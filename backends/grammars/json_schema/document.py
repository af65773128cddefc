"""The documents of JSON schemas: their keywords, the references within them, and equal parts as one
definition.

llguidance compiles each part of a document, and an object with alternatives, with everything in it,
once for each alternative. It compiles a definition once, however many references it has.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from ...errors import InvalidArgument
from ...params.json_texts import escaped_name
from ...texts import shorten

__all__ = (
    "Keyword",
    "Schema",
    "copy_of",
    "keywords_of",
    "read_schema",
    "resolve",
    "schema_refusal",
    "schemas_of",
    "share_parts",
)


Schema = dict[str, Any]

LEVELS_MAX = 100
"""Objects and lists within each other; with 130 llguidance takes a second to refuse them."""
_ONE = frozenset(("additionalItems", "additionalProperties", "contains", "else", "if", "items"))
_ONE |= {"not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
_LISTS = frozenset(("allOf", "anyOf", "items", "oneOf", "prefixItems"))
_MAPS = frozenset(("$defs", "definitions", "dependencies", "dependentSchemas", "properties"))
_MAPS |= {"patternProperties"}
_CONTAINERS = (dict, list)
_SCHEMAS = _ONE | _LISTS | _MAPS
"""The keywords with schemas within them."""
_TEXTS = frozenset(("$comment", "description", "title"))
"""Texts for readers, often most of a document."""
_HINT = "remove or rephrase it; `schema-lenient` leaves out constraints that no grammar keeps"


class Keyword(msgspec.Struct, frozen=True):
    """A *keyword* of *schema*, which is part of a document; *path* is the keyword's own."""

    schema: Schema
    keyword: str
    path: str


def read_schema(text: str) -> Schema:
    """Return the document of *text*. The empty schema stands for any object, as in llama-server.

    :raises InvalidArgument: *text* is not a schema, is too deep, or no value fits it.
    """
    try:
        document = msgspec.json.decode(text)
        if not isinstance(document, dict | bool):
            raise schema_refusal("#", f"{shorten(document)} is not a schema", "send an object")
        if document is False:
            raise schema_refusal("#", "no value fits it")
        if document is True:
            return {"title": "anything"}
        if not document:
            return {"type": "object"}
        if _levels(document) > LEVELS_MAX:
            raise schema_refusal("#", f"it has more than {LEVELS_MAX} levels", "make it flatter")
        document.pop("x-guidance", None)  # llguidance would read options from it
        _remove_unused_definitions(document)
    except msgspec.DecodeError as exc:
        raise InvalidArgument(
            f"json-schema: not valid JSON: {exc}", hint='send a schema, such as {"type": "object"}'
        ) from None
    except RecursionError:
        raise schema_refusal("#", "it is too deep", "make it flatter") from None
    return document


def schema_refusal(path: str, cause: str, hint: str = _HINT) -> InvalidArgument:
    """Return the error for a schema that is refused at *path* because of *cause*."""
    return InvalidArgument(f"json-schema: {path}: {cause}", hint=hint, data={"path": path})


def keywords_of(schema: object) -> list[Keyword]:
    """Return the keywords of a schema, those of subschemas before the keyword that has these."""
    found: list[Keyword] = []
    _add_keywords(schema, "#", found)
    return found


def _add_keywords(schema: object, path: str, found: list[Keyword]) -> None:
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        at = f"{path}/{escaped_name(keyword)}"
        if keyword in _MAPS and isinstance(value, dict):
            for name, part in value.items():
                _add_keywords(part, f"{at}/{escaped_name(name)}", found)
        elif keyword in _LISTS and isinstance(value, list):
            for index, part in enumerate(value):
                _add_keywords(part, f"{at}/{index}", found)
        elif keyword in _ONE:
            _add_keywords(value, at, found)
        found.append(Keyword(schema, keyword, at))


def schemas_of(document: object) -> list[Schema]:
    """Return a schema and those within it, each one behind those that contain it."""
    found = [document] if isinstance(document, dict) else []
    for schema in found:  # those within it are appended meanwhile
        for keyword in _SCHEMAS.intersection(schema):
            value = schema[keyword]
            if keyword in _MAPS and isinstance(value, dict):
                found += (part for part in value.values() if isinstance(part, dict))
            elif keyword in _LISTS and isinstance(value, list):
                found += (part for part in value if isinstance(part, dict))
            elif keyword in _ONE and isinstance(value, dict):
                found.append(value)
    return found


def copy_of(schema: Any, noted: Container[str], notes: list[tuple[Schema, Schema, str]]) -> Any:
    """Return a schema whose keywords can be changed, without its texts for readers.

    For each of the *noted* keywords, the copied schema, the original and the keyword are added to
    *notes*, in the order of `keywords_of`.
    """
    if not isinstance(schema, dict):
        return schema
    copy = schema.copy()
    for keyword, value in schema.items():
        if keyword in _SCHEMAS:
            if isinstance(value, dict):
                if keyword in _MAPS:
                    copy[keyword] = {n: copy_of(part, noted, notes) for n, part in value.items()}
                elif keyword in _ONE:
                    copy[keyword] = copy_of(value, noted, notes)
            elif isinstance(value, list) and keyword in _LISTS:
                copy[keyword] = [copy_of(part, noted, notes) for part in value]
        elif keyword in _TEXTS and isinstance(value, str):
            del copy[keyword]
        if keyword in noted:
            notes.append((copy, schema, keyword))
    return copy


def resolve(document: Schema, reference: object) -> Any:
    """Return the schema that a *reference* within *document* points to; None if it is missing."""
    names = _names_in(reference)
    if names is None:
        return None
    found: Any = document
    for name in names:
        if (
            isinstance(found, list)
            and name.isdecimal()
            and len(name) < 6
            and int(name) < len(found)
        ):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found


def _names_in(reference: object) -> list[str] | None:
    """Return the parts of a JSON pointer; None for references of other forms."""
    if reference == "#":
        return []
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    parts = unquote(reference[2:]).split("/")
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def _remove_unused_definitions(document: Schema) -> None:
    """Remove definitions to which nothing refers, unless some reference may be to any of them."""
    maps = {k: v for k in ("$defs", "definitions") if isinstance(v := document.get(k), dict)}
    if not maps:
        return
    used: set[tuple[str, str]] = set()
    values: list[Any] = [{k: v for k, v in document.items() if k not in maps}]
    while values:
        value = values.pop()
        values += _containers_in(value)
        if not isinstance(value, dict) or "$ref" not in value:
            continue
        names = _names_in(value["$ref"])
        if names is None or names in (["$defs"], ["definitions"]):
            return
        place = tuple(names[:2])
        if len(place) == 2 and place not in used and place[1] in maps.get(place[0], {}):
            used.add((place[0], place[1]))
            values += _containers_in([maps[place[0]][place[1]]])
    for keyword, definitions in maps.items():
        document[keyword] = {n: v for n, v in definitions.items() if (keyword, n) in used}


def _levels(document: Schema) -> int:
    level, found = 0, list[Any]((document,))
    while found:
        level += 1
        found = [part for value in found for part in _containers_in(value)]
    return level


def _containers_in(value: dict[str, Any] | list[Any]) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value
    return [part for part in parts if isinstance(part, _CONTAINERS)]


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
