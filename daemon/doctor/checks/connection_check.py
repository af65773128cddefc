"""The daemon: its socket, whether the caller may connect, whether it answers, what it says."""

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
from ....backends.engine_build import LLAMA_COMMIT
from ....backends.errors import InferdError
from ..finding import Finding, fail, ok, warn

ANSWER_S_MAX = 3.0
REACH_S_MAX = 4 * ANSWER_S_MAX
"""Connecting, the hello and one call, and the look at the file."""
PAUSE_S = 0.05
SOFTWARE = f"inferd/{__version__}"


class Reach(msgspec.Struct, frozen=True):
    """How far a client of the caller comes."""

    socket: str
    is_there: bool = False
    is_socket: bool = False
    owner: str = ""
    group: str = ""
    mode: int = 0
    error: str = ""
    """The name of what kept it from connecting, as ECONNREFUSED."""
    joined: bool = False
    """The caller is in the socket's group, but was not yet at his login."""
    refusal: str = ""
    """What the daemon said instead of an answer, and what to do then."""
    hint: str = ""
    software: str = ""
    llama_commit: str = ""
    stats: dict[str, Any] = {}


def look_at_daemon(path: Path) -> Reach:
    """Connect to the daemon, and ask it how it is."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return Reach(str(path))
    found = Reach(
        str(path),
        is_there=True,
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
    return _ask(found)


def _name(look: Any, number: int) -> str:
    try:
        return str(look(number)[0])
    except KeyError:
        return str(number)


def _joined(gid: int) -> bool:
    """Tell whether the caller's next login will have a group that this one has not."""
    if gid in (os.getegid(), *os.getgroups()):
        return False
    try:
        user = pwd.getpwuid(os.getuid())
        return gid in os.getgrouplist(user.pw_name, user.pw_gid)
    except KeyError:
        return False


def _connect(path: Path) -> str:
    """Return the name of the error that a connection ends in, or an empty text."""
    until = time.monotonic() + ANSWER_S_MAX
    while True:
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(str(path))
                return ""
            except OSError as exc:
                full = isinstance(exc, BlockingIOError) and time.monotonic() < until
                if not full:
                    return errno.errorcode.get(exc.errno or 0, str(exc))
        time.sleep(PAUSE_S)  # its queue is full, and tells nobody when it is not


def _ask(found: Reach) -> Reach:
    from ....ipc.client import Client

    client = Client(
        found.socket, timeout=ANSWER_S_MAX, connect_timeout=ANSWER_S_MAX, software="inferd doctor"
    )
    try:
        with client:
            stats, hello = client.stats(), client.server
    except InferdError as exc:
        return msgspec.structs.replace(found, refusal=exc.message, hint=exc.hint)
    return msgspec.structs.replace(
        found, software=hello.software, llama_commit=hello.llama_commit, stats=stats
    )


def check_socket(reach: Reach) -> Iterator[Finding]:
    """Check the socket, and whether the caller may connect."""
    where, whose = reach.socket, f"{reach.owner}:{reach.group} {reach.mode:o}"
    if not reach.is_there:
        yield warn(
            "socket",
            f"no daemon listens at {where}",
            "`inferd serve` starts one, or `inferd install-service` lets systemd start it;"
            " INFERD_SOCKET names another socket",
        )
    elif not reach.is_socket:
        yield fail("socket", f"{where} is no socket", "move it away, or set INFERD_SOCKET")
    elif reach.error == "ECONNREFUSED":
        yield warn(
            "socket",
            f"{where} was left by a daemon that has died",
            "`inferd serve` takes it over; a service: `systemctl restart inferd.socket`",
        )
    elif reach.error == "EACCES":
        yield fail("socket", f"{where} ({whose}) is not open to you", _let_in(reach))
    elif reach.error == "EAGAIN":
        yield fail(
            "socket",
            f"{where} takes no connection: its queue is full",
            "the daemon hangs: see its log, and start it again",
        )
    elif reach.error:
        yield fail("socket", f"{where}: {reach.error}", "set INFERD_SOCKET to a daemon's socket")
    elif reach.mode & stat.S_IWOTH:
        yield warn(
            "socket",
            f"{where} ({whose}) is open to every user of this machine",
            "SocketMode=0660 in inferd.socket, or chmod o-w",
        )
    else:
        yield ok("socket", f"{where} ({whose}) is open to you")


def _let_in(reach: Reach) -> str:
    if reach.joined:
        return f"log in again: you are in the group {reach.group} from the next login on"
    if reach.mode & stat.S_IWGRP and reach.group != "root":
        return f"`sudo usermod -aG {reach.group} USER` lets a user in, from the next login on"
    return "it is its owner's alone: start a daemon of your own with `inferd serve`"


def check_daemon(reach: Reach) -> Iterator[Finding]:
    """Check what a daemon that answers says of itself."""
    if reach.refusal:
        yield fail("daemon", reach.refusal, reach.hint)
    if not reach.software:
        return
    if reach.software != SOFTWARE or reach.llama_commit != LLAMA_COMMIT:
        yield warn(
            "daemon",
            f"{reach.software} runs (llama.cpp {reach.llama_commit}), and this is {SOFTWARE}"
            f" (llama.cpp {LLAMA_COMMIT})",
            "start it again, or use the command that belongs to it",
        )
    for component in reach.stats.get("components", ()):
        if not component["up"]:
            yield warn(
                "daemon",
                f"{component['component']} fails: {component['effect']}: {component['cause']}",
                component["remedy"],
            )
    if waiting := ", ".join(reach.stats.get("restart_for", ())):
        yield warn(
            "daemon",
            f"changed in the file, and not in force: {waiting}",
            "start it again: `systemctl restart inferd`",
        )
    if reach.stats.get("draining"):
        yield warn("daemon", "it takes nothing new, and ends", "wait, and start it again")
    yield ok("daemon", f"{reach.software} answers, pid {reach.stats.get('pid')}")
