"""Commands on turns and sessions, and `inferd stop`."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket as sockets
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ....backends.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ShuttingDown,
    Timeout,
)
from .. import completion
from ..client import client_of, socket_of
from ..options import JsonOutput, SocketPath
from ..output import note, write, write_json

if TYPE_CHECKING:
    from ....ipc.client import Client

POLL_S = 0.05
LISTED_MAX = 10
"""Maximum number of sessions of one id that an error lists."""
_CREDENTIALS = struct.Struct("3i")


Turn = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="A session's number or id, as `inferd ps`, `queue` and `top` show it.",
        autocompletion=completion.sessions,
    ),
]


def cancel(session: Turn, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Cancel a session's turn.

    Callers that may see all tasks and manage models can also name other users' sessions.
    """
    with client_of(socket) as client:
        cancelled = client.cancel(_context_of(client, session))
    if as_json:
        write_json({"cancelled": cancelled})
    else:
        write("cancelled" if cancelled else "there was no running turn")


def park(session: Turn, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Park a session's turn: give its slot to waiting tasks until another slot is free.

    Callers that may see all tasks and manage models can also name other users' sessions.
    """
    with client_of(socket) as client:
        parked = client.park(_context_of(client, session))
    if as_json:
        write_json({"parked": parked})
    else:
        write("parked" if parked else "not parked: no other task waits for a slot of its model")


def _context_of(client: Client, wanted: str) -> int:
    """Return the context that a number or an id names: the caller's own, or else another user's
    if the caller is an operator.
    """
    found = _contexts(client, wanted, all_users=False)
    if not found:
        with contextlib.suppress(PermissionDenied):
            found = _contexts(client, wanted, all_users=True)
    if not found:
        raise NotFound(f"you have no session {wanted!r}", hint="`inferd ps` lists your sessions")
    if len(found) > 1:
        numbers = ", ".join(map(str, sorted(found)[:LISTED_MAX]))
        raise InvalidArgument(
            f"{len(found)} users have a session {wanted!r}", hint=f"give its number: {numbers}"
        )
    return found.pop()


def _contexts(client: Client, wanted: str, *, all_users: bool) -> set[int]:
    """Return the contexts with that number, or else those with that id."""
    entries = [*client.sessions(all_users=all_users), *client.queue(all_users=all_users)]
    for key in ("context", "session_id"):
        named = (one for one in entries if one[key] is not None and str(one[key]) == wanted)
        if found := {int(one["context"]) for one in named}:
            return found
    return set()


def rm_session(
    session: Annotated[
        str,
        typer.Argument(metavar="ID", help="A session's id.", autocompletion=completion.sessions),
    ],
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Delete a session: its history and KV states, in memory and on disk."""
    with client_of(socket) as client:
        deleted = client.delete_session(session_id=session)
    if as_json:
        write_json({"deleted": deleted})
    else:
        write("deleted" if deleted else f"there was no session {session!r}")


def stop(
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait until running turns finish.")
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for its exit.")
    ] = 60.0,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Stop the daemon.

    Running turns finish within its grace time; no new task is admitted.
    """
    path = socket_of(socket)
    with client_of(path) as client, _process_of(path, client) as process:
        activated = client.stats()["socket_activated"]  # then the socket's path remains
        with contextlib.suppress(ShuttingDown):  # it is stopping already
            client.drain(stop=True)
        if now:
            _terminate(process)
        if process is None and activated:
            ended = _wait_for_goodbye(client, wait)
        else:
            ended = _wait_for_exit(path, process, wait)
    if not ended:
        raise Timeout(
            f"the daemon at {path} has not ended within {wait:g} s",
            hint="running turns still finish; --now stops them",
        )
    if as_json:
        write_json({"stopped": str(path)})
    else:
        note(f"the daemon at {path} has ended")


@contextlib.contextmanager
def _process_of(path: Path, client: Client) -> Iterator[int | None]:
    """Yield a pidfd of the daemon's process, or None if it cannot be reached.

    In a container the daemon's pid differs, and with socket activation the listener is systemd, so
    the pid is used only if both agree.
    """
    pid, descriptor = client.stats()["pid"], None
    if pid == _listener_pid(path):
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _listener_pid(path: Path) -> int:
    """Return the pid of the process that listens on *path*, or 0 if it is unknown."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
            data = probe.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return 0
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


def _terminate(process: int | None) -> None:
    """Send a second SIGTERM, which ends a stopping daemon at once."""
    if process is None:
        raise PermissionDenied(
            "the daemon's process cannot be reached from here",
            hint="send SIGTERM on its own machine or container: `systemctl kill inferd`",
        )
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise PermissionDenied("the daemon is another user's process", hint="use sudo") from None


def _wait_for_exit(path: Path, process: int | None, wait_s: float) -> bool:
    if process is not None:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(wait_s * 1000))
    deadline = time.monotonic() + wait_s
    while path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def _wait_for_goodbye(client: Client, wait_s: float) -> bool:
    """Wait until the daemon has closed the connection; return whether it has."""
    deadline = time.monotonic() + wait_s
    while not client.asynchronous.connection.lost:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
