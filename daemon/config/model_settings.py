"""The configuration's models: their names, files, parameters and the echo model's options."""

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
from .declaration import ErrorList, hyphens, table_of

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A model's name: it becomes a file's name, so it holds no path."""
ECHO_HIGH = 1e9
Folders = tuple[Path, ...]
"""Where relative files are looked for, in this order."""
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


def read_models(
    document: Mapping[str, Any], folders: Folders, errors: ErrorList
) -> dict[str, ModelConfig]:
    """Read ``[models.NAME]`` tables."""
    models: dict[str, ModelConfig] = {}
    for name, table in table_of(document, "models", errors).items():
        here = errors.at(f"[models.{name}] ")
        if not MODEL_NAME.fullmatch(name):
            here.add(f"{name!r} is no name for a model: use letters, digits, . _ -")
        elif not isinstance(table, dict):
            here.add(f"is {table!r}, not a table")
        else:
            models[name] = _read_model(table, folders, here)
    return models


def _read_model(table: Mapping[str, Any], folders: Folders, errors: ErrorList) -> ModelConfig:
    backend = table.get("backend", "llama")
    if backend not in ("llama", "echo"):
        errors.add(f"backend: {backend!r} is none of llama, echo")
        backend = "llama"
    echo = _read_echo(table.get("echo", {}), errors.at("echo: "))
    if echo and backend != "echo":
        errors.add("echo: only a model with backend = 'echo' has these")
    rest = {key: value for key, value in table.items() if key not in _OWN_KEYS}
    path = None
    if (file := table.get("file")) is not None and backend == "echo":
        errors.add("file: the echo model has none")
    elif file is not None:
        path = _path_of(file, folders, errors.at("file: "))
    options = read_options_table(rest, folders, errors, known=_OWN_KEYS)
    return ModelConfig(
        file=path,
        backend=backend,
        options=options,
        echo=echo,
        adapters=_read_adapters(table, folders, errors),
    )


def _read_adapters(
    table: Mapping[str, Any], folders: Folders, errors: ErrorList
) -> dict[str, AdapterConfig]:
    """Read a model's adapters: each a file, or a table with `file` and `scale`."""
    adapters: dict[str, AdapterConfig] = {}
    found = table_of(table, "adapters", errors)
    if len(found) > ADAPTERS_MAX:
        errors.add(f"adapters: {len(found)}, {ADAPTERS_MAX} at most")
        return adapters
    for name, entry in found.items():
        here = errors.at(f"adapters.{name}: ")
        entry = entry if isinstance(entry, dict) else {"file": entry}
        file, scale = entry.get("file"), entry.get("scale", 0.0)
        if not MODEL_NAME.fullmatch(name):
            here.add(f"{name!r} is no name for an adapter: use letters, digits, . _ -")
        elif entry.keys() - {"file", "scale"}:
            here.add(f"{sorted(entry)} are not file and scale")
        elif not is_scale(scale):
            here.add(f"scale: {scale!r} is no number in {-SCALE_MAX:g} … {SCALE_MAX:g}")
        else:
            path = _path_of(file, folders, here)
            if path is not None:
                adapters[name] = AdapterConfig(file=path, scale=float(scale))
    return adapters


def _path_of(value: Any, folders: Folders, errors: ErrorList) -> Path | None:
    """Return the path that a text names: a relative one is below the first of *folders* that has
    it, and nothing leads out of that.
    """
    if not isinstance(value, str) or not value or "\0" in value:
        errors.add(f"{value!r} is no path")
        return None
    file = Path(os.path.expanduser(value))
    if file.is_absolute():
        return file
    folder = next((folder for folder in folders if (folder / file).exists()), folders[0])
    try:
        check_beneath(folder, folder / file)
    except ValueError as exc:
        errors.add(f"{exc}")
        return None
    return folder / file


def read_options_table(
    table: Mapping[str, Any], folders: Folders, errors: ErrorList, known: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Read parameters, by any of their spellings; *known* are other keys to suggest."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = _SPELLINGS.get(hyphens(key))
        if name is None:
            errors.add(f"unknown key {key!r}; {nearest(hyphens(key), (*known, *_SPELLINGS))}")
        elif name in values:
            errors.add(f"{key}: given twice, in two spellings of {name}")
        else:
            try:
                values.update(read_options({key: value}, strict=True).values)
            except InvalidArgument as exc:
                errors.add(exc.message)
    if file := values.get("chat-template-file"):
        path = _path_of(file, folders, errors.at("chat-template-file: "))
        values["chat-template-file"] = str(path or file)
    return values


def _read_echo(table: Any, errors: ErrorList) -> dict[str, Any]:
    if not isinstance(table, dict):
        errors.add(f"{table!r} is no table")
        return {}
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in EchoOptions.__struct_fields__:
            errors.add(f"unknown key {key!r}; {nearest(name, EchoOptions.__struct_fields__)}")
        elif isinstance(value, (int, float)) and not -1 <= value <= ECHO_HIGH:
            errors.add(f"{key}: {value} is outside -1 … {ECHO_HIGH:g}")
        else:
            try:
                values[name] = getattr(msgspec.convert({name: value}, EchoOptions), name)
            except msgspec.ValidationError as exc:
                errors.add(f"{name}: {exc}")
    return values
