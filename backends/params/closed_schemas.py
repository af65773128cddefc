"""JSON schemas whose objects have only the properties that they list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ("close_schema",)

_PLAIN = frozenset(
    (
        *("type", "properties", "required", "title", "description", "default", "examples"),
        *("$schema", "$defs", "definitions", "$id", "$comment"),
    )
)
"""Keywords of an object that allow for no properties beside `properties`."""
_COMBINING = ("allOf", "unevaluatedProperties", "if", "not", "dependentSchemas", "$dynamicRef")
"""With one of these anywhere, an object may get properties from elsewhere."""
_MAPS, _LISTS = ("properties", "$defs", "definitions"), ("anyOf", "oneOf", "prefixItems")
_LEVELS_MAX = 100


def close_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return *schema* with `additionalProperties: false` in each object that lists its properties
    and has no keyword about others.

    By JSON Schema, such an object may have any other properties, and models invent them until
    their tokens are spent. llama-server closes these objects too.
    """
    text = msgspec.json.encode(schema)
    if any(b'"%s":' % keyword.encode() in text for keyword in _COMBINING):
        return dict(schema)
    closed: dict[str, Any] = _close(schema, _LEVELS_MAX)
    return closed


def _close(schema: Any, levels: int) -> Any:
    if not isinstance(schema, Mapping) or not levels:
        return schema
    closed = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, Mapping):
            closed[key] = {name: _close(part, levels - 1) for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            closed[key] = [_close(part, levels - 1) for part in value]
        elif key == "items":
            closed[key] = _close(value, levels - 1)
    if _lists_all(schema):
        closed["additionalProperties"] = False
    return closed


def _lists_all(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and schema.keys() <= _PLAIN
    )
