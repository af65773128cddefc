"""Rewriting of keywords that llguidance refuses by others that it keeps.

A value that fits the rewritten schema fits the schema, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .document import Keyword, Schema, copy_of, keywords_of
from .exclusive import SchemaComparison

__all__ = (
    "CONTAINER_RULES",
    "FORMATS",
    "LOGIC_RULES",
    "Place",
    "Rule",
    "VALUE_RULES",
    "add_schema",
    "allows_type",
    "is_true",
    "rewritten_schema",
    "unkept_keywords",
)


class Place(NamedTuple):
    """A *schema* to rewrite, its *original* form, and the comparison of the original schemas.

    The schemas within it were rewritten before, and may allow fewer values than their originals.
    """

    schema: Schema
    original: Schema
    comparison: SchemaComparison


Rule = Callable[[Place], None]
"""Rewrites a keyword of the schema in a place."""


def add_schema(schema: Schema, other: Schema) -> None:
    """Let *schema* also require what *other* does."""
    if any(keyword in schema for keyword in other):
        parts = schema.get("allOf")
        schema["allOf"] = [*(parts if isinstance(parts, list) else ()), other]
    else:
        schema |= other


def allows_type(schema: Schema, kind: str) -> bool:
    """Return whether values of the type *kind* may fit *schema*, by its `type`."""
    named = schema.get("type", kind)
    return kind in (named if isinstance(named, list) else [named])


def is_true(schema: object) -> bool:
    """Return whether all values fit *schema*."""
    return schema is True or schema == {}


_KEPT_FORMATS = (
    *("date", "time", "date-time", "duration", "uuid", "ipv4", "ipv6", "hostname", "email"),
    "uri",
)
_REFUSED_FORMATS = ("idn-hostname", "uri-template", "regex")
_PATH = r"[A-Za-z0-9._~!$&'()*+,;=@-]"
_FORMAT_PATTERNS = {
    "json-pointer": r"^(/([^/~]|~[01])*)*$",
    "relative-json-pointer": r"^(0|[1-9][0-9]*)(#|(/([^/~]|~[01])*)*)$",
    "uri-reference": (
        rf"^(https?://[A-Za-z0-9.-]+(:[0-9]{{1,5}})?(/({_PATH}|:)*)*|/|/?{_PATH}+(/({_PATH}|:)*)*)?"
        rf"(\?({_PATH}|[:/?])*)?(#({_PATH}|[:/?])*)?$"
    ),
}
_FORMAT_PATTERNS["iri-reference"] = _FORMAT_PATTERNS["uri-reference"]
_NARROWER_FORMATS = {"iri": "uri", "idn-email": "email"}
FORMATS = dict.fromkeys((*_KEPT_FORMATS, *_FORMAT_PATTERNS, *_NARROWER_FORMATS), True)
FORMATS |= dict.fromkeys(_REFUSED_FORMATS, False)
"""The formats that the standard defines, and whether they are kept; others are annotations."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems")
_OLD_DRAFT = re.compile(r"draft-0([467])")
_NEW_DRAFT = re.compile(r"draft/(2019-09|2020-12)")
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that answers do not have; llguidance would leave them out of a text."""


def _format(place: Place) -> None:
    schema = place.schema
    name = schema["format"]
    if not isinstance(name, str):
        return
    if name not in FORMATS or not allows_type(schema, "string"):
        del schema["format"]
    elif name in _NARROWER_FORMATS:
        schema["format"] = _NARROWER_FORMATS[name]
    elif name in _FORMAT_PATTERNS:
        del schema["format"]
        add_schema(schema, {"pattern": _FORMAT_PATTERNS[name]})


def _count(keyword: str) -> Rule:
    def rewrite(place: Place) -> None:
        """Write a whole number without a fraction; llguidance refuses 2.0."""
        value = place.schema[keyword]
        if isinstance(value, float) and value.is_integer():
            place.schema[keyword] = int(value)

    return rewrite


def _schema_name(place: Place) -> None:
    """Write the name of the draft as llguidance knows it; other dialects are read as the last."""
    old = _OLD_DRAFT.search(str(place.schema["$schema"]))
    new = _NEW_DRAFT.search(str(place.schema["$schema"]))
    if old is not None:
        place.schema["$schema"] = f"http://json-schema.org/draft-0{old[1]}/schema#"
    elif new is not None:
        place.schema["$schema"] = f"https://json-schema.org/draft/{new[1]}/schema"
    else:
        del place.schema["$schema"]


def _const(place: Place) -> None:
    if not _can_be_written(place.schema["const"]):
        del place.schema["const"]
        add_schema(place.schema, {"enum": []})


def _enum(place: Place) -> None:
    values = place.schema["enum"]
    if isinstance(values, list):
        place.schema["enum"] = [value for value in values if _can_be_written(value)]


def _can_be_written(value: Any) -> bool:
    """Return whether the texts in *value* have only characters that need no escape with `u`."""
    if isinstance(value, str):
        return _UNWRITTEN.search(value) is None
    items = value.values() if isinstance(value, dict) else value
    return all(map(_can_be_written, items)) if isinstance(value, dict | list) else True


VALUE_RULES: dict[str, Rule] = {
    "$schema": _schema_name,
    "const": _const,
    "enum": _enum,
    "format": _format,
    **{keyword: _count(keyword) for keyword in _COUNTS},
}


_IN_PLACE = (
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"),
    *("contains", "propertyNames"),
)
"""Keywords with which the evaluated properties or items depend on other schemas."""
_DEPENDENCIES_MAX = 4
"""Dependencies that are rewritten; each one doubles the alternatives."""


def _unique_items(place: Place) -> None:
    schema = place.schema
    most = schema.get("maxItems")
    short = isinstance(most, int | float) and most <= 1
    if schema["uniqueItems"] is False or short or not allows_type(schema, "array"):
        del schema["uniqueItems"]


def _contains(place: Place) -> None:
    schema = place.schema
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        for keyword in ("contains", "minContains"):
            del schema[keyword]


def _contains_bound(keyword: str) -> Rule:
    def remove(place: Place) -> None:
        if "contains" not in place.schema:
            del place.schema[keyword]

    return remove


def _dependencies(keyword: str) -> Rule:
    """Return the rule for a map from properties to properties that they need, or to schemas."""

    def rewrite(place: Place) -> None:
        schema = place.schema
        found, required = schema[keyword], schema.get("required", [])
        if not isinstance(found, dict) or not isinstance(required, list):
            return
        needs = {name: _need(value) for name, value in found.items()}
        needs = {name: need for name, need in needs.items() if not _met(need, required)}
        if len(needs) > _DEPENDENCIES_MAX or None in needs.values():
            return
        del schema[keyword]
        for name, need in needs.items():
            without = {"properties": {name: False}}
            add_schema(
                schema, {"allOf": [need if name in required else {"anyOf": [without, need]}]}
            )

    return rewrite


def _need(value: object) -> Any:
    """Return the schema that an object must fit if it has a property with *value* in that map; None
    if *value* is invalid.
    """
    if isinstance(value, list):
        return {"required": value}
    return value if isinstance(value, dict | bool) else None


def _met(need: Any, required: list[Any]) -> bool:
    """Return whether an object with the *required* properties surely fits *need*."""
    if isinstance(need, dict) and set(need) == {"required"} and isinstance(need["required"], list):
        return all(name in required for name in need["required"])
    return is_true(need)


def _property_names(place: Place) -> None:
    """Forbid all properties except those in a list of names, or those of a pattern."""
    schema, names = place.schema, place.schema["propertyNames"]
    if is_true(names) or names == {"type": "string"} or not allows_type(schema, "object"):
        del schema["propertyNames"]
        return
    depending = ("patternProperties", "unevaluatedProperties")
    if not isinstance(names, dict) or any(keyword in place.original for keyword in depending):
        return
    others, named = schema.get("additionalProperties", True), schema.get("properties", {})
    keywords = set(names) - {"title", "description"}
    keywords -= {"type"} if names.get("type") == "string" else set()
    if keywords == {"enum"} and isinstance(names["enum"], list) and isinstance(named, dict):
        allowed = [name for name in names["enum"] if isinstance(name, str)]
        known = {name: part if name in allowed else False for name, part in named.items()}
        schema["properties"] = known | {n: others for n in allowed if n not in known}
        schema["additionalProperties"] = False
        del schema["propertyNames"]
    elif keywords == {"pattern"} and isinstance(names["pattern"], str) and not named:
        schema["patternProperties"] = {names["pattern"]: others}
        schema["additionalProperties"] = False
        del schema["propertyNames"]


def _unevaluated(keyword: str, evaluating: str) -> Rule:
    """Return the rule for *keyword*, which applies to what no other keyword evaluates. If there is
    no other such keyword, *evaluating* means the same and replaces it.
    """

    def rewrite(place: Place) -> None:
        schema, original = place.schema, place.original
        if is_true(schema[keyword]) or isinstance(original.get(evaluating), dict | bool):
            del schema[keyword]
        elif not any(name in original for name in (*_IN_PLACE, evaluating)):
            schema[evaluating] = schema.pop(keyword)

    return rewrite


def _min_properties(place: Place) -> None:
    schema = place.schema
    least, required = schema["minProperties"], schema.get("required")
    count = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and 0 <= least <= count:
        del schema["minProperties"]


def _max_properties(place: Place) -> None:
    schema = place.schema
    most, named = schema["maxProperties"], schema.get("properties")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed and isinstance(most, int | float) and isinstance(named, dict) and len(named) <= most:
        del schema["maxProperties"]


CONTAINER_RULES: dict[str, Rule] = {
    "uniqueItems": _unique_items,
    "contains": _contains,
    "minContains": _contains_bound("minContains"),
    "maxContains": _contains_bound("maxContains"),
    "dependentRequired": _dependencies("dependentRequired"),
    "dependentSchemas": _dependencies("dependentSchemas"),
    "dependencies": _dependencies("dependencies"),
    "propertyNames": _property_names,
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _unevaluated("unevaluatedItems", "items"),
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
}


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


_UNKEPT = frozenset(("contains", "dependentRequired", "dependentSchemas", "if", "not", "oneOf"))
_UNKEPT |= {"propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
_UNKEPT |= {"$dynamicRef", "$recursiveRef"}
"""Keywords that no grammar has."""


def _remove(keyword: str) -> Rule:
    def remove(place: Place) -> None:
        del place.schema[keyword]

    return remove


_RULES = {
    **VALUE_RULES,
    **CONTAINER_RULES,
    **LOGIC_RULES,
    "deprecated": _remove("deprecated"),
    "contentSchema": _remove("contentSchema"),
}


_NOTED = _UNKEPT.union(_RULES)


def rewritten_schema(document: Schema) -> Schema:
    """Return *document* with those keywords rewritten that others can express, and without texts
    for readers.
    """
    return _rewrite(document)[0]


def unkept_keywords(document: Schema) -> list[Keyword]:
    """Return the keywords of *document* that no grammar keeps, and that others cannot express.

    Keywords within another returned one are left out, unless that is a `oneOf`.
    """
    _, schemas = _rewrite(document)
    noted = (k for k in keywords_of(document) if k.keyword in _NOTED)
    found = [
        original
        for original, schema in zip(noted, schemas, strict=True)
        if original.keyword in _UNKEPT and original.keyword in schema
    ]
    # Without a condition, its branches have no effect.
    conditions = [o.path.removesuffix("if") for o in found if o.keyword == "if"]
    branches = {path + branch for path in conditions for branch in ("then", "else")}
    left_out = branches | {o.path for o in found if o.keyword != "oneOf"}
    return [o for o in found if not any(map(left_out.__contains__, _paths_above(o.path)))]


def _paths_above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _rewrite(document: Schema) -> tuple[Schema, list[Schema]]:
    """Return the rewritten document, and the rewritten schemas with the noted keywords."""
    comparison, notes = SchemaComparison(document), list[tuple[Schema, Schema, str]]()
    copy: Schema = copy_of(document, _NOTED, notes)
    for schema, original, keyword in notes:
        rule = _RULES.get(keyword)
        if rule is not None and keyword in schema:
            rule(Place(schema, original, comparison))
    return copy, [schema for schema, _, _ in notes]
