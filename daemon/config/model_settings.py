"""The configuration's models: names, files, adapters, parameters, and options of echo models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ...backends import ENGINES, format_of_file
from ...backends.echo.options import EchoOptions
from ...backends.engine_options import engine_options_of, read_engine_options
from ...backends.errors import InvalidArgument
from ...backends.model_encodings import PYTORCH_FILE, PYTORCH_SUFFIXES, model_in_folder
from ...backends.model_spec import ADAPTERS_MAX, CPU, SCALE_MAX
from ...backends.params import (
    BY_SPELLING,
    FORMS,
    IGNORED_KEYS,
    MMPROJ_AUTO,
    MMPROJ_NONE,
    flat_keys,
    nearest,
    read_options,
)
from ...backends.texts import shorten
from ...ipc.model_names import MODEL_NAME, is_model_file
from .declaration import (
    REQUIRED,
    TEXT,
    ErrorList,
    Form,
    Schema,
    Setting,
    hyphens,
    read_table,
    setting,
    settings_of,
    table_of,
    table_schema,
)


def check_confined(folder: Path, path: Path) -> None:
    """Check that *path* is below *folder* after its links and `..` are resolved. Of a path that
    does not exist yet, the existing part is resolved.

    :raises ValueError: the path is outside, or cannot be resolved.
    """
    try:
        home, real = folder.resolve(), path.resolve()
        loops = real.is_symlink()  # in later versions of Python, `resolve` raises no error for it
    except (OSError, RuntimeError) as exc:
        raise ValueError(f"{str(path)!r} cannot be resolved: {exc}") from None
    if loops:
        raise ValueError(f"{str(path)!r} cannot be resolved: its links form a loop")
    if not real.is_relative_to(home):
        raise ValueError(
            f"{str(path)!r} leads out of {str(folder)!r}, to {str(real)!r}: write an absolute path"
            " for a file elsewhere"
        )


ECHO: Final = "echo"
"""The built-in model of the backend of this name."""
OF: Final = "of"
"""The key by which a table ``[models.NAME]`` makes another name of a model."""
NAMES = {"propertyNames": {"pattern": f"^{MODEL_NAME.pattern}$"}}
"""The schema of a table whose keys are such names."""
Folders = tuple[Path, ...]
"""The folders of relative files, in the order of the search."""


def _parse_file(value: Any) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{shorten(value)} is not a path")
    return Path(os.path.expanduser(value))


_FILE = Form(_parse_file, TEXT)
_DEVICE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]{0,63}")
_PROVIDER = "executionprovider"
"""The end of the names of ONNX Runtime's providers, which a device's name does not need."""


def _parse_device(value: Any) -> str:
    if not isinstance(value, str) or not _DEVICE_NAME.fullmatch(value):
        raise ValueError(f"{shorten(value)} is not the name of a device")
    lowered = value.lower()
    return lowered.removesuffix(_PROVIDER) or lowered


_DEVICE = Form(_parse_device, {**TEXT, "pattern": f"^{_DEVICE_NAME.pattern}$"})


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """One adapter of a model; *scale* applies to turns that select no adapter."""

    file: Path = setting(REQUIRED, "LoRA file in GGUF", form=_FILE)
    scale: float = setting(0.0, "scale for turns that select no adapter", -SCALE_MAX, SCALE_MAX)


_ADAPTER_KEYS = settings_of(AdapterConfig)
_ECHO_KEYS = {
    hyphens(f.name): Setting.of_annotation(f.name, f.type, f.default)
    for f in msgspec.structs.fields(EchoOptions)
}


def _parse_echo(value: Any) -> dict[str, Any]:
    errors = ErrorList(lines=[])
    values = read_table(_table(value), _ECHO_KEYS, errors)
    errors.raise_errors()
    return values


def _table(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(f"{shorten(value)} is not a table")


def parse_adapters(value: Any) -> dict[str, AdapterConfig]:
    """Return adapters by name; the value of each is a file, or a table with `file` and `scale`."""
    errors = ErrorList(lines=[])
    if len(_table(value)) > ADAPTERS_MAX:
        raise ValueError(f"{len(value)}, {ADAPTERS_MAX} at most")
    adapters: dict[str, AdapterConfig] = {}
    for name, entry in value.items():
        here = errors.at(f"{name}: ")
        table = entry if isinstance(entry, dict) else {"file": entry}
        values = read_table(table, _ADAPTER_KEYS, here)
        if "file" not in table:
            here.add("file is missing")
        if has_valid_name(name, "an adapter", here) and "file" in values:
            adapters[name] = AdapterConfig(**values)
    errors.raise_errors()
    return adapters


ADAPTERS: Schema = {
    "type": "object",
    "maxProperties": ADAPTERS_MAX,
    **NAMES,
    "additionalProperties": {"anyOf": [TEXT, table_schema(_ADAPTER_KEYS) | {"required": ["file"]}]},
}


@dataclass(frozen=True, kw_only=True)
class NameTemplate:
    """The chat template of another name of a model, by its source or else its file, and its form of
    answers. Without either it is the model's, as is the form if *tool_format* is None.
    """

    source: str = ""
    file: str = ""
    tool_format: str | dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model. `options` holds the checked values of parameters of all levels, by their names."""

    file: Path | None = setting(
        None, "file or folder of the model, beside this one or in models-dir", form=_FILE
    )
    backend: Literal["llama", "echo", "onnx", "litert", "openvino"] = setting(
        "llama", "engine that runs the model; the end of its file's name decides on the default"
    )
    precision: Literal["f32", "bf16"] = setting(
        "f32", "precision in which OpenVINO computes floating-point numbers"
    )
    device: str = setting(
        CPU,
        "of a graph, the device that computes it: `cpu`, or one that the installed engine has, such"
        " as `cuda` (ONNX Runtime) or `gpu` (OpenVINO)",
        form=_DEVICE,
    )
    options: dict[str, Any] = field(default_factory=dict)
    echo: dict[str, Any] = setting(
        {}, "options of an echo model", form=Form(_parse_echo, table_schema(_ECHO_KEYS))
    )
    adapters: dict[str, AdapterConfig] = setting(
        {},
        "LoRA files by name, each a file or a file and a scale",
        form=Form(parse_adapters, ADAPTERS),
    )
    batch_max: int = setting(
        32, "of a graph, the most rows of several inputs that are computed together", 1, 4096
    )
    latency: bool = setting(
        False, "of a graph, compute one input at a time on all threads, instead of one on each"
    )
    templates: dict[str, NameTemplate] = field(default_factory=dict)
    """The chat templates of other names of the model."""

    def with_file(self, file: Path | None) -> ModelConfig:
        """Return this configuration with *file*, whose name's end decides on the backend."""
        if file is None or self.backend == ECHO:
            return replace(self, file=file)
        backends: tuple[Any, ...] = format_of_file(file.name).backends
        backend = self.backend if self.backend in backends else backends[0]
        return replace(self, file=file, backend=backend)


GRAPH_KEYS = {"batch-max", "device", "latency"}
"""The keys of graphs alone."""
MODEL_KEYS = settings_of(ModelConfig)
"""The keys of a model that are not parameters."""


def check_model_name(name: str) -> str:
    """Return *name*.

    :raises InvalidArgument: it is not a valid name of a model.
    """
    if not MODEL_NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!r} is not a name for a model",
            hint="letters, digits, '.', '_' and '-', the first a letter or digit, at most 128",
        )
    return name


def has_valid_name(name: str, kind: str, errors: ErrorList) -> bool:
    """Return whether *name* is valid for *kind*; otherwise add an error."""
    if MODEL_NAME.fullmatch(name):
        return True
    errors.add(f"{name!r} is not a name for {kind}: use letters, digits, . _ -")
    return False


def named_tables(
    tables: Mapping[str, Any], key: str, kind: str, errors: ErrorList
) -> Iterator[tuple[str, dict[str, Any], ErrorList]]:
    """Yield the valid names and tables ``[key.NAME]``, each with the list of its errors."""
    for name, table in tables.items():
        here = errors.at(f"[{key}.{name}] ")
        if has_valid_name(name, kind, here):
            if isinstance(table, dict):
                yield name, table, here
            else:
                here.add(f"is {shorten(table)}, not a table")


def read_models(
    document: Mapping[str, Any], folders: Folders, errors: ErrorList
) -> dict[str, ModelConfig]:
    """Read the tables ``[models.NAME]``, without those of other names of models."""
    tables = table_of(document, "models", errors)
    return {
        name: _read_model(name, table, folders, here)
        for name, table, here in named_tables(tables, "models", "a model", errors)
        if OF not in table
    }


def _read_model(
    name: str, table: Mapping[str, Any], folders: Folders, errors: ErrorList
) -> ModelConfig:
    own = {key: value for key, value in table.items() if key in MODEL_KEYS}
    parameters = {key: value for key, value in table.items() if key not in MODEL_KEYS}
    values = read_table(own, MODEL_KEYS, errors)
    is_echo = values.get("backend") == ECHO
    if name == ECHO and not {"backend", "file"} & own.keys():
        errors.add(
            "backend is missing: write backend = 'echo' for the built-in model of this name, or"
            f" backend = 'llama' for {ECHO}.gguf"
        )
        return ModelConfig()
    if is_echo and "file" in own:
        errors.add("file: an echo model has no file")
    if not is_echo and own.get("echo"):
        errors.add("echo: only a model with backend = 'echo' has these options")
    if "file" in values:
        found = _find_file(values["file"], folders, errors.at("file: "))
        values["file"] = file = model_in_folder(found) or found
        if not is_echo:
            values["backend"] = _backend_of(values.get("backend"), file, errors)
    if (is_echo or "file" in values) and not ENGINES[values.get("backend", "llama")].graphs:
        for key in GRAPH_KEYS & own.keys():
            errors.add(f"{key}: only a graph has this setting")
    if "precision" in own and values.get("backend", "openvino") != "openvino":
        errors.add("precision: only a model with backend = 'openvino' has it")
    if values.get("device", CPU) != CPU and values.get("backend") == "litert":
        errors.add("device: LiteRT computes on the CPU alone")
    values["adapters"] = find_adapters(values.get("adapters", {}), folders, errors)
    options = read_options_table(parameters, folders, errors, known=tuple(MODEL_KEYS))
    try:
        read_engine_options(engine_options_of(options))
    except InvalidArgument as exc:
        errors.add(f"{exc.message}; {exc.hint}")
    return ModelConfig(options=options, **values)


def _backend_of(configured: str | None, file: Path, errors: ErrorList) -> str:
    """Return the *configured* backend, or the default one of the file's format. A backend that does
    not run this format is an error.
    """
    if file.name.lower().endswith(PYTORCH_SUFFIXES):
        errors.add(f"file: {file.name!r}: {PYTORCH_FILE}")
    backends = format_of_file(file.name).backends
    if configured is not None and configured not in backends:
        names = " or ".join(map(repr, backends))
        errors.add(f"backend: {file.name!r} is run by {names}, and not by {configured!r}")
        return backends[0]
    return configured or backends[0]


def find_adapters(
    adapters: Mapping[str, AdapterConfig], folders: Folders, errors: ErrorList
) -> dict[str, AdapterConfig]:
    """Return adapters with the paths of their files."""
    return {
        name: replace(
            adapter, file=_find_file(adapter.file, folders, errors.at(f"adapters: {name}: "))
        )
        for name, adapter in adapters.items()
    }


def _find_file(file: Path, folders: Folders, errors: ErrorList) -> Path:
    """Return *file* below the first of *folders* that has it, if it is relative; a path that leads
    out of that folder is an error.
    """
    if file.is_absolute():
        return file
    # Unlike `Path.exists`, this is false where access is denied or the name is too long.
    folder = next((folder for folder in folders if os.path.exists(folder / file)), folders[0])
    try:
        check_confined(folder, folder / file)
    except ValueError as exc:
        errors.add(str(exc))
    return folder / file


def _names_no_file(parameter: str, value: str) -> bool:
    if parameter == "draft-model":  # a model's name
        return not is_model_file(value)
    return parameter == "mmproj" and value in (MMPROJ_AUTO, MMPROJ_NONE)


_FILES = ("chat-template-file", "mmproj", "draft-model")
"""The parameters whose values are paths of files."""


def read_options_table(
    table: Mapping[str, Any], folders: Folders, errors: ErrorList, known: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Read parameters, by any of their spellings, also in the sections of nested JSON. *known* are
    other keys to suggest. In sections, keys of other runtimes that have no effect are only noted.
    """
    values: dict[str, Any] = {}
    for key, spelling, value in flat_keys(table):
        parameter = BY_SPELLING.get(spelling)
        if parameter is None and spelling in IGNORED_KEYS and table.get(key) is not value:
            errors.note(f"{key} has no effect: {IGNORED_KEYS[spelling]}")
        elif parameter is None and spelling not in FORMS:
            errors.add(f"unknown key {key!r}; {nearest(spelling, (*known, *BY_SPELLING))}")
        elif parameter is not None and parameter.name in values:
            errors.add(f"{key}: given twice, in two spellings of {parameter.name}")
        else:
            try:
                values.update(read_options({spelling: value}, strict=True).values)
            except InvalidArgument as exc:
                errors.add(exc.message)
    if values.get("mmproj") == "":
        values["mmproj"] = MMPROJ_NONE
    for name in _FILES:
        file = values.get(name)
        if file and not _names_no_file(name, file):
            path = Path(os.path.expanduser(file))
            values[name] = str(_find_file(path, folders, errors.at(f"{name}: ")))
    return values
