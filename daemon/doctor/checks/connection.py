"""The connection to the daemon: its socket, access to it, and the daemon's reply."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import socket as sockets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from .... import __version__
from ....backends.errors import InferdError
from ....backends.library import LLAMA_COMMIT
from ..finding import Finding, fail, ok, warn

ANSWER_S_MAX = 3.0
CONNECTION_S_MAX = 4 * ANSWER_S_MAX
"""Limit for the file's status, the connect, the hello and one call."""
PAUSE_S = 0.05
SOFTWARE = f"inferd/{__version__}"


class ConnectionFacts(msgspec.Struct, frozen=True):
    """The result of an attempt to connect and to call `stats`."""

    socket: str
    exists: bool = False
    is_socket: bool = False
    owner: str = ""
    group: str = ""
    mode: int = 0
    error: str = ""
    """The name of the error of the connect, such as ECONNREFUSED."""
    joined: bool = False
    """Whether the caller has joined the socket's group, but only after logging in."""
    refusal: str = ""
    """The message of the error that the daemon returned; `hint` is its hint."""
    hint: str = ""
    software: str = ""
    llama_commit: str = ""
    stats: dict[str, Any] = {}


def probe_daemon(path: Path) -> ConnectionFacts:
    """Connect to the daemon and call `stats`."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return ConnectionFacts(str(path))
    found = ConnectionFacts(
        str(path),
        exists=True,
        is_socket=stat.S_ISSOCK(status.st_mode),
        owner=_name(pwd.getpwuid, status.st_uid),
        group=_name(grp.getgrgid, status.st_gid),
        mode=stat.S_IMODE(status.st_mode),
        joined=_joined(status.st_gid),
    )
    if not found.is_socket:
        return found
    error = _connect(path)
    if error:
        return msgspec.structs.replace(found, error=error)
    return _call_stats(found)


def _name(look_up: Any, number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def _joined(gid: int) -> bool:
    """Return whether the caller gets a group only with the next login."""
    if gid in (os.getegid(), *os.getgroups()):
        return False
    try:
        user = pwd.getpwuid(os.getuid())
        return gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except KeyError:
        return False


def _connect(path: Path) -> str:
    """Return the name of the error of a connect, or an empty text."""
    deadline = time.monotonic() + ANSWER_S_MAX
    while True:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
                return ""
            except OSError as exc:
                full = isinstance(exc, BlockingIOError) and time.monotonic() < deadline
                if not full:
                    return errno.errorcode.get(exc.errno or 0, str(exc))
        time.sleep(PAUSE_S)  # the backlog is full; no event reports space


def _call_stats(found: ConnectionFacts) -> ConnectionFacts:
    from ....ipc.client import Client

    client = Client(
        found.socket, timeout=ANSWER_S_MAX, connect_timeout=ANSWER_S_MAX, software="inferd doctor"
    )
    try:
        with client:
            stats, hello = client.stats(), client.server
    except InferdError as exc:
        return msgspec.structs.replace(
            found, refusal=exc.message_for_people, hint=exc.hint_for_people
        )
    return msgspec.structs.replace(
        found, software=hello.software, llama_commit=hello.llama_commit, stats=stats
    )


def check_socket(connection: ConnectionFacts) -> Iterator[Finding]:
    """Check the socket and the caller's access to it."""
    where, mode = connection.socket, f"{connection.owner}:{connection.group} {connection.mode:o}"
    if not connection.exists:
        yield warn(
            f"no daemon listens at {where}",
            "`inferd start` starts one, or `inferd install-service` lets systemd start it;"
            " INFERD_SOCKET names another socket",
        )
    elif not connection.is_socket:
        yield fail(f"{where} is not a socket", "move it away, or set INFERD_SOCKET")
    elif connection.error == "ECONNREFUSED":
        yield warn(
            f"{where} was left by a daemon that has crashed",
            "`inferd start` takes it over; a service: `systemctl restart inferd.socket`",
        )
    elif connection.error == "EACCES":
        yield fail(f"{where} ({mode}) is not open to you", _access_remedy(connection))
    elif connection.error == "EAGAIN":
        yield fail(
            f"{where} accepts no connection: its backlog is full",
            "the daemon hangs: see its log and restart it",
        )
    elif connection.error:
        yield fail(f"{where}: {connection.error}", "set INFERD_SOCKET to a daemon's socket")
    elif connection.mode & stat.S_IWOTH:
        yield warn(
            f"{where} ({mode}) is open to every user of this machine",
            "SocketMode=0660 in inferd.socket, or chmod o-w",
        )
    else:
        yield ok(f"{where} ({mode}) is open to you")


def _access_remedy(connection: ConnectionFacts) -> str:
    if connection.joined:
        return f"log in again: you are in the group {connection.group} from the next login on"
    if connection.mode & stat.S_IWGRP and connection.group != "root":
        return (
            f"`sudo usermod -aG {connection.group} USER` gives a user access from the next login on"
        )
    return "only its owner may connect: start your own with `inferd start`"


def check_daemon(connection: ConnectionFacts) -> Iterator[Finding]:
    """Check the version and the state that a running daemon reports."""
    if connection.refusal:
        yield fail(connection.refusal, connection.hint)
    if not connection.software:
        return
    if connection.software != SOFTWARE or connection.llama_commit != LLAMA_COMMIT:
        yield warn(
            f"the daemon is {connection.software} (llama.cpp {connection.llama_commit}), this"
            f" command {SOFTWARE} (llama.cpp {LLAMA_COMMIT})",
            "restart the daemon, or use the command of its version",
        )
    for component in connection.stats.get("components", ()):
        if not component["up"]:
            yield warn(
                f"{component['component']} fails: {component['effect']}: {component['cause']}",
                component["remedy"],
            )
    if waiting := ", ".join(connection.stats.get("pending_restart", ())):
        yield warn(
            f"changed in the file, but not in force before a restart: {waiting}",
            "restart it: `systemctl restart inferd`",
        )
    if connection.stats.get("draining"):
        yield warn("it is draining: it admits no new requests", "restart it")
    yield ok(f"{connection.software} answers, pid {connection.stats.get('pid')}")
