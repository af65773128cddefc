"""The configuration: what can be set, in which range, and from where it is read.

Flags come before the environment (``INFERD_SESSIONS_MAX``), the environment before the file.
The file is TOML: settings under ``[daemon]``, parameters of every model under ``[defaults]``,
one table ``[models.NAME]`` a model, one ``[access.NAME]`` a rule of who may do what. Nothing is
skipped: every key that is unknown and every value
that is wrong is reported, all at once.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import platformdirs

from ...backends.errors import InvalidArgument
from ...backends.params import nearest
from ...ipc import daemon_socket_path
from ..metrics.listen_address import LOOPBACK, Address, parse_address
from ..traces.target import Target, parse_target
from .access_settings import Rule, read_access
from .log_levels import parse_log_levels
from .model_settings import (
    MODEL_NAME,
    ModelConfig,
    check_model_name,
    hyphens,
    read_models,
    read_options_table,
    table_of,
)
from .socket_settings import GroupName, Mode, group_default, parse_group, parse_mode

__all__ = (
    "AT_ONCE",
    "MODEL_NAME",
    "NEXT_LOAD",
    "SETTINGS",
    "Applies",
    "Config",
    "ConfigError",
    "ModelConfig",
    "Setting",
    "applies",
    "check_model_name",
    "configuration_file",
    "load_config",
    "read_document",
)

SYSTEM_FILE = Path("/etc/inferd/config.toml")
FILE_BYTES_MAX = 1 << 20
SOCKET_BYTES_MAX = 107
"""Linux' bound on a Unix socket's path: sun_path less its end mark."""
ENVIRONMENT_PREFIX = "INFERD_"
ENVIRONMENT_OTHERS = ("INFERD_CONFIG",)
SLIP_CUTOFF = 0.85
BYTES_MAX = 10**15
KV_RAM_BYTES_MAX = 4 << 30
"""The most that a model gets without being told."""
KV_SHARES = ("owner", "all")
_TRUTHS = {"true": True, "1": True, "false": False, "0": False}
TABLES = ("models", "defaults", "access")
"""What the file has beside its settings."""
METRICS_PORT = 4633
"""Not one of 9100 to 9999, which are given to exporters, nor of the ephemeral ones."""


class ConfigError(InvalidArgument):
    """A configuration that cannot be used; `lines` holds every error in it."""

    hint_default = "correct these and start again"

    def __init__(self, lines: list[str]):
        super().__init__("\n".join(lines), data={"errors": lines})
        self.lines = lines

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.lines,)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a daemon runs with; `SETTINGS` says what each field means and its range.

    Where 0 means what the machine has, as in `cores` and `kv_ram_bytes`, that stands here.
    """

    socket: Path
    socket_mode: Mode = Mode(0o600)
    socket_group: GroupName = GroupName()
    models_dir: Path
    state_dir: Path
    cores: int
    sessions_max: int = 100
    idle_timeout_ms: int = 300_000
    keep_alive_s: float = 300.0
    memory_bytes: int = 0
    model_stay_s: float = 20.0
    failed_load_s: float = 10.0
    connections_max: int = 256
    tasks_waiting_max: int = 512
    tasks_waiting_owner_max: int = 256
    prompt_tokens_waiting_max: int = 4_000_000
    prompt_tokens_waiting_owner_max: int = 2_000_000
    dormant_max: int = 1000
    dormant_days_max: float = 7.0
    dormant_bytes_max: int = 256 << 20
    kv_disk_bytes: int = 8 << 30
    kv_ram_bytes: int
    kv_share: str = "owner"
    share_tokens_min: int = 64
    snapshot_tokens: int = 2048
    shifts_max: int = 8
    step_ms_target: int = 150
    quantum_tokens: int = 256
    ageing_tokens: int = 20_000
    reader_wait_ms: int = 200
    reader_timeout_s: float = 300.0
    worker_hang_s: float = 120.0
    swap_grace_s: float = 60.0
    grace_s: float = 30.0
    metrics: Address = Address(LOOPBACK, METRICS_PORT)
    metrics_network: str = "loopback"
    traces: Target = Target()
    traces_network: str = "loopback"
    log_level: str = "info"
    log_levels: dict[str, str] = {}
    log_format: str = "auto"
    log_file: Path | None = None
    log_text: bool = False
    models: dict[str, ModelConfig] = {}
    defaults: dict[str, Any] = {}
    access: tuple[Rule, ...] = ()


class Applies(StrEnum):
    """When a change in the file holds, once the file is read again."""

    AT_ONCE = "at once"
    NEXT_LOAD = "from a model's next load on"
    RESTART = "after a restart"


class Setting(msgspec.Struct, frozen=True):
    """One row of the table: `low` and `high` bound numbers and a path's bytes, both inclusive."""

    kind: type[Any]
    doc: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()


SETTINGS: dict[str, Setting] = {
    "socket": Setting(Path, "the Unix socket to listen on", high=SOCKET_BYTES_MAX),
    "socket-mode": Setting(Mode, "who may connect: the permission bits, as `0660`"),
    "socket-group": Setting(GroupName, "the group that the socket is given"),
    "models-dir": Setting(Path, "where model files lie and `inferd pull` puts them"),
    "state-dir": Setting(Path, "where the daemon keeps what outlives it"),
    "cores": Setting(int, "cores that the models share; 0: all usable ones", 0, 4096),
    "sessions-max": Setting(int, "sessions open at once", 1, 100_000),
    "idle-timeout-ms": Setting(int, "an idle session is closed after this", 1, 30 * 86_400_000),
    "keep-alive-s": Setting(
        float, "an idle model is unloaded after this; -1: never, 0: at once", -1, 30 * 86_400
    ),
    "memory-bytes": Setting(
        int, "memory of all models together; 0: what the machine has free", 0, BYTES_MAX
    ),
    "model-stay-s": Setting(
        float, "a model that others wait for lets in later visits for this; 0: none", 0, 86_400
    ),
    "failed-load-s": Setting(
        float, "a load that failed is not tried again for this, if the file is the same", 0, 3600
    ),
    "connections-max": Setting(int, "connections open at once", 1, 100_000),
    "tasks-waiting-max": Setting(int, "tasks waiting, over all models", 1, 1_000_000),
    "tasks-waiting-owner-max": Setting(int, "tasks waiting for one user", 1, 1_000_000),
    "prompt-tokens-waiting-max": Setting(
        int, "prompt tokens of the tasks waiting, over all models", 1, 1_000_000_000
    ),
    "prompt-tokens-waiting-owner-max": Setting(
        int, "prompt tokens of the tasks waiting for one user", 1, 1_000_000_000
    ),
    "dormant-max": Setting(int, "sessions that sleep under their id", 0, 1_000_000),
    "dormant-days-max": Setting(float, "a session that sleeps this long is forgotten", 0, 3650),
    "dormant-bytes-max": Setting(int, "histories of the sessions that sleep", 0, BYTES_MAX),
    "kv-disk-bytes": Setting(
        int, "KV states on disk, of all models and users; 0: none", 0, BYTES_MAX
    ),
    "kv-ram-bytes": Setting(
        int, "KV states in a model's memory; 0: an eighth of all, at most 4 GiB", 0, BYTES_MAX
    ),
    "kv-share": Setting(
        str, "whose prompts a user's KV states serve: his own, or all users'", choices=KV_SHARES
    ),
    "share-tokens-min": Setting(
        int, "prompts that begin alike for this long wait for the first of them", 1, 1_000_000
    ),
    "snapshot-tokens": Setting(
        int, "states that cannot be cut are saved each time a prompt gets this on", 64, 10_000_000
    ),
    "shifts-max": Setting(int, "context shifts in one turn", 0, 1_000_000),
    "step-ms-target": Setting(
        int, "a step that decodes takes in as much of the prompts as fits into this", 1, 10_000
    ),
    "quantum-tokens": Setting(
        int, "a task computes this before another of its class may take its slot", 1, 1_000_000
    ),
    "ageing-tokens": Setting(
        int, "a task that waits while this is computed rises by one class", 1, 1_000_000_000
    ),
    "reader-wait-ms": Setting(
        int, "a task whose reader lags by this gives way to waiting ones", 1, 3_600_000
    ),
    "reader-timeout-s": Setting(float, "a task nobody reads ends after this", 0.1, 86_400),
    "worker-hang-s": Setting(
        float, "a worker that is silent for so long over its work is replaced", 0.1, 86_400
    ),
    "swap-grace-s": Setting(
        float, "turns on a model that was swapped may finish there for this long", 0, 86_400
    ),
    "grace-s": Setting(float, "what runs may finish for this long after SIGTERM", 0, 86_400),
    "metrics": Setting(
        Address,
        "where figures are served: a port, HOST:PORT, a Unix socket's path, or off",
    ),
    "metrics-network": Setting(
        str, "who may: this machine, or any that reaches the address", choices=("loopback", "any")
    ),
    "traces": Setting(
        Target,
        "where OpenTelemetry spans go: off, `http://HOST:PORT` of a collector, otlp (the one that"
        " `OTEL_EXPORTER_OTLP_ENDPOINT` names), or `file:/PATH`",
    ),
    "traces-network": Setting(
        str, "where to: this machine, or any collector", choices=("loopback", "any")
    ),
    "log-level": Setting(
        str, "least level that is logged", choices=("debug", "info", "warning", "error")
    ),
    "log-levels": Setting(
        dict, "levels of single rooms, as a table or as `scheduler=debug,llama=error`"
    ),
    "log-format": Setting(
        str, "auto: json in systemd's journal, else console", choices=("auto", "json", "console")
    ),
    "log-file": Setting(
        Path, "where events are appended, a line of JSON each; it may be moved away"
    ),
    "log-text": Setting(bool, "log prompts and answers, too, where the level is debug"),
}

AT_ONCE = frozenset((
    "sessions-max", "idle-timeout-ms", "keep-alive-s", "connections-max", "tasks-waiting-max",
    "tasks-waiting-owner-max", "prompt-tokens-waiting-max", "prompt-tokens-waiting-owner-max",
    "dormant-max", "dormant-days-max", "dormant-bytes-max", "grace-s", "log-level", "log-levels",
    "log-file", "log-text", "access",
))  # fmt: skip
NEXT_LOAD = frozenset((
    "kv-ram-bytes", "share-tokens-min", "snapshot-tokens", "shifts-max", "step-ms-target",
    "quantum-tokens", "ageing-tokens", "reader-wait-ms", "worker-hang-s", "models", "defaults",
))  # fmt: skip


def applies(name: str) -> Applies:
    """Return when a change of a setting holds; `models`, `defaults`, `access` are tables."""
    if name in AT_ONCE:
        return Applies.AT_ONCE
    return Applies.NEXT_LOAD if name in NEXT_LOAD else Applies.RESTART


def load_config(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    document: Mapping[str, Any] | None = None,
) -> Config:
    """Read flags, environment and file, in this order of precedence.

    *flags* holds settings by their names, and `config` for the file; one that is None was not
    given. Text is converted, so that flags may pass what the user typed. *document* is the file's
    where it was read already: a pipe can be read once.

    :raises ConfigError: anything in it is unknown or wrong; it says all of it.
    """
    flags = {hyphens(k): v for k, v in (flags or {}).items() if v is not None}
    environ = os.environ if environ is None else environ
    errors: list[str] = []
    path = configuration_file(flags.pop("config", None), environ)
    if document is None:
        document = read_document(path, errors) if path else {}
    settings: dict[str, Any] = {}
    _read_daemon(table_of(document, "daemon", f"{path}: ", errors), path, settings, errors)
    _read_environment(environ, settings, errors)
    for key, value in flags.items():
        _read_setting(key, value, f"--{key}", settings, errors)
    for key in document.keys() - {"daemon", *TABLES}:
        known = nearest(key, ("daemon", *TABLES, *SETTINGS))
        if hyphens(key) in SETTINGS:
            known = "write it under [daemon]"
        errors.append(f"{path}: unknown key {key!r}; {known}".rstrip("; "))
    config = _with_defaults(settings, environ)
    folder = path.parent if path else Path.cwd()
    folders = (folder, config.models_dir)
    models = read_models(document, f"{path}: ", folders, errors)
    access = read_access(document, f"{path}: ", errors)
    _check_metrics(config, errors)
    _check_traces(config, errors)
    defaults = table_of(document, "defaults", f"{path}: ", errors)
    options = read_options_table(defaults, f"{path}: [defaults] ", errors, folders)
    if errors:
        raise ConfigError(errors)
    return msgspec.structs.replace(config, models=models, defaults=options, access=access)


def _check_metrics(config: Config, errors: list[str]) -> None:
    if config.metrics.is_remote and config.metrics_network != "any":
        errors.append(
            f"metrics: {config.metrics} is not this machine's loopback: other machines could read"
            " the figures; name 127.0.0.1, or allow it by metrics-network = 'any'"
        )


def _check_traces(config: Config, errors: list[str]) -> None:
    if config.traces.is_remote and config.traces_network != "any":
        errors.append(
            f"traces: {config.traces} is not this machine's loopback: spans would leave"
            " the machine; name 127.0.0.1, or allow it by traces-network = 'any'"
        )


def _with_defaults(settings: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    values = {
        "socket": daemon_socket_path(environ),
        "models-dir": platformdirs.user_data_path("inferd") / "models",
        "state-dir": platformdirs.user_state_path("inferd"),
        **settings,
    }
    group = values.setdefault("socket-group", group_default(values["socket"]))
    values.setdefault("socket-mode", Mode(0o660 if group else 0o600))
    values["cores"] = values.get("cores") or cores_usable()
    values["kv-ram-bytes"] = values.get("kv-ram-bytes") or kv_ram_default(memory_usable())
    return Config(**{key.replace("-", "_"): value for key, value in values.items()})


def cores_usable() -> int:
    """Return how many cores this process may use: by its affinity and its cgroup's quota."""
    affinity = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(affinity, round(int(quota) / int(period))))
    except (OSError, ValueError):  # cgroup v1, or "max": no quota
        return affinity


def memory_usable() -> int:
    """Return how many bytes of memory this process may use: the machine's, or its cgroup's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # cgroup v1, or "max": no limit
        return machine


def kv_ram_default(memory: int) -> int:
    """Return a worker's share of *memory* bytes for KV states, where nobody has set it."""
    return min(memory // 8, KV_RAM_BYTES_MAX)


# Sources.


def configuration_file(flag: Any, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: one that is named must be there, the others may."""
    if named := flag or environ.get("INFERD_CONFIG"):
        return Path(named).expanduser().absolute()
    candidates = (platformdirs.user_config_path("inferd") / "config.toml", SYSTEM_FILE)
    return next((path for path in candidates if path.exists()), None)


def read_document(path: Path, errors: list[str]) -> dict[str, Any]:
    """Read a configuration file; where that cannot be done *errors* gets why."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise ValueError(f"larger than {FILE_BYTES_MAX} bytes")
        return tomllib.loads(content.decode())
    except OSError as exc:
        errors.append(f"{path}: cannot be read: {exc.strerror}")
    except (ValueError, RecursionError) as exc:
        errors.append(f"{path}: is no valid TOML: {exc}")
    return {}


def _read_daemon(
    table: Mapping[str, Any], path: Path | None, settings: dict[str, Any], errors: list[str]
) -> None:
    for key, value in table.items():
        # A path in the file is relative to the file, wherever the daemon is started.
        setting = SETTINGS.get(hyphens(key))
        if hyphens(key) in settings:
            errors.append(f"{path}: [daemon] {key}: given twice, in two spellings")
        if path and setting and setting.kind is Path and isinstance(value, str) and value:
            value = str(path.parent / Path(value).expanduser())
        _read_setting(key, value, f"{path}: [daemon] {key}", settings, errors)


def _read_environment(
    environ: Mapping[str, str], settings: dict[str, Any], errors: list[str]
) -> None:
    known = {ENVIRONMENT_PREFIX + k.replace("-", "_").upper(): k for k in SETTINGS}
    for name, value in environ.items():
        if name in known and value:
            _read_setting(known[name], value, name, settings, errors)
        elif name.startswith(ENVIRONMENT_PREFIX) and name not in (*known, *ENVIRONMENT_OTHERS):
            # Container engines set names of their own under this prefix: only a slip is refused.
            close = difflib.get_close_matches(name, known, n=1, cutoff=SLIP_CUTOFF)
            errors.extend(f"{name}: unknown, did you mean {c}?" for c in close)


def _read_setting(
    key: str, value: Any, place: str, settings: dict[str, Any], errors: list[str]
) -> None:
    setting = SETTINGS.get(hyphens(key))
    if setting is None:
        errors.append(f"{place}: unknown key; {nearest(hyphens(key), SETTINGS)}".rstrip("; "))
        return
    try:
        settings[hyphens(key)] = _CONVERTERS[setting.kind](setting, value)
    except ValueError as exc:
        errors.append(f"{place}: {exc}")


# Values.


def _convert_path(setting: Setting, value: Any) -> Path:
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ValueError(f"{value!r} is no path")
    path = Path(value).expanduser().absolute()
    if len(os.fsencode(path)) > setting.high:
        raise ValueError(f"{str(path)!r} is longer than {setting.high} bytes")
    return path


def _convert_text(setting: Setting, value: Any) -> str:
    if value not in setting.choices:
        raise ValueError(f"{value!r} is none of {', '.join(setting.choices)}")
    return str(value)


def _convert_truth(_setting: Setting, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() not in _TRUTHS:
        raise ValueError(f"{value!r} is neither true nor false")
    return _TRUTHS[str(value).lower()]


def _convert_number(setting: Setting, value: Any) -> float:
    number = _parse_number(setting.kind, value)
    if not setting.low <= number <= setting.high:
        raise ValueError(f"{value} is outside {setting.low:.10g} … {setting.high:.10g}")
    return number


def _parse_number(kind: type[Any], value: Any) -> float:
    whole = kind is int
    problem = ValueError(f"{value!r} is no {'whole ' if whole else ''}number")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise problem
    if whole and isinstance(value, float):
        raise problem
    try:
        return int(value) if whole else float(value)
    except (ValueError, OverflowError):
        raise problem from None


_CONVERTERS: dict[type[Any], Callable[[Setting, Any], Any]] = {
    Path: _convert_path,
    Mode: lambda _, value: parse_mode(value),
    GroupName: lambda _, value: parse_group(value),
    Address: lambda _, value: parse_address(value),
    # The SDK, too, reads the environment of the process itself.
    Target: lambda _, value: parse_target(value, os.environ),
    bool: _convert_truth,
    dict: lambda _, value: parse_log_levels(value),
    str: _convert_text,
    int: _convert_number,
    float: _convert_number,
}
