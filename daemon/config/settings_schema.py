"""The JSON schema of a configuration file, made of the tables of settings and of parameters.

Editors complete names with it, so that it has one spelling of each as a property and all others as
patterns. Numbers are numbers here: the texts of numbers that the environment needs are not in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ...backends.adapter_keys import ADAPTERS_MAX, SCALE_MAX
from ...backends.echo.options import EchoOptions
from ...backends.params import PARAMETERS
from ...backends.params.parameters_page import json_schema as parameters_schema
from .access_settings import ACCESS_KEYS, RULES_MAX
from .declaration import Schema
from .forms import TEXT
from .model_settings import ECHO_HIGH, MODEL_NAME
from .settings import SETTINGS


def config_schema() -> Schema:
    """Return the schema."""
    own = {name: setting.json_schema() for name, setting in SETTINGS.items()}
    for name, setting in SETTINGS.items():
        own[name]["description"] += f" (a change takes effect {setting.applies})"
    rule = {name: key.json_schema() for name, key in ACCESS_KEYS.items()}
    parameters = parameters_schema()["properties"]
    spellings = {p.name: [p.name, *p.aliases] for p in PARAMETERS}
    shared = {name: {"$ref": f"#/$defs/{name}"} for name in parameters}
    model = _table(shared, spellings) | {"if": _IS_ECHO, "then": _OF_ECHO, "else": _OF_LLAMA}
    model["properties"] = {**_MODEL, **shared}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration of inferd",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "daemon": _table(own),
            "defaults": _table(shared, spellings),
            "models": {
                "type": "object",
                "propertyNames": {"pattern": f"^{MODEL_NAME.pattern}$"},
                "additionalProperties": model,
            },
            "access": {
                "type": "object",
                "maxProperties": RULES_MAX,
                "propertyNames": {"pattern": f"^{MODEL_NAME.pattern}$"},
                "additionalProperties": _table(rule),
            },
        },
        "$defs": parameters,
    }


def _table(properties: Schema, spellings: dict[str, list[str]] | None = None) -> Schema:
    """Return the schema of a table: no other key, and none in two spellings."""
    spellings = spellings or {name: [name] for name in properties}
    known = {name: _forms(spelled) for name, spelled in spellings.items()}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "patternProperties": {
            f"^({'|'.join(others)})$": properties[name]
            for name, forms in known.items()
            if (others := [form for form in forms if form != name])
        },
        "dependentSchemas": {
            form: {"properties": dict.fromkeys(set_aside, False)}
            for forms in known.values()
            for form, set_aside in _before(forms)
        },
    }


def _forms(spellings: Iterable[str]) -> list[str]:
    """Return each spelling with hyphens and with underscores."""
    both = ((spelling, spelling.replace("-", "_")) for spelling in spellings)
    return list(dict.fromkeys(itertools.chain.from_iterable(both)))


def _before(forms: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each form with those before it."""
    for index, form in enumerate(forms[1:], 1):
        yield form, forms[:index]


# A model's own keys.

_ADAPTER: Schema = {
    "anyOf": [
        TEXT,
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["file"],
            "properties": {
                "file": TEXT,
                "scale": {"type": "number", "minimum": -SCALE_MAX, "maximum": SCALE_MAX},
            },
        },
    ]
}


def _echo() -> Schema:
    fields = msgspec.structs.fields(EchoOptions)
    properties = {field.name.replace("_", "-"): _echo_value(field.type) for field in fields}
    return _table(properties)


def _echo_value(kind: Any) -> Schema:
    found = msgspec.json.schema(kind)
    bounded = found.get("type") in ("integer", "number")
    return ({"minimum": -1, "maximum": ECHO_HIGH} if bounded else {}) | found


_MODEL: Schema = {
    "file": TEXT | {"description": "a GGUF file, beside this one or in models-dir"},
    "backend": {"enum": ["llama", "echo"], "default": "llama"},
    "echo": _echo(),
    "adapters": {
        "type": "object",
        "maxProperties": ADAPTERS_MAX,
        "propertyNames": {"pattern": f"^{MODEL_NAME.pattern}$"},
        "additionalProperties": _ADAPTER,
        "description": "LoRA files by name, each a file or a file and a scale",
    },
}
_IS_ECHO: Schema = {"properties": {"backend": {"const": "echo"}}, "required": ["backend"]}
_OF_ECHO: Schema = {"properties": {"file": False}}
_OF_LLAMA: Schema = {"properties": {"echo": {"maxProperties": 0}}}
