"""The JSON schema of the parameters, and the texts that describe them in tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from .parameter_table import PARAMETERS, SAMPLERS, Kind, Parameter

_TEXT_OR_LIST = ["string", "array"]
_TYPES: dict[Kind, tuple[str, dict[str, Any]]] = {
    "int": ("int", {"type": "integer"}),
    "float": ("float", {"type": "number"}),
    "bool": ("bool", {"type": "boolean"}),
    "text": ("text", {"type": "string"}),
    "texts": ("text, or array of texts", {"type": _TEXT_OR_LIST, "items": {"type": "string"}}),
    "samplers": (
        "array of names, or letters",
        {"type": _TEXT_OR_LIST, "items": {"enum": list(SAMPLERS)}},
    ),
    "biases": ("array of pairs, or map", {"type": ["array", "object"]}),
    "shares": (
        "array of numbers, or text as 3,2",
        {"type": _TEXT_OR_LIST, "items": {"type": "number"}},
    ),
    "tokens": (
        "int, or array of ints",
        {"type": ["integer", "array"], "items": {"type": "integer", "minimum": 0}},
    ),
    "triggers": (
        "text, or array of texts, pairs and objects",
        {"type": ["string", "array", "object"]},
    ),
    "schema": ("object, or its JSON text", {"type": ["object", "boolean", "string"]}),
    "structural-tag": ("object, or its JSON text", {"type": ["object", "string"]}),
    "choice": ("name", {"type": "string"}),
    "tools": ("array of tools, or text", {"type": _TEXT_OR_LIST, "items": {"type": "object"}}),
    "tool-choice": ("name, or map", {"type": ["string", "object"]}),
    "arguments": ("map, or text", {"type": ["string", "object"]}),
    "answer-form": ("name, or map", {"type": ["string", "object"]}),
    "scales": ("map of numbers, or array", {"type": ["object", "array", "null"]}),
}
"""For each kind, the words for its type in tables, and its JSON schema."""


def json_schema(parameters: Sequence[Parameter] = PARAMETERS) -> dict[str, Any]:
    """Return a JSON schema of parameters by name; it does not allow for other spellings."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "parameters of inferd",
        "type": "object",
        "properties": {p.name: _property(p) for p in parameters},
    }


def _property(p: Parameter) -> dict[str, Any]:
    bounds = {"minimum": p.low, "maximum": p.high}
    finite = {
        key: int(value) if value == int(value) else value
        for key, value in bounds.items()
        if math.isfinite(value)
    }
    choices = {"enum": list(p.choices)} if p.choices else {}
    return {**_TYPES[p.kind][1], **choices, **finite, "default": p.default, "description": p.doc}


def columns(p: Parameter) -> tuple[str, str, str, str, str, str, str]:
    """Return name, level, other spellings, type, default, range and meaning as texts."""
    bounds = f"{p.low:.10g} … {p.high:.10g}" if p.kind in ("int", "float") else ""
    default = json.dumps(p.default)
    return p.name, p.level, ", ".join(p.aliases), _TYPES[p.kind][0], default, bounds, p.doc
