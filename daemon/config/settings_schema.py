"""The JSON schema of a configuration file, for editors.

Numbers are numbers here: the schema does not allow numbers as text, as the environment has them.
"""

from __future__ import annotations

from ...backends.params import PARAMETERS, SECTION_NAMES
from ...backends.params.parameters_schema import json_schema as parameters_schema
from .access_settings import ACCESS_KEYS, RULES_MAX
from .declaration import Schema, table_schema
from .model_settings import ECHO, MODEL_KEYS, NAMES
from .settings import SETTINGS

_SECTION: Schema = {"type": "object", "description": "parameters, as in nested JSON"}
_ECHO_MODEL: Schema = {"properties": {"backend": {"const": "echo"}}, "required": ["backend"]}
_WITHOUT_FILE: Schema = {"properties": {"file": False}}
_WITH_BACKEND: Schema = {"anyOf": [{"required": ["backend"]}, {"required": ["file"]}]}
_WITHOUT_ECHO_OPTIONS: Schema = {"properties": {"echo": {"maxProperties": 0}}}


def config_schema() -> Schema:
    """Return the schema."""
    settings = {name: setting.json_schema() for name, setting in SETTINGS.items()}
    for name, setting in SETTINGS.items():
        settings[name]["description"] += f" (a change takes effect {setting.applies})"
    parameters = parameters_schema()["properties"]
    references = {name: {"$ref": f"#/$defs/{name}"} for name in parameters}
    references |= dict.fromkeys(SECTION_NAMES, _SECTION)
    defaults = table_schema(references, {p.name: p.aliases for p in PARAMETERS})
    model = defaults | {
        "properties": references | table_schema(MODEL_KEYS)["properties"],
        "if": _ECHO_MODEL,
        "then": _WITHOUT_FILE,
        "else": _WITHOUT_ECHO_OPTIONS,
    }
    rules: Schema = {"type": "object", "maxProperties": RULES_MAX, **NAMES}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "configuration of inferd",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "daemon": table_schema(settings),
            "defaults": defaults,
            "models": {
                "type": "object",
                **NAMES,
                "additionalProperties": model,
                "allOf": [{"properties": {ECHO: _WITH_BACKEND}}],
            },
            "access": rules | {"additionalProperties": table_schema(ACCESS_KEYS)},
        },
        "$defs": parameters,
    }
