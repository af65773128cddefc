"""The sources of the configuration: flags, the environment and a file, in this order of precedence.

The file is TOML: settings under ``[daemon]``, default parameters of models under ``[defaults]``, a
table ``[models.NAME]`` for each model and a table ``[access.NAME]`` for each access rule. All
unknown keys and invalid values of all sources are reported at once.
"""

from __future__ import annotations

import difflib
import itertools
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from ...backends.errors import InvalidArgument, Outcome
from ...backends.params import BY_SPELLING, flat_keys, nearest
from ...ipc.metrics_address import LOOPBACK, SOCKET_PATH_BYTES_MAX, Address
from ...ipc.paths import SYSTEM_SOCKET, daemon_socket_path
from ..residency.machine import MachineMemory, cores_usable
from .access_settings import read_access
from .declaration import ErrorList, hyphens, read_value, table_of
from .forms import Mode, group_default
from .model_settings import read_models, read_options_table
from .names import read_names
from .settings import METRICS_PORT, SETTINGS, TABLES, Config

SYSTEM_FILE = Path("/etc/inferd/config.toml")
FILE_BYTES_MAX = 1 << 20
ENVIRONMENT_PREFIX = "INFERD_"
ENVIRONMENT_OTHERS = ("INFERD_CONFIG",)
SET = "set "
"""Prefix of a setting that was given as `--set KEY=VALUE`."""
TYPO_CUTOFF = 0.85
KV_RAM_BYTES_MAX = 4 << 30
"""The upper bound of the default of `kv-ram-bytes`."""


class ConfigError(InvalidArgument, outcome=Outcome.REFUSED):
    """An invalid configuration; `lines` holds all its errors, and `rest` the configuration without
    what is invalid, for examinations.
    """

    hint_default = "correct these errors and start again"

    def __init__(self, lines: list[str], rest: Config | None = None):
        super().__init__("\n".join(lines), data={"errors": lines})
        self.lines, self.rest = lines, rest

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.lines,)


class Sources(msgspec.Struct, frozen=True):
    """A configuration, its file and the origin of each setting."""

    config: Config
    file: Path | None
    document: dict[str, Any]
    origins: dict[str, str]
    """Origins by name of field, or by `models.NAME.KEY` and `defaults.KEY` of a flag. A default has
    no origin, nor has a value that the file has in one of these tables.
    """
    notes: list[str]
    """Keys in the file that have no effect."""


def load_config(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Return the configuration; see `read_sources`."""
    return read_sources(flags, environ).config


def read_sources(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Sources:
    """Read flags, environment and file.

    *flags* holds settings by name, with the prefix `SET` if given by `--set`, and the file as
    `config`; None means that the flag was not given. Text is converted, so flags may be passed as
    the user typed them. The flags `models.NAME.KEY` and `defaults.KEY` replace values of the file's
    tables.

    :raises ConfigError: a key is unknown or a value invalid; the error lists all of them.
    """
    given = {k: v for k, v in (flags or {}).items() if v is not None}
    flags = {hyphens(k): v for k, v in given.items() if "." not in k}
    environ = os.environ if environ is None else environ
    errors = ErrorList(lines=[])
    path = configuration_file(flags.pop("config", None), environ, flags.get("socket"))
    in_file = errors.at(f"{path}: " if path else "--set: ")
    document = _read_document(path, in_file) if path else {}
    in_tables = {k: v for k, v in given.items() if "." in k}
    origins = _set_in_tables(document, in_tables, errors)
    values: dict[str, Any] = {}
    for key, value, place, origin in itertools.chain(
        _daemon_table(document, path, in_file),
        _variables(environ, errors),
        ((key.removeprefix(SET), value, f"--{key}", f"--{key}") for key, value in flags.items()),
    ):
        if setting := SETTINGS.get(hyphens(key)):
            read_value(setting, value, values, errors.at(f"{place}: "))
            origins[setting.field] = origin
        else:
            errors.add(f"{place}: unknown key; {nearest(hyphens(key), SETTINGS)}")
    for key in document.keys() - {"daemon", *TABLES}:
        is_setting = hyphens(key) in SETTINGS
        known = ("daemon", *TABLES, *SETTINGS)
        hint = "write it under [daemon]" if is_setting else nearest(key, known)
        in_file.add(f"unknown key {key!r}; {hint}")
    config = _with_defaults(values, environ)
    folders = (path.parent if path else Path.cwd(), config.models_dir)
    models = read_models(document, folders, in_file)
    names = read_names(document, models, folders, in_file)
    access = read_access(document, in_file)
    _check_loopback(config, errors)
    defaults = table_of(document, "defaults", in_file)
    options = read_options_table(defaults, folders, in_file.at("[defaults] "))
    config = replace(config, models=models, names=names, defaults=options, access=access)
    if errors.lines:
        raise ConfigError(errors.lines, config)
    return Sources(config, path, document, origins, errors.notes)


def _set_in_tables(
    document: dict[str, Any], values: Mapping[str, Any], errors: ErrorList
) -> dict[str, str]:
    """Set values such as `models.NAME.KEY` in the tables of *document*, in place of any spelling
    of the same parameter. Return their origins.
    """
    origins: dict[str, str] = {}
    for path, value in values.items():
        place, _, key = path.rpartition(".")
        kind, _, name = place.partition(".")
        if (kind, bool(name)) not in (("models", True), ("defaults", False)):
            errors.add(f"--set {path}: use models.NAME.KEY or defaults.KEY")
            continue
        table = document.setdefault(kind, {})
        if name and isinstance(table, dict):
            table = table.setdefault(name, {})
        if isinstance(table, dict):  # otherwise the file has an error
            name = _parameter_name(key)
            _remove_parameter(table, name, table)
            table[key], origins[f"{place}.{name}"] = value, f"--set {path}"
    return origins


def _remove_parameter(table: dict[str, Any], name: str, section: dict[str, Any]) -> None:
    """Remove the keys that spell a parameter from a *section* of *table* and all sections in it."""
    spelled = [(k, v) for k, s, v in flat_keys(table) if _parameter_name(s) == name]
    for key, value in list(section.items()):
        if any(key == k and value is v for k, v in spelled):
            del section[key]
        elif isinstance(value, dict):
            _remove_parameter(table, name, value)


def _parameter_name(key: str) -> str:
    parameter = BY_SPELLING.get(hyphens(key))
    return key if parameter is None else parameter.name


def _check_loopback(config: Config, errors: ErrorList) -> None:
    leaks = {
        "metrics": "other machines could read the metrics",
        "traces": "spans would leave the machine",
    }
    for name, leak in leaks.items():
        address = getattr(config, name)
        if address.is_remote and getattr(config, f"{name}_network") != "any":
            errors.add(
                f"{name}: {address} is not this machine's loopback: {leak}; name 127.0.0.1, or"
                f" allow it by {name}-network = 'any'"
            )


def _with_defaults(values: dict[str, Any], environ: Mapping[str, str]) -> Config:
    values = {
        "socket": daemon_socket_path(environ),
        "models_dir": platformdirs.user_data_path("inferd") / "models",
        "state_dir": platformdirs.user_state_path("inferd"),
        **values,
    }
    group = values.setdefault("socket_group", group_default(values["socket"]))
    values.setdefault("metrics", metrics_default(values["socket"]))
    values.setdefault("socket_mode", Mode(0o660 if group else 0o600))
    values["cores"] = values.get("cores") or cores_usable()
    values["kv_ram_bytes"] = values.get("kv_ram_bytes") or kv_ram_default(
        MachineMemory().total_bytes()
    )
    return Config(**values)


def kv_ram_default(memory: int) -> int:
    """Return the default of `kv-ram-bytes` on a machine with *memory* bytes."""
    return min(memory // 8, KV_RAM_BYTES_MAX)


def configuration_file(flag: Any, environ: Mapping[str, str], socket: Any = None) -> Path | None:
    """Return the file to read: the named file, or the user's own one if it exists. Without either,
    the daemon of the machine's socket has the machine's file; the service's unit names it. *socket*
    is that of a flag.
    """
    if named := flag or environ.get("INFERD_CONFIG"):
        return Path(os.path.expanduser(named)).absolute()
    candidates = [platformdirs.user_config_path("inferd") / "config.toml"]
    if Path(socket or daemon_socket_path(environ)) == SYSTEM_SOCKET:
        candidates.append(SYSTEM_FILE)
    return next(filter(os.path.exists, candidates), None)


def metrics_default(socket: Path) -> Address:
    """Return the default address of the metrics of a daemon at *socket*: a port for the machine's
    daemon. Each other one has an address of its own, since there may be several.
    """
    if socket == SYSTEM_SOCKET:
        return Address(LOOPBACK, METRICS_PORT)
    path = str(socket.absolute().with_name(f"{socket.stem}-metrics.sock"))
    fits = len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX
    return Address(path=path) if fits else Address(LOOPBACK, 0)


def _read_document(path: Path, errors: ErrorList) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX} bytes")
        return tomllib.loads(content.decode())
    except OSError as exc:
        errors.add(f"cannot be read: {exc.strerror}")
    except UnicodeDecodeError:
        errors.add("is not UTF-8")
    except (ValueError, RecursionError) as exc:
        errors.add(f"is not valid TOML: {exc}")
    return {}


_Item = tuple[str, Any, str, str]
"""A key, its value, its place in error messages and its origin in `config show`."""


def _daemon_table(
    document: Mapping[str, Any], path: Path | None, errors: ErrorList
) -> Iterator[_Item]:
    seen = set()
    for key, value in table_of(document, "daemon", errors).items():
        setting = SETTINGS.get(hyphens(key))
        if hyphens(key) in seen:
            errors.add(f"[daemon] {key}: given twice, in two spellings")
        seen.add(hyphens(key))
        # A relative path is relative to the file, not to the daemon's working directory.
        if path and setting and setting.kind is Path and isinstance(value, str) and value:
            value = str(path.parent / os.path.expanduser(value))
        yield key, value, f"{path}: [daemon] {key}", str(path)


def _variables(environ: Mapping[str, str], errors: ErrorList) -> Iterator[_Item]:
    known = {ENVIRONMENT_PREFIX + s.field.upper(): key for key, s in SETTINGS.items()}
    for name, value in environ.items():
        if name in known and value:
            yield known[name], value, name, name
        elif name.startswith(ENVIRONMENT_PREFIX) and name not in (*known, *ENVIRONMENT_OTHERS):
            # Container engines set variables with this prefix, so only a likely typo is an error.
            for candidate in difflib.get_close_matches(name, known, n=1, cutoff=TYPO_CUTOFF):
                errors.add(f"{name}: unknown, did you mean {candidate}?")
