"""The configuration in force: every setting's value and who said it, as TOML that can be read
again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from .config import (
    ENVIRONMENT_PREFIX,
    SETTINGS,
    Config,
    ModelConfig,
    configuration_file,
    load_config,
    read_document,
)
from .config_models import AdapterConfig, hyphens
from .config_socket import GroupName, Mode
from .metrics.address import Address
from .traces.target import Target

__all__ = ("InForce", "Value", "in_force", "toml_of")

DEFAULT = "default"
_BARE = re.compile(r"[A-Za-z0-9_-]+")


class Value(msgspec.Struct, frozen=True):
    """What holds, and who said it: a flag, a variable of the environment, a file, or nobody."""

    value: Any
    origin: str


class InForce(msgspec.Struct, frozen=True):
    """What holds: settings by name, parameters of every model, and each configured model's own,
    where those of every model stand, too.
    """

    file: str
    settings: dict[str, Value]
    defaults: dict[str, Value]
    models: dict[str, dict[str, Value]]


def in_force(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> InForce:
    """Return what `load_config` reads of the same sources, and from which of them.

    :raises ConfigError: anything in them is unknown or wrong.
    """
    config = load_config(flags, environ)
    environ = os.environ if environ is None else environ
    given = {hyphens(key) for key, value in (flags or {}).items() if value is not None}
    path = configuration_file((flags or {}).get("config"), environ)
    document = read_document(path, []) if path else {}
    in_file = {hyphens(key) for key in document.get("daemon", {})}
    return InForce(
        file=str(path or ""),
        settings={
            name: Value(
                _plain(getattr(config, name.replace("-", "_"))),
                _origin(name, given, environ, in_file, path),
            )
            for name in SETTINGS
        },
        defaults={k: Value(v, f"{path} [defaults]") for k, v in config.defaults.items()},
        models={name: _model(name, model, config, path) for name, model in config.models.items()},
    )


def _origin(
    name: str, given: set[str], environ: Mapping[str, str], in_file: set[str], path: Path | None
) -> str:
    variable = ENVIRONMENT_PREFIX + name.replace("-", "_").upper()
    if name in given:
        return f"--{name}"
    if environ.get(variable):
        return variable
    return str(path) if name in in_file else DEFAULT


def _model(name: str, model: ModelConfig, config: Config, path: Path | None) -> dict[str, Value]:
    place = f"{path} [models.{name}]"
    own = {
        "backend": model.backend,
        "file": model.file,
        "echo": model.echo,
        "adapters": model.adapters,
    }
    return {
        **{key: Value(_plain(value), place) for key, value in own.items() if value},
        **{key: Value(value, f"{path} [defaults]") for key, value in config.defaults.items()},
        **{key: Value(value, place) for key, value in model.options.items()},
    }


def _plain(value: Any) -> Any:
    """Return a value as TOML and JSON have it."""
    if isinstance(value, Path | Address | Target | Mode | GroupName):
        return str(value)
    if isinstance(value, AdapterConfig):
        return {"file": str(value.file), "scale": value.scale}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


# As TOML.


def toml_of(shown: InForce, *, origins: bool = False) -> str:
    """Return it as a configuration file; with *origins* each line says who said it."""
    return "".join(f"{line}\n" for line in _lines(shown, origins))


def _lines(shown: InForce, origins: bool) -> Iterator[str]:
    tables = {"[daemon]": shown.settings, "[defaults]": shown.defaults}
    tables |= {f"[models.{_key(name)}]": values for name, values in shown.models.items()}
    for number, (head, values) in enumerate(t for t in tables.items() if t[1]):
        if number:
            yield ""
        yield head
        for name, value in values.items():
            if value.value is None:
                continue  # not set: TOML has no word for it
            said = f"  # {value.origin}" if origins else ""
            yield f"{_key(name)} = {_toml(value.value)}{said}"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    """Return a basic string: JSON's, but for the one control character that JSON leaves alone."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(str(k))} = {_toml(v)}' for k, v in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return _text(value) if isinstance(value, str) else json.dumps(value)
