"""The JSON schema of a configuration file, made of the tables of settings and of parameters.

Editors complete names with it, so that it has one spelling of each as a property and all others as
patterns. Numbers are numbers here: the texts of numbers that the environment needs are not in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...backends.adapter_keys import ADAPTERS_MAX, SCALE_MAX
from ...backends.echo.options import EchoOptions
from ...backends.params import PARAMETERS
from ...backends.params.parameters_page import json_schema as parameters_schema
from ..metrics.listen_address import PORT_MAX, Address
from ..traces.target import TEXT_CHARACTERS_MAX, Target
from .access_settings import (
    ACCESS_BOUNDS,
    ACCESS_KEYS,
    CLASSES,
    ID_MAX,
    NAMES_MAX,
    RULES_MAX,
    Right,
)
from .log_levels import LEVELS, ROOMS
from .model_settings import ECHO_HIGH, MODEL_NAME
from .settings import SETTINGS, Config, Setting, applies
from .socket_settings import MODE, GroupName, Mode

__all__ = ("config_schema",)

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
WORDED: dict[type[Any], Schema] = {
    Path: TEXT,
    Address: {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": PORT_MAX},
            {"type": "string", "pattern": r"^\s*([Oo][Ff][Ff]|(unix:)?/.+|(.*:)?[0-9]{1,5})\s*$"},
        ]
    },
    Target: {
        "type": "string",
        "maxLength": TEXT_CHARACTERS_MAX,
        "pattern": r"^\s*([Oo][Ff][Ff]|[Oo][Tt][Ll][Pp]|file:/.*|[Hh][Tt]{2}[Pp][Ss]?://.+)\s*$",
    },
    Mode: {"type": "string", "pattern": f"^{MODE.pattern}$"},
    GroupName: {"type": "string"},
}
"""Settings that are texts of a form of their own."""
NUMBERS: dict[type[Any], str] = {int: "integer", float: "number"}


def config_schema() -> Schema:
    """Return the schema."""
    own = {name: _setting(name, setting) for name, setting in SETTINGS.items()}
    own_spellings = {name: [name] for name in SETTINGS}
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
            "daemon": _table(own, own_spellings),
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
                "additionalProperties": _table(_ACCESS, {key: [key] for key in _ACCESS}),
            },
        },
        "$defs": parameters,
    }


def _table(properties: Schema, spellings: dict[str, list[str]]) -> Schema:
    """Return the schema of a table: no other key, and none in two spellings."""
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


def _setting(name: str, setting: Setting) -> Schema:
    doc: Schema = {"description": f"{setting.doc} (a change holds {applies(name)})"}
    default = {f.name: f.default for f in msgspec.structs.fields(Config)}[name.replace("-", "_")]
    if isinstance(default, str | int | float):
        doc["default"] = str(default) if isinstance(default, Mode | GroupName) else default
    if setting.kind in WORDED:
        most = {"maxLength": int(setting.high)} if math.isfinite(setting.high) else {}
        return WORDED[setting.kind] | most | doc
    if setting.kind is bool:
        return {"type": "boolean"} | doc
    if setting.kind is dict:
        return _levels() | doc
    if setting.choices:
        return {"enum": list(setting.choices)} | doc
    kind = NUMBERS[setting.kind]
    return {"type": kind, "minimum": setting.low, "maximum": setting.high} | doc


def _levels() -> Schema:
    """Return what `log-levels` takes: a table of levels by room, or the same as a text."""
    level: Schema = {"enum": list(LEVELS)}
    rooms: Schema = {
        "type": "object",
        "properties": {room: level | {"description": about} for room, about in ROOMS.items()},
        "additionalProperties": False,
    }
    pair = f"\\s*({'|'.join(ROOMS)})\\s*=\\s*({'|'.join(LEVELS)})\\s*"
    return {"anyOf": [rooms, {"type": "string", "pattern": f"^({pair}(,{pair})*)?$"}]}


# The keys of a rule of access.

_NAMES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": NAMES_MAX,
    "items": {"anyOf": [TEXT, {"type": "integer", "minimum": 0, "maximum": ID_MAX}]},
}
_BOUNDS = {
    key: {"type": "integer", "minimum": 1, "maximum": high} for key, high in ACCESS_BOUNDS.items()
}
_VALUES: dict[str, Schema] = {
    "users": _NAMES,
    "groups": _NAMES,
    "may": {"type": "array", "items": {"enum": [right.value for right in Right]}},
    "top-priority": {"enum": list(CLASSES)},
    **_BOUNDS,
}
_ACCESS: Schema = {key: _VALUES[key] | {"description": d} for key, d in ACCESS_KEYS.items()}

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
    return _table(properties, {name: [name] for name in properties})


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
