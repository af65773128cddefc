"""`inferd start`: the daemon in the background."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ...backends.errors import PermissionDenied
from ...ipc.paths import client_socket_path, daemon_socket_path
from ..options import (
    ConfigFile,
    JsonOutput,
    ModelsDir,
    SettingPairs,
    SocketPath,
    StateDir,
    read_settings,
)
from ..output import write_result
from ..starting import START_S_MAX, FoundDaemon, find_daemon, start_daemon
from .serve import Cores, LowestLevel, MetricsAddress


def start(
    config: ConfigFile = None,
    socket: SocketPath = None,
    models_dir: ModelsDir = None,
    state_dir: StateDir = None,
    metrics: MetricsAddress = None,
    cores: Cores = None,
    log_level: LowestLevel = None,
    settings: SettingPairs = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait until it is ready.")
    ] = START_S_MAX,
    as_json: JsonOutput = False,
) -> None:
    """Start the daemon in the background; return when it is ready.

    If a daemon already answers on the socket, nothing is started. The log goes to the file that the
    setting `log-file` names, or else to inferd.log in the state directory; `inferd logs` shows it.
    An installed service of this socket is started by systemctl. Ctrl-C stops the new daemon.
    """
    from ...daemon.config.sources import load_config

    flags = {
        "config": config,
        "socket": socket,
        "models_dir": models_dir,
        "state_dir": state_dir,
        "metrics": metrics,
        "cores": cores,
        "log_level": log_level,
    }
    configured = load_config(flags | read_settings(settings))
    found = None if socket else _find_shared(configured.socket)
    if found is None:
        arguments = [*_arguments(flags), *(f"--set={pair}" for pair in settings or ())]
        found = start_daemon(arguments, configured, wait)
    write_result(as_json, msgspec.to_builtins(found), _text(found))


def _arguments(flags: Mapping[str, object]) -> Iterator[str]:
    """Yield the given flags as arguments of `serve`."""
    for name, value in flags.items():
        if value is not None:
            yield f"--{name.replace('_', '-')}={value}"


def _find_shared(socket: Path) -> FoundDaemon | None:
    """Return the daemon that clients of this user find by default, if it is not at *socket*. It is
    the system's daemon, where the user has none.
    """
    path = client_socket_path()
    if path == socket or socket != daemon_socket_path():
        return None
    try:
        return find_daemon(path)
    except PermissionDenied:  # it serves only others, and the user wants a daemon
        return None


def _text(found: FoundDaemon) -> str:
    state = "is ready" if found.started else "already runs"
    log = found.log or "`inferd logs` shows it"
    return f"the daemon (pid {found.pid}) {state} at {found.socket}\nlog: {log}"
