"""Rules for objects and lists."""

from __future__ import annotations

from typing import Any

from .place import Place, Rule, add_schema, allows_type, is_true

__all__ = ("CONTAINER_RULES",)


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
