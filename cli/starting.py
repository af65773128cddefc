"""The daemon that commands start in the background, and the search for a running one."""

from __future__ import annotations

import os
import socket as sockets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..backends.errors import (
    BackendError,
    ConnectionLost,
    InvalidArgument,
    PermissionDenied,
    ShuttingDown,
)
from ..daemon.logs.log_lines import background_log, log_place
from ..ipc.paths import client_socket_path
from .model_arguments import check_offered
from .one_shot import OneShotClient
from .output import note

if TYPE_CHECKING:
    from ..daemon.config.settings import Config
    from ..daemon.service.install import Service

START_S_MAX = 60.0
"""The time that a daemon has to become ready."""
HELLO_S_MAX = 1.0
"""The time for a daemon's hello, after which it counts as busy."""


class FoundDaemon(msgspec.Struct, frozen=True):
    """A daemon that answers on its socket."""

    socket: str
    pid: int
    log: str | None
    """The log file, or None if its log is elsewhere."""
    started: bool
    """Whether this command has started it."""


def find_daemon(path: Path, *, started: bool = False) -> FoundDaemon | None:
    """Return the daemon at *path*, or None if no daemon answers there.

    :raises PermissionDenied: the socket is not open to this user.
    :raises ShuttingDown: the daemon admits no more tasks.
    """
    try:
        with OneShotClient(path, timeout_s=START_S_MAX) as client:
            stats = client.stats()
    except ConnectionLost:
        return None
    if stats["draining"]:
        raise ShuttingDown(
            f"the daemon (pid {stats['pid']}) at {path} finishes its tasks and admits no new ones",
            hint="`inferd stop` stops it and waits for its end; then start another",
        )
    place = log_place(stats, None)
    log = str(place) if isinstance(place, Path) else None
    return FoundDaemon(str(path), stats["pid"], log, started)


def start_daemon(arguments: Sequence[str], config: Config, wait_s: float) -> FoundDaemon:
    """Return the daemon at the socket of *config*; if none answers, start its service, or else a
    daemon in the background with these *arguments* of `serve`.

    :raises Timeout: it was not ready within *wait_s*.
    :raises InferdError: it cannot be started; the error is that of the daemon.
    """
    from ..daemon.service.background import lock_starts, start_in_background

    deadline = time.monotonic() + wait_s
    if found := find_daemon(config.socket):
        return found
    if service := _service_at(config.socket):
        return _start_service(service, config.socket, arguments)
    with lock_starts(config.state_dir, deadline):
        if found := find_daemon(config.socket):
            return found
        pid = start_in_background(arguments, config, deadline)
    return FoundDaemon(str(config.socket), pid, str(background_log(config)), True)


def _service_at(socket: Path) -> Service | None:
    """Return the service that is installed for *socket*, if systemd runs here."""
    from ..daemon.service.install import BOOTED, installed_service

    return installed_service(socket) if BOOTED.is_dir() else None


def _start_service(service: Service, socket: Path, arguments: Sequence[str]) -> FoundDaemon:
    from ..daemon.service.install import UNITS

    step = service.systemctl("start", *reversed(UNITS))
    command = " ".join(step.command)
    if any(not argument.startswith("--socket=") for argument in arguments):
        raise InvalidArgument(
            f"{socket} belongs to the installed service, which has its own configuration",
            hint=f"`{command}` starts it; for another daemon, choose --socket and --state-dir",
        )
    if not service.user and os.geteuid() != 0:
        raise PermissionDenied(
            f"only root may start the system service, to which {socket} belongs",
            hint=f"sudo {command}",
        )
    step.run()
    found = find_daemon(socket, started=True)
    if found is None:
        raise BackendError(
            f"the service was started, but no daemon answers at {socket}",
            hint="`inferd logs` shows its log",
        )
    return found


def start_on_demand(socket: Path | None, model: str) -> None:
    """Start a daemon for a command with *model* if none listens on the default socket; print a line
    about it.

    Nothing is started where the user has named a *socket*, by an option or by INFERD_SOCKET, where
    `start-on-demand` forbids it, where daemons listen elsewhere by default, or where a service is
    installed, since somebody has stopped it. The client then reports that no daemon answers.

    :raises ModelNotFound: a daemon would not have the model.
    :raises NotFound: the model is a path, and no file is there.
    """
    if socket is not None or os.environ.get("INFERD_SOCKET"):
        return
    path = client_socket_path()
    if is_listening(path):
        return
    from ..daemon.config.sources import load_config

    config = load_config()
    if not config.start_on_demand or config.socket != path or _service_at(path):
        return
    check_offered(model, config)
    found = start_daemon((), config, START_S_MAX)
    if found.started:
        note(f"started a daemon (pid {found.pid}) in the background; `inferd stop` stops it")


def is_listening(path: Path) -> bool:
    """Return whether a process listens at *path*; true also where that cannot be found out.

    The system closes the sockets of a killed daemon one after another: connections are lost while
    its listener still takes new ones, which then end without the server's hello.
    """
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
            probe.settimeout(HELLO_S_MAX)
            return bool(probe.recv(1))
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            return False
        except OSError:  # no permission, a full backlog, a busy daemon: the client reports it
            return True
