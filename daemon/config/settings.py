"""The settings of a daemon, each declared once, by a field of `Config`.

Settings take effect where their owner reads them: `Daemon.apply_config` passes them on at the start
and at a reload, and `engine_settings` in ``daemon/models/specs.py`` passes the scheduler's settings
to each new worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...ipc.metrics_address import LOOPBACK, Address
from ..traces.target import Target
from .access_settings import Rule
from .ceilings import REASONING_CEILINGS
from .declaration import BYTES_MAX, REQUIRED, Applies, setting, settings_of
from .forms import (
    ADDRESS,
    GROUP,
    LOG_LEVELS,
    MODE,
    MODELS,
    PATH,
    SOCKET_PATH,
    TARGET,
    GroupName,
    Mode,
)
from .model_settings import ModelConfig
from .names import DerivedName

MONTH_S = 30 * 86_400
METRICS_PORT = 4633
"""Outside 9100 to 9999, which are allocated to exporters, and outside the ephemeral ports."""
AT_ONCE, NEXT_LOAD = Applies.AT_ONCE, Applies.NEXT_LOAD
TABLES = {"models": NEXT_LOAD, "defaults": NEXT_LOAD, "access": AT_ONCE}
"""The file's other tables, and the time at which a change in them takes effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configuration of a daemon.

    The 0 in `cores` and `kv_ram_bytes` is replaced by the machine's limit.
    """

    # fmt: off
    socket: Path = setting(REQUIRED, "Unix socket to listen on", form=SOCKET_PATH, default_doc="`$XDG_RUNTIME_DIR/inferd/inferd.sock`, else `/run/inferd/inferd.sock` if its folder is there, else `/tmp/inferd-UID/inferd.sock`")
    socket_mode: Mode = setting(Mode(0o600), "permission bits of the socket, such as `0660`", form=MODE, default_doc="`0600`; `0660` with a group")
    socket_group: GroupName = setting(GroupName(), "group of the socket", form=GROUP, default_doc="none; `inferd` for the machine's socket")
    models_dir: Path = setting(REQUIRED, "directory of model files, into which `inferd pull` downloads", form=PATH, default_doc="`$XDG_DATA_HOME/inferd/models`")
    state_dir: Path = setting(REQUIRED, "directory of state that outlives the daemon", form=PATH, default_doc="`$XDG_STATE_HOME/inferd`")
    cores: int = setting(REQUIRED, "CPU cores that all models share; 0: all usable cores", 0, 4096, default_doc="0")
    sessions_max: int = setting(100, "maximum number of open sessions", 1, 100_000, AT_ONCE)
    sessions_user_max: int = setting(0, "maximum number of open sessions of one user; `0`: as many as `sessions-max`", 0, 100_000, AT_ONCE)
    idle_yield_ms: int = setting(10_000, "idle time after which an open session yields its place to a request that waits for one", 0, MONTH_S * 1000, AT_ONCE)
    sessions_waiting_max: int = setting(256, "maximum number of requests that wait for the place of an open session", 1, 100_000, AT_ONCE)
    sessions_waiting_user_max: int = setting(128, "maximum number of such requests of one user", 1, 100_000, AT_ONCE)
    idle_timeout_ms: int = setting(300_000, "idle time after which a session is closed or, with an id, made dormant", 1, MONTH_S * 1000, AT_ONCE)
    keep_alive_s: float = setting(300.0, "idle time after which a model is unloaded; -1: never, 0: at once", -1, MONTH_S, AT_ONCE)
    preload: tuple[str, ...] = setting((), "models that are loaded at the start, in this order: a list, or a text such as `qwen3,coder`", form=MODELS, default_doc="none")
    memory_bytes: int = setting(0, "memory budget of all models together; 0: the machine's free memory", 0, BYTES_MAX)
    residency_s: float = setting(20.0, "time for which a model keeps admitting requests while others wait for its memory; 0: none", 0, 86_400)
    load_retry_s: float = setting(10.0, "time for which a failed load is not retried, if the file has not changed", 0, 3600)
    connections_max: int = setting(256, "maximum number of open connections", 1, 100_000, AT_ONCE)
    descriptors_user_max: int = setting(256, "maximum number of open descriptors that one user has passed", 16, 100_000, AT_ONCE)
    request_bytes_user_max: int = setting(64 << 20, "maximum memory of the requests of one user that are in flight, in bytes", 16 << 20, BYTES_MAX, AT_ONCE)
    request_bytes_max: int = setting(256 << 20, "maximum memory of all requests in flight, in bytes", 16 << 20, BYTES_MAX, AT_ONCE)
    tasks_waiting_max: int = setting(512, "maximum number of waiting tasks, over all models", 1, 1_000_000, AT_ONCE)
    tasks_waiting_user_max: int = setting(256, "maximum number of waiting tasks of one user", 1, 1_000_000, AT_ONCE)
    prompt_tokens_waiting_max: int = setting(4_000_000, "maximum number of prompt tokens of all waiting tasks, over all models", 1, 1_000_000_000, AT_ONCE)
    prompt_tokens_waiting_user_max: int = setting(2_000_000, "maximum number of prompt tokens of the waiting tasks of one user", 1, 1_000_000_000, AT_ONCE)
    session_bytes_user_max: int = setting(128 << 20, "maximum memory of the sessions, open and dormant, and graphs of one user, in bytes", 1, BYTES_MAX, AT_ONCE)
    kept_sessions_user_max: int = setting(100, "maximum number of sessions that one user keeps, which are not deleted while they are dormant", 0, 100_000, AT_ONCE)
    kept_tensors_user_max: int = setting(1000, "maximum number of tensors of one user that stay in the daemon", 0, 100_000, AT_ONCE)
    kept_tensor_bytes_user_max: int = setting(256 << 20, "maximum size of the tensors of one user that stay in the daemon, in bytes", 0, BYTES_MAX, AT_ONCE)
    kept_tensor_bytes_max: int = setting(1 << 30, "maximum size of all tensors that stay in the daemon, in bytes", 0, BYTES_MAX, AT_ONCE)
    buffers_user_max: int = setting(64, "maximum number of buffers of one user, which its programs share with the daemon", 0, 100_000, AT_ONCE)
    buffer_bytes_user_max: int = setting(1 << 30, "maximum size of the buffers of one user, in bytes", 0, BYTES_MAX, AT_ONCE)
    buffer_bytes_max: int = setting(4 << 30, "maximum size of all buffers, in bytes", 0, BYTES_MAX, AT_ONCE)
    descriptor_models_user_max: int = setting(8, "maximum number of models of one user that are loaded from descriptors", 0, 1000, AT_ONCE)
    labels_user_max: int = setting(64, "maximum number of labels of one user's connections", 1, 100_000, AT_ONCE)
    dormant_sessions_max: int = setting(1000, "maximum number of dormant sessions", 0, 1_000_000, AT_ONCE)
    dormant_days_max: float = setting(7.0, "days after which a dormant session is deleted", 0, 3650, AT_ONCE)
    dormant_bytes_max: int = setting(256 << 20, "maximum memory of all dormant sessions, in bytes", 0, BYTES_MAX, AT_ONCE)
    usage_days: float = setting(90.0, "days after which the usage of an hour is deleted, but not before its month has ended", 1, 3650, AT_ONCE)
    states_max: int = setting(1000, "maximum number of named states", 0, 1_000_000, AT_ONCE)
    states_user_max: int = setting(100, "maximum number of named states of one user", 0, 1_000_000, AT_ONCE)
    states_bytes_max: int = setting(64 << 20, "maximum memory of all named states, in bytes; it also counts in `session-bytes-user-max`", 0, BYTES_MAX, AT_ONCE)
    kv_disk_bytes: int = setting(8 << 30, "maximum size of KV states on disk, of all models and users; 0: none are written", 0, BYTES_MAX)
    kv_ram_bytes: int = setting(REQUIRED, "maximum size of saved KV states in a model's memory; 0: an eighth of the machine's memory, at most 4 GiB", 0, BYTES_MAX, NEXT_LOAD, default_doc="0")
    kv_share: Literal["user", "all"] = setting("user", "reuse of KV states: within one `user`, or across `all` users")
    media_bytes_max: int = setting(32 << 20, "maximum size of one image or sound, in bytes", 1, BYTES_MAX, AT_ONCE)
    media_items_max: int = setting(64, "maximum number of images and sounds in the messages of one request, and in the history of one session", 1, 10_000, AT_ONCE)
    media_session_bytes_max: int = setting(256 << 20, "maximum size of the images and sounds of one session, in bytes", 1, BYTES_MAX, AT_ONCE)
    media_user_bytes_max: int = setting(1 << 30, "maximum size of all images and sounds of one user, in bytes; content that several sessions have counts once", 1, BYTES_MAX, AT_ONCE)
    media_pixels_max: int = setting(64_000_000, "maximum number of pixels of an image, which is checked before the image is decoded", 1, 1_000_000_000, NEXT_LOAD)
    audio_seconds_max: int = setting(600, "maximum length of a sound, in seconds", 1, 86_400, NEXT_LOAD)
    media_on_swap: Literal["note", "refuse"] = setting("note", "images and sounds in the history that the model of a later swap cannot read: a text stands in their place (`note`), or turns are refused (`refuse`)", applies=AT_ONCE)
    media_cache_bytes: int = setting(256 << 20, "maximum size of the embeddings of images and sounds that are kept for one model; they count in the model's memory", 0, BYTES_MAX, NEXT_LOAD)
    shared_prefix_tokens_min: int = setting(64, "minimum length of a common prefix for which a prompt waits until another has computed it", 1, 1_000_000, NEXT_LOAD)
    checkpoint_tokens: int = setting(2048, "distance between checkpoints of a prompt, for models whose KV state cannot be truncated", 64, 10_000_000, NEXT_LOAD)
    checkpoints_max: int = setting(32, "maximum number of checkpoints of a conversation in memory, for recurrent and hybrid models; they take at most a quarter of `kv-ram-bytes`", 1, 1000, NEXT_LOAD)
    jobs_requests_max: int = setting(16, "maximum number of requests of all jobs that are computed or wait for their turn at a time; the class `low` leaves a quarter of them to others", 1, 10_000, AT_ONCE)
    jobs_lines_max: int = setting(50_000, "maximum number of lines of a file with the requests of a job", 1, 1_000_000, AT_ONCE)
    jobs_file_bytes_max: int = setting(200 << 20, "maximum size of such a file, in bytes", 1, BYTES_MAX, AT_ONCE)
    jobs_user_max: int = setting(1000, "maximum number of jobs and files of one user; beyond it the oldest ended ones are deleted", 1, 1_000_000, AT_ONCE)
    jobs_user_bytes_max: int = setting(2 << 30, "maximum size of the files of jobs of one user, in bytes; beyond it the oldest ended jobs are deleted", 1, BYTES_MAX, AT_ONCE)
    jobs_bytes_max: int = setting(16 << 30, "maximum size of the files of jobs of all users, in bytes; beyond it new ones are refused, unless the user has ended jobs that can be deleted", 1, BYTES_MAX, AT_ONCE)
    jobs_days_max: float = setting(30.0, "days after which an ended job is deleted with its results, and a file that no job needs", 0, 3650, AT_ONCE)
    shifts_max: int = setting(8, "maximum number of context shifts in one turn", 0, 1_000_000, NEXT_LOAD)
    step_ms_target: int = setting(150, "target duration of a decoding step, which bounds the prompt tokens added to it", 1, 10_000, NEXT_LOAD)
    quantum_tokens: int = setting(256, "tokens that a task computes before another task of the same priority may take its slot", 1, 1_000_000, NEXT_LOAD)
    ageing_tokens: int = setting(20_000, "tokens computed for others after which a waiting task's priority rises by one class", 1, 1_000_000_000, NEXT_LOAD)
    tuning: bool = setting(True, "whether flash attention and numbers of threads that are not configured are measured while no model has work", applies=AT_ONCE)
    priority_strict: bool = setting(False, "whether a higher priority precedes a lower one of another user; if not, it gives its user a larger share", applies=NEXT_LOAD)
    reader_lag_ms: int = setting(200, "time that the reader of a stream may lag before its task yields its slot to waiting tasks, and its session its place", 1, 3_600_000, NEXT_LOAD)
    reader_timeout_s: float = setting(300.0, "time after which a task that nobody reads ends", 0.1, 86_400)
    worker_hang_timeout_s: float = setting(120.0, "time without progress after which a busy worker is replaced and a load ends", 0.1, 86_400, NEXT_LOAD)
    swap_grace_s: float = setting(60.0, "time that turns on the old model of a swap have to finish", 0, 86_400)
    reasoning_max: dict[str, int] = setting({}, "maximum number of tokens of a thought, for all turns or by class: a number, or a table as `{ low = 1000 }`", applies=AT_ONCE, form=REASONING_CEILINGS, default_doc="none")
    shutdown_grace_s: float = setting(30.0, "time that running turns have to finish after SIGTERM", 0, 86_400, AT_ONCE)
    metrics: Address = setting(Address(LOOPBACK, METRICS_PORT), "address of the metrics listener: a port, HOST:PORT, the path of a Unix socket, or off", form=ADDRESS, default_doc="`127.0.0.1:4633` for the machine's socket; else a Unix socket beside the daemon's, `inferd-metrics.sock`")
    metrics_network: Literal["loopback", "any"] = setting("loopback", "allowed metrics clients: programs on this machine (`loopback`), or `any`")
    traces: Target = setting(Target(), "destination of OpenTelemetry spans: off, `http://HOST:PORT` of a collector, otlp (the collector in `OTEL_EXPORTER_OTLP_ENDPOINT`), or `file:/PATH`", form=TARGET)
    traces_network: Literal["loopback", "any"] = setting("loopback", "allowed trace collectors: on this machine (`loopback`), or `any`")
    start_on_demand: bool = setting(True, "whether `inferd run` and `inferd chat` start a daemon when none runs", applies=AT_ONCE)
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "lowest level that is logged", applies=AT_ONCE)
    log_levels: dict[str, str] = setting({}, "lowest level of single loggers, as a table or as `scheduler=debug,llama=error`", applies=AT_ONCE, form=LOG_LEVELS, default_doc="none")
    log_format: Literal["auto", "json", "console"] = setting("auto", "format of the log; `auto`: JSON in the systemd journal, else console")
    log_file: Path | None = setting(None, "file to which log events are appended as lines of JSON; it may be rotated", applies=AT_ONCE, form=PATH, default_doc="none")
    log_file_bytes_max: int = setting(0, "size at which the log file is renamed to `FILE.1`, in place of the previous one; 0: no limit", 0, BYTES_MAX, AT_ONCE)
    log_text: bool = setting(False, "whether prompts and answers are logged at level debug", applies=AT_ONCE)
    # fmt: on
    models: dict[str, ModelConfig] = field(default_factory=dict)
    names: dict[str, DerivedName] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    access: tuple[Rule, ...] = ()

    @property
    def tables(self) -> dict[str, ModelConfig | DerivedName]:
        """The tables ``[models.NAME]``: of models, and of other names of models."""
        return {**self.models, **self.names}


SETTINGS = settings_of(Config)


def applies(name: str) -> Applies:
    """Return the time at which a change of a setting or table takes effect."""
    if name == "names":  # the tables [models.NAME] that load no model
        return AT_ONCE
    return TABLES.get(name) or SETTINGS[name].applies
