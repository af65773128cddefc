"""The configuration's models: their names, files, parameters and the echo model's options.

Every reader takes the list that it adds its errors to; none raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...backends.adapter_keys import ADAPTERS_MAX, SCALE_MAX, is_scale
from ...backends.echo.options import EchoOptions
from ...backends.errors import InvalidArgument
from ...backends.params import PARAMETERS, nearest, read_options
from .confinement import check_beneath

__all__ = (
    "MODEL_NAME",
    "AdapterConfig",
    "ModelConfig",
    "check_model_name",
    "hyphens",
    "read_models",
    "read_options_table",
    "table_of",
)

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A model's name: it becomes a file's name, so it holds no path."""
ECHO_HIGH = 1e9
_OWN_KEYS = ("file", "backend", "echo", "adapters")
_SPELLINGS = {key: p.name for p in PARAMETERS for key in (p.name, *p.aliases)}


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter of a model; its *scale* holds for turns that choose none."""

    file: Path
    scale: float = 0.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One model: `options` holds checked values by parameter name, of every level."""

    file: Path | None = None
    backend: Literal["llama", "echo"] = "llama"
    options: dict[str, Any] = {}
    echo: dict[str, Any] = {}
    adapters: dict[str, AdapterConfig] = {}


def check_model_name(name: str) -> str:
    """Return *name*.

    :raises InvalidArgument: it is no model's name.
    """
    if not MODEL_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is no name for a model",
            hint="letters, digits, '.', '_' and '-', the first a letter or digit, at most 128",
        )
    return name


def hyphens(key: str) -> str:
    """Return *key* as the tables spell it."""
    return key.replace("_", "-")


def table_of(
    document: Mapping[str, Any], key: str, place: str, errors: list[str]
) -> dict[str, Any]:
    """Return the table *key* of *document*, an empty one if there is none."""
    table = document.get(key, {})
    if isinstance(table, dict):
        return table
    errors.append(f"{place}{key} is {table!r}, not a table: write [{key}]")
    return {}


def read_models(
    document: Mapping[str, Any], place: str, folders: tuple[Path, ...], errors: list[str]
) -> dict[str, ModelConfig]:
    """Read ``[models.NAME]`` tables; *folders* are where relative files are looked for."""
    models: dict[str, ModelConfig] = {}
    for name, table in table_of(document, "models", place, errors).items():
        here = f"{place}[models.{name}] "
        if not MODEL_NAME.fullmatch(name):
            errors.append(f"{here}{name!r} is no name for a model: use letters, digits, . _ -")
        elif not isinstance(table, dict):
            errors.append(f"{here}is {table!r}, not a table")
        else:
            models[name] = _read_model(table, here, folders, errors)
    return models


def _read_model(
    table: Mapping[str, Any], place: str, folders: tuple[Path, ...], errors: list[str]
) -> ModelConfig:
    backend = table.get("backend", "llama")
    if backend not in ("llama", "echo"):
        errors.append(f"{place}backend: {backend!r} is none of llama, echo")
        backend = "llama"
    echo = _read_echo(table.get("echo", {}), place, errors)
    if echo and backend != "echo":
        errors.append(f"{place}echo: only a model with backend = 'echo' has these")
    rest = {key: value for key, value in table.items() if key not in _OWN_KEYS}
    path = _read_file(table.get("file"), backend, place, folders, errors)
    options = read_options_table(rest, place, errors, folders, known=_OWN_KEYS)
    return ModelConfig(
        file=path,
        backend=backend,
        options=options,
        echo=echo,
        adapters=_read_adapters(table, place, folders, errors),
    )


def _read_adapters(
    table: Mapping[str, Any], place: str, folders: tuple[Path, ...], errors: list[str]
) -> dict[str, AdapterConfig]:
    """Read a model's adapters: each a file, or a table with `file` and `scale`."""
    adapters: dict[str, AdapterConfig] = {}
    found = table_of(table, "adapters", place, errors)
    if len(found) > ADAPTERS_MAX:
        errors.append(f"{place}adapters: {len(found)}, {ADAPTERS_MAX} at most")
        return adapters
    for name, entry in found.items():
        here = f"{place}adapters.{name}: "
        entry = entry if isinstance(entry, dict) else {"file": entry}
        file, scale = entry.get("file"), entry.get("scale", 0.0)
        if not MODEL_NAME.fullmatch(name):
            errors.append(f"{here}{name!r} is no name for an adapter: use letters, digits, . _ -")
        elif entry.keys() - {"file", "scale"}:
            errors.append(f"{here}{sorted(entry)} are not file and scale")
        elif not is_scale(scale):
            errors.append(f"{here}scale: {scale!r} is no number in {-SCALE_MAX:g} … {SCALE_MAX:g}")
        else:
            path = _path_of(file, here, folders, errors)
            if path is not None:
                adapters[name] = AdapterConfig(file=path, scale=float(scale))
    return adapters


def _read_file(
    file: Any, backend: str, place: str, folders: tuple[Path, ...], errors: list[str]
) -> Path | None:
    if file is None:
        return None
    if backend == "echo":
        errors.append(f"{place}file: the echo model has none")
    else:
        return _path_of(file, f"{place}file: ", folders, errors)
    return None


def _path_of(value: Any, place: str, folders: tuple[Path, ...], errors: list[str]) -> Path | None:
    """Return the path that a text names: a relative one is below the first of *folders* that has
    it, and nothing leads out of that.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        errors.append(f"{place}{value!r} is no path")
        return None
    file = Path(os.path.expanduser(value))
    if file.is_absolute():
        return file
    folder = next((folder for folder in folders if (folder / file).exists()), folders[0])
    try:
        check_beneath(folder, folder / file)
    except ValueError as exc:
        errors.append(f"{place}{exc}")
        return None
    return folder / file


def read_options_table(
    table: Mapping[str, Any],
    place: str,
    errors: list[str],
    folders: tuple[Path, ...],
    known: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Read parameters, by any of their spellings; *known* are other keys to suggest."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = _SPELLINGS.get(hyphens(key))
        if name is None:
            close = nearest(hyphens(key), (*known, *_SPELLINGS))
            errors.append(f"{place}unknown key {key!r}; {close}".rstrip("; "))
        elif name in values:
            errors.append(f"{place}{key}: given twice, in two spellings of {name}")
        else:
            _read_option(key, value, place, values, errors)
    if file := values.get("chat-template-file"):
        path = _path_of(file, f"{place}chat-template-file: ", folders, errors)
        values["chat-template-file"] = str(path or file)
    return values


def _read_option(
    key: str, value: Any, place: str, values: dict[str, Any], errors: list[str]
) -> None:
    try:
        values.update(read_options({key: value}, strict=True).values)
    except InvalidArgument as exc:
        errors.append(f"{place}{exc.message}")


def _read_echo(table: Any, place: str, errors: list[str]) -> dict[str, Any]:
    place += "echo: "
    if not isinstance(table, dict):
        errors.append(f"{place}{table!r} is no table")
        return {}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in EchoOptions.__struct_fields__:
            known = nearest(name, EchoOptions.__struct_fields__)
            errors.append(f"{place}unknown key {key!r}; {known}".rstrip("; "))
        elif isinstance(value, (int, float)) and not -1 <= value <= ECHO_HIGH:
            errors.append(f"{place}{key}: {value} is outside -1 … {ECHO_HIGH:g}")
        else:
            _read_echo_value(name, value, place, values, errors)
    return values


def _read_echo_value(
    name: str, value: Any, place: str, values: dict[str, Any], errors: list[str]
) -> None:
    try:
        values[name] = getattr(msgspec.convert({name: value}, EchoOptions), name)
    except msgspec.ValidationError as exc:
        errors.append(f"{place}{name}: {exc}")
