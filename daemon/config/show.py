"""The configuration in force, with the origin of each value, as TOML that can be read again; and
the JSON schema of a configuration file, for editors.

Numbers are numbers in the schema: it does not allow numbers as text, as the environment has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ...backends.params import PARAMETERS, SECTION_NAMES
from ...backends.params.parameter_table import json_schema as parameters_schema
from ...ipc.metrics_address import Address
from ..traces.target import Target
from .access_settings import ACCESS_KEYS, MEMBER_PRIORITY_MAX, MEMBER_RIGHTS, RULES_MAX
from .declaration import Schema, hyphens, table_schema
from .forms import GroupName, Mode
from .model_settings import ECHO, MODEL_KEYS, NAMES, OF, AdapterConfig, ModelConfig
from .names import NAME_KEYS, NAME_PARAMETERS, DerivedName
from .settings import SETTINGS
from .sources import Sources

DEFAULT = "default"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Characters that a TOML comment cannot contain, but a file name can."""
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Value(msgspec.Struct, frozen=True):
    """A value in force and its origin: a flag, an environment variable, a file, or the default."""

    value: Any
    origin: str


class InForce(msgspec.Struct, frozen=True):
    """The values in force: settings, default parameters, models and access rules.

    The values of a model include the default parameters.
    """

    file: str
    settings: dict[str, Value]
    defaults: dict[str, Value]
    models: dict[str, dict[str, Value]]
    access: dict[str, dict[str, Value]]


def in_force(sources: Sources) -> InForce:
    """Return the values of a configuration with their origins."""
    config, path = sources.config, sources.file
    models = {name: _model(name, model, sources) for name, model in config.models.items()}
    names = {name: _name(name, derived, sources) for name, derived in config.names.items()}
    return InForce(
        file=str(path or ""),
        settings={
            name: Value(
                _plain(getattr(config, setting.field)), sources.origins.get(setting.field, DEFAULT)
            )
            for name, setting in SETTINGS.items()
        },
        defaults=_parameters("defaults", config.defaults, sources),
        models=models | names,
        access={
            name: _rule(table, f"{path} [access.{name}]")
            for name, table in sources.document.get("access", {}).items()
        },
    )


def _parameters(table: str, values: Mapping[str, Any], sources: Sources) -> dict[str, Value]:
    """Return the values of a *table* with their origins, flags or the file."""
    place = f"{sources.file} [{table}]"
    return {
        key: Value(_plain(value), sources.origins.get(f"{table}.{key}", place))
        for key, value in values.items()
    }


def _model(name: str, model: ModelConfig, sources: Sources) -> dict[str, Value]:
    own = {
        "backend": model.backend,
        "file": model.file,
        "echo": model.echo,
        "adapters": model.adapters,
    }
    table = f"models.{name}"
    return {
        **_parameters(table, {key: value for key, value in own.items() if value}, sources),
        **_parameters("defaults", sources.config.defaults, sources),
        **_parameters(table, model.options, sources),
    }


def _name(name: str, derived: DerivedName, sources: Sources) -> dict[str, Value]:
    """Return the values of another name of a model, without those of the model."""
    own = {key: getattr(derived, setting.field) for key, setting in NAME_KEYS.items()}
    table = f"models.{name}"
    written = {key: value for key, value in own.items() if value}
    return _parameters(table, written | derived.options, sources)


def _rule(table: Mapping[str, Any], place: str) -> dict[str, Value]:
    """Return the keys of a rule as written, and the defaults of the others.

    A rule that names users has no fixed defaults, because root and the daemon's user have more
    rights.
    """
    written = {hyphens(key): value for key, value in table.items()}
    defaults = (
        {}
        if "users" in written
        else {"allow": [*MEMBER_RIGHTS], "priority-max": MEMBER_PRIORITY_MAX}
    )
    return {
        key: Value(written[key], place) if key in written else Value(defaults.get(key), DEFAULT)
        for key in ACCESS_KEYS
    }


def _plain(value: Any) -> Any:
    """Return a value in types of TOML and JSON."""
    if isinstance(value, Path | Address | Target | Mode | GroupName):
        return str(value)
    if isinstance(value, AdapterConfig):
        return {"file": str(value.file), "scale": value.scale}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def toml_of(shown: InForce, *, origins: bool = False) -> str:
    """Return a configuration file; with *origins*, each line ends with the origin of its value."""
    return "".join(f"{line}\n" for line in _lines(shown, origins))


def _lines(shown: InForce, origins: bool) -> Iterator[str]:
    tables = {"[daemon]": shown.settings, "[defaults]": shown.defaults}
    tables |= {f"[models.{_key(name)}]": values for name, values in shown.models.items()}
    tables |= {f"[access.{_key(name)}]": values for name, values in shown.access.items()}
    for number, (head, values) in enumerate(t for t in tables.items() if t[1]):
        if number:
            yield ""
        yield head
        for name, value in values.items():
            if value.value is None:
                continue  # not set: TOML has no null
            comment = f"  # {_CONTROL.sub('?', value.origin)}" if origins else ""
            yield f"{_key(name)} = {_toml(value.value)}{comment}"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    """Return a basic string: a JSON string with DEL escaped, which JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(str(k))} = {_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


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
    own = {key: ref for key, ref in references.items() if key in NAME_PARAMETERS | {*SECTION_NAMES}}
    keys = table_schema(NAME_KEYS)
    other_name = table_schema(own, {p.name: p.aliases for p in PARAMETERS if p.name in own})
    for part in ("properties", "patternProperties", "dependentSchemas"):
        other_name[part] |= keys[part]
    either = {"if": {"required": [OF]}, "then": other_name, "else": model}
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
                "additionalProperties": either,
                "allOf": [{"properties": {ECHO: _WITH_BACKEND}}],
            },
            "access": rules | {"additionalProperties": table_schema(ACCESS_KEYS)},
        },
        "$defs": parameters,
    }
