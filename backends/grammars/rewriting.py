"""Rewriting of keywords that llguidance refuses by others that it keeps.

A value that fits the rewritten schema fits the schema, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from .exclusive import Comparison
from .schema import Keyword, Schema, keywords_of

__all__ = ("rewritten_schema", "unkept_keywords")

_IN_PLACE = (
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not"),
    *("contains", "propertyNames"),
)
"""Keywords with which the evaluated properties or items depend on other schemas."""
_UNKEPT = frozenset(("contains", "dependentRequired", "dependentSchemas", "if", "not", "oneOf"))
_UNKEPT |= {"propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"}
_UNKEPT |= {"$dynamicRef", "$recursiveRef"}
"""Keywords that no grammar has."""
_DEPENDENCIES_MAX = 4
"""Dependencies that are rewritten: each one doubles the alternatives."""
_FORBIDDEN_MAX = 8
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


_OLD_DRAFT = re.compile(r"draft-0([467])")
_NEW_DRAFT = re.compile(r"draft/(2019-09|2020-12)")
_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that answers do not have; llguidance would leave them out of a text."""


class _Place(NamedTuple):
    """A *schema* to rewrite, as it was (*original*), and the comparison of the original schemas.

    Schemas within it were rewritten before: values that did not fit them may be missing there.
    """

    schema: Schema
    original: Schema
    comparison: Comparison


_Rule = Callable[[_Place], None]


def rewritten_schema(document: Schema) -> Schema:
    """Return *document* with those keywords rewritten that others can express."""
    return _rewrite(document)[0]


def unkept_keywords(document: Schema) -> list[Keyword]:
    """Return the keywords of *document* that no grammar keeps, and that others cannot express.

    Those within another one of them are left out, except within a `oneOf`.
    """
    _, places = _rewrite(document)
    found = [o for k, o in places if k.keyword in _UNKEPT and k.keyword in k.schema]
    # Without a condition, its branches have no effect.
    conditions = [o.path.removesuffix("if") for o in found if o.keyword == "if"]
    branches = {path + branch for path in conditions for branch in ("then", "else")}
    left_out = branches | {o.path for o in found if o.keyword != "oneOf"}
    return [o for o in found if not any(map(left_out.__contains__, _paths_above(o.path)))]


def _paths_above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _rewrite(document: Schema) -> tuple[Schema, list[tuple[Keyword, Keyword]]]:
    """Return the rewritten document, and its keywords before rewriting with the original ones."""
    comparison, copy = Comparison(document), _copied(document)
    places = list(zip(keywords_of(copy), keywords_of(document), strict=True))
    for found, original in places:
        rule = _RULES.get(found.keyword)
        if rule is not None and found.keyword in found.schema:
            rule(_Place(found.schema, original.schema, comparison))
    return copy, places


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _one_of(place: _Place) -> None:
    """Write `anyOf` for alternatives that exclude each other."""
    schema, alternatives = place.schema, place.schema["oneOf"]
    added = place.comparison.exclusions(place.original)
    if added is None:
        return
    parts = zip(alternatives, added, strict=True)
    del schema["oneOf"]
    _add(schema, {"anyOf": [{"allOf": [part, more]} if more else part for part, more in parts]})


def _add(schema: Schema, other: Schema) -> None:
    """Let *schema* also require what *other* does."""
    if any(keyword in schema for keyword in other):
        parts = schema.get("allOf")
        schema["allOf"] = [*(parts if isinstance(parts, list) else ()), other]
    else:
        schema |= other


def _unique_items(place: _Place) -> None:
    schema = place.schema
    most = schema.get("maxItems")
    short = isinstance(most, int | float) and most <= 1
    if schema["uniqueItems"] is False or short or not _allows(schema, "array"):
        del schema["uniqueItems"]


def _allows(schema: Schema, kind: str) -> bool:
    named = schema.get("type", kind)
    return kind in (named if isinstance(named, list) else [named])


def _contains(place: _Place) -> None:
    schema = place.schema
    if schema.get("minContains") == 0 and "maxContains" not in schema:
        for keyword in ("contains", "minContains"):
            del schema[keyword]


def _contains_bound(keyword: str) -> _Rule:
    def remove(place: _Place) -> None:
        if "contains" not in place.schema:
            del place.schema[keyword]

    return remove


def _conditional(place: _Place) -> None:
    """Remove conditions without consequences, and apply those of a condition that is decided."""
    schema = place.schema
    condition = schema.get("if")
    for branch, applies in (("then", True), ("else", False)):
        if "if" not in schema or _is_true(schema.get(branch)):
            schema.pop(branch, None)
        elif condition is applies and branch in schema:
            _add(schema, {"allOf": [schema.pop(branch)]})
        elif condition is not applies and isinstance(condition, bool):
            schema.pop(branch, None)
    if "then" not in schema and "else" not in schema:
        schema.pop("if", None)


def _is_true(schema: object) -> bool:
    return schema is True or schema == {}


def _not(place: _Place) -> None:
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
        _add(schema, opposite)


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


def _dependencies(keyword: str) -> _Rule:
    """Return the rule for a map from properties to those that they need, or to schemas."""

    def rewrite(place: _Place) -> None:
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
            _add(schema, {"allOf": [need if name in required else {"anyOf": [without, need]}]})

    return rewrite


def _need(value: object) -> Any:
    """Return the schema of an object with a property on which others depend."""
    if isinstance(value, list):
        return {"required": value}
    return value if isinstance(value, dict | bool) else None


def _met(need: Any, required: list[Any]) -> bool:
    """Return whether an object with the *required* properties surely fits *need*."""
    if isinstance(need, dict) and set(need) == {"required"} and isinstance(need["required"], list):
        return all(name in required for name in need["required"])
    return _is_true(need)


def _property_names(place: _Place) -> None:
    """Forbid all properties but those of a list of names, or of a pattern."""
    schema, names = place.schema, place.schema["propertyNames"]
    if _is_true(names) or names == {"type": "string"} or not _allows(schema, "object"):
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


def _unevaluated(keyword: str, evaluating: str) -> _Rule:
    """Return the rule for what no other keyword evaluates: if none is in place, the additional."""

    def rewrite(place: _Place) -> None:
        schema, original = place.schema, place.original
        if _is_true(schema[keyword]) or isinstance(original.get(evaluating), dict | bool):
            del schema[keyword]
        elif not any(name in original for name in (*_IN_PLACE, evaluating)):
            schema[evaluating] = schema.pop(keyword)

    return rewrite


def _min_properties(place: _Place) -> None:
    schema = place.schema
    least, required = schema["minProperties"], schema.get("required")
    count = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int | float) and 0 <= least <= count:
        del schema["minProperties"]


def _max_properties(place: _Place) -> None:
    schema = place.schema
    most, named = schema["maxProperties"], schema.get("properties")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed and isinstance(most, int | float) and isinstance(named, dict) and len(named) <= most:
        del schema["maxProperties"]


def _format(place: _Place) -> None:
    schema = place.schema
    name = schema["format"]
    if not isinstance(name, str):
        return
    if name not in FORMATS or not _allows(schema, "string"):
        del schema["format"]
    elif name in _NARROWER_FORMATS:
        schema["format"] = _NARROWER_FORMATS[name]
    elif name in _FORMAT_PATTERNS:
        del schema["format"]
        _add(schema, {"pattern": _FORMAT_PATTERNS[name]})


def _schema_name(place: _Place) -> None:
    """Write the name of the draft as llguidance knows it; other dialects are read as the last."""
    old = _OLD_DRAFT.search(str(place.schema["$schema"]))
    new = _NEW_DRAFT.search(str(place.schema["$schema"]))
    if old is not None:
        place.schema["$schema"] = f"http://json-schema.org/draft-0{old[1]}/schema#"
    elif new is not None:
        place.schema["$schema"] = f"https://json-schema.org/draft/{new[1]}/schema"
    else:
        del place.schema["$schema"]


def _const(place: _Place) -> None:
    if not _can_be_written(place.schema["const"]):
        del place.schema["const"]
        _add(place.schema, {"enum": []})


def _enum(place: _Place) -> None:
    values = place.schema["enum"]
    if isinstance(values, list):
        place.schema["enum"] = [value for value in values if _can_be_written(value)]


def _can_be_written(value: Any) -> bool:
    """Return whether the texts in *value* have only characters that need no escape with `u`."""
    if isinstance(value, str):
        return _UNWRITTEN.search(value) is None
    items = value.values() if isinstance(value, dict) else value
    return all(map(_can_be_written, items)) if isinstance(value, dict | list) else True


def _remove(keyword: str) -> _Rule:
    def remove(place: _Place) -> None:
        del place.schema[keyword]

    return remove


_RULES: dict[str, _Rule] = {
    "$schema": _schema_name,
    "const": _const,
    "enum": _enum,
    "oneOf": _one_of,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "minContains": _contains_bound("minContains"),
    "maxContains": _contains_bound("maxContains"),
    "if": _conditional,
    "then": _conditional,
    "else": _conditional,
    "not": _not,
    "dependentRequired": _dependencies("dependentRequired"),
    "dependentSchemas": _dependencies("dependentSchemas"),
    "dependencies": _dependencies("dependencies"),
    "propertyNames": _property_names,
    "unevaluatedProperties": _unevaluated("unevaluatedProperties", "additionalProperties"),
    "unevaluatedItems": _unevaluated("unevaluatedItems", "items"),
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
    "format": _format,
    "deprecated": _remove("deprecated"),
    "contentSchema": _remove("contentSchema"),
}
