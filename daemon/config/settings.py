"""The settings of a daemon, each declared once, by its field of `Config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..metrics.listen_address import LOOPBACK, Address
from ..traces.target import Target
from .access_settings import Rule
from .declaration import REQUIRED, Applies, setting, settings_of
from .forms import ADDRESS, PATH, SOCKET_PATH, TARGET
from .log_levels import LOG_LEVELS
from .model_settings import ModelConfig
from .socket_settings import GROUP, MODE, GroupName, Mode

BYTES_MAX = 10**15
MONTH_S = 30 * 86_400
METRICS_PORT = 4633
"""Not one of 9100 to 9999, which are given to exporters, nor of the ephemeral ones."""
AT_ONCE, NEXT_LOAD = Applies.AT_ONCE, Applies.NEXT_LOAD
TABLES = {"models": NEXT_LOAD, "defaults": NEXT_LOAD, "access": AT_ONCE}
"""The file's tables beside its settings, and when a change in them takes effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configuration of a daemon.

    Where 0 stands for a limit of the machine, as in `cores` and `kv_ram_bytes`, it is replaced.
    """

    # fmt: off
    socket: Path = setting(REQUIRED, "the Unix socket to listen on", form=SOCKET_PATH, default_doc="`$XDG_RUNTIME_DIR/inferd/inferd.sock`, else `/run/inferd/inferd.sock`")
    socket_mode: Mode = setting(Mode(0o600), "who may connect: the permission bits, as `0660`", form=MODE, default_doc="`0600`; `0660` with a group")
    socket_group: GroupName = setting(GroupName(), "the group that the socket is given", form=GROUP, default_doc="none; `inferd` for the machine's socket")
    models_dir: Path = setting(REQUIRED, "where model files lie and `inferd pull` puts them", form=PATH, default_doc="`$XDG_DATA_HOME/inferd/models`")
    state_dir: Path = setting(REQUIRED, "where the daemon keeps what outlives it", form=PATH, default_doc="`$XDG_STATE_HOME/inferd`")
    cores: int = setting(REQUIRED, "cores that the models share; 0: all usable ones", 0, 4096, default_doc="0")
    sessions_max: int = setting(100, "sessions open at once", 1, 100_000, AT_ONCE)
    idle_timeout_ms: int = setting(300_000, "an idle session is closed after this", 1, MONTH_S * 1000, AT_ONCE)
    keep_alive_s: float = setting(300.0, "an idle model is unloaded after this; -1: never, 0: at once", -1, MONTH_S, AT_ONCE)
    memory_bytes: int = setting(0, "memory of all models together; 0: what the machine has free", 0, BYTES_MAX)
    model_stay_s: float = setting(20.0, "a model that others wait for lets in later visits for this; 0: none", 0, 86_400)
    failed_load_s: float = setting(10.0, "a load that failed is not tried again for this, if the file is the same", 0, 3600)
    connections_max: int = setting(256, "connections open at once", 1, 100_000, AT_ONCE)
    tasks_waiting_max: int = setting(512, "tasks waiting, over all models", 1, 1_000_000, AT_ONCE)
    tasks_waiting_owner_max: int = setting(256, "tasks waiting for one user", 1, 1_000_000, AT_ONCE)
    prompt_tokens_waiting_max: int = setting(4_000_000, "prompt tokens of the tasks waiting, over all models", 1, 1_000_000_000, AT_ONCE)
    prompt_tokens_waiting_owner_max: int = setting(2_000_000, "prompt tokens of the tasks waiting for one user", 1, 1_000_000_000, AT_ONCE)
    dormant_max: int = setting(1000, "sessions that sleep under their id", 0, 1_000_000, AT_ONCE)
    dormant_days_max: float = setting(7.0, "a session that sleeps this long is forgotten", 0, 3650, AT_ONCE)
    dormant_bytes_max: int = setting(256 << 20, "histories of the sessions that sleep", 0, BYTES_MAX, AT_ONCE)
    kv_disk_bytes: int = setting(8 << 30, "KV states on disk, of all models and users; 0: none", 0, BYTES_MAX)
    kv_ram_bytes: int = setting(REQUIRED, "KV states in a model's memory; 0: an eighth of all, at most 4 GiB", 0, BYTES_MAX, NEXT_LOAD, default_doc="0")
    kv_share: Literal["owner", "all"] = setting("owner", "whose prompts a user's KV states serve: his own, or all users'")
    share_tokens_min: int = setting(64, "prompts that begin alike for this long wait for the first of them", 1, 1_000_000, NEXT_LOAD)
    snapshot_tokens: int = setting(2048, "states that cannot be cut are saved each time a prompt gets this on", 64, 10_000_000, NEXT_LOAD)
    shifts_max: int = setting(8, "context shifts in one turn", 0, 1_000_000, NEXT_LOAD)
    step_ms_target: int = setting(150, "a step that decodes takes in as much of the prompts as fits into this", 1, 10_000, NEXT_LOAD)
    quantum_tokens: int = setting(256, "a task computes this before another of its class may take its slot", 1, 1_000_000, NEXT_LOAD)
    ageing_tokens: int = setting(20_000, "a task that waits while this is computed rises by one class", 1, 1_000_000_000, NEXT_LOAD)
    reader_wait_ms: int = setting(200, "a task whose reader lags by this gives way to waiting ones", 1, 3_600_000, NEXT_LOAD)
    reader_timeout_s: float = setting(300.0, "a task nobody reads ends after this", 0.1, 86_400)
    worker_hang_s: float = setting(120.0, "a worker that is silent for so long over its work is replaced", 0.1, 86_400, NEXT_LOAD)
    swap_grace_s: float = setting(60.0, "turns on a model that was swapped may finish there for this long", 0, 86_400)
    grace_s: float = setting(30.0, "what runs may finish for this long after SIGTERM", 0, 86_400, AT_ONCE)
    metrics: Address = setting(Address(LOOPBACK, METRICS_PORT), "where figures are served: a port, HOST:PORT, a Unix socket's path, or off", form=ADDRESS)
    metrics_network: Literal["loopback", "any"] = setting("loopback", "who may: this machine, or any that reaches the address")
    traces: Target = setting(Target(), "where OpenTelemetry spans go: off, `http://HOST:PORT` of a collector, otlp (the one that `OTEL_EXPORTER_OTLP_ENDPOINT` names), or `file:/PATH`", form=TARGET)
    traces_network: Literal["loopback", "any"] = setting("loopback", "where to: this machine, or any collector")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least level that is logged", applies=AT_ONCE)
    log_levels: dict[str, str] = setting({}, "levels of single rooms, as a table or as `scheduler=debug,llama=error`", applies=AT_ONCE, form=LOG_LEVELS, default_doc="none")
    log_format: Literal["auto", "json", "console"] = setting("auto", "auto: json in systemd's journal, else console")
    log_file: Path | None = setting(None, "where events are appended, a line of JSON each; it may be moved away", applies=AT_ONCE, form=PATH, default_doc="none")
    log_text: bool = setting(False, "log prompts and answers, too, where the level is debug", applies=AT_ONCE)
    # fmt: on
    models: dict[str, ModelConfig] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    access: tuple[Rule, ...] = ()


SETTINGS = settings_of(Config)


def applies(name: str) -> Applies:
    """Return when a change of a setting or table takes effect."""
    return TABLES.get(name) or SETTINGS[name].applies
