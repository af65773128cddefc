"""Commands that steer: cancel or park a turn, delete a session, stop the daemon."""

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
from ..client import client_of, socket_of
from ..help import completion as completing
from ..options import JsonOutput, SocketPath
from ..output import note, write, write_json

if TYPE_CHECKING:
    from ....ipc.client import Client

POLL_S = 0.05
NAMED_MAX = 10
"""Sessions of one id that are told apart by their numbers."""
_CREDENTIALS = struct.Struct("3i")


Turn = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="A session's number or id, as `inferd ps`, `queue` and `top` have it.",
        autocompletion=completing.sessions,
    ),
]


def cancel(session: Turn, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Cancel a session's turn.

    Whoever may see all tasks and manage models reaches those of other users, too.
    """
    with client_of(socket) as client:
        cancelled = client.cancel(_context_of(client, session))
    if as_json:
        write_json({"cancelled": cancelled})
    else:
        write("cancelled" if cancelled else "there was no turn under way")


def park(session: Turn, socket: SocketPath = None, as_json: JsonOutput = False) -> None:
    """Let a session's turn give its slot to others that wait, until one is free.

    Whoever may see all tasks and manage models reaches those of other users, too.
    """
    with client_of(socket) as client:
        parked = client.park(_context_of(client, session))
    if as_json:
        write_json({"parked": parked})
    else:
        write("it gives way" if parked else "it stays as it is: nobody waits for a slot of its")


def _context_of(client: Client, wanted: str) -> int:
    """Return the context that a number or an id names: one of the caller's, or else one of those
    that an operator sees.
    """
    found = _contexts(client, wanted, everybody=False)
    if not found:
        with contextlib.suppress(PermissionDenied):
            found = _contexts(client, wanted, everybody=True)
    if not found:
        raise NotFound(f"you have no session {wanted!r}", hint="`inferd ps` lists your sessions")
    if len(found) > 1:
        numbers = ", ".join(map(str, sorted(found)[:NAMED_MAX]))
        raise InvalidArgument(
            f"{len(found)} users have a session {wanted!r}", hint=f"give its number: {numbers}"
        )
    return found.pop()


def _contexts(client: Client, wanted: str, *, everybody: bool) -> set[int]:
    """Return the contexts of that number, else of that id, which may be another's number."""
    told = [*client.sessions(all_users=everybody), *client.queue(all_users=everybody)]
    for key in ("context", "session_id"):
        named = (one for one in told if one[key] is not None and str(one[key]) == wanted)
        if found := {int(one["context"]) for one in named}:
            return found
    return set()


def forget(
    session: Annotated[
        str,
        typer.Argument(metavar="ID", help="A session's id.", autocompletion=completing.sessions),
    ],
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Delete a session: its history, and what is kept of it in memory and on disk."""
    with client_of(socket) as client:
        forgotten = client.forget(session_id=session)
    if as_json:
        write_json({"forgotten": forgotten})
    else:
        write("forgotten" if forgotten else f"there was no session {session!r}")


def stop(
    now: Annotated[bool, typer.Option("--now", help="Do not let running turns finish.")] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for the end.")
    ] = 60.0,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Stop the daemon.

    Running turns finish within its grace time, nothing new begins.
    """
    path = socket_of(socket)
    with client_of(path) as client, _process_of(path, client) as process:
        activated = client.stats()["socket_activated"]  # then its path stays
        with contextlib.suppress(ShuttingDown):  # it stops already
            client.drain(stop=True)
        if now:
            _end(process)
        if process is None and activated:
            ended = _wait_until_left(client, wait)
        else:
            ended = _wait_until_gone(path, process, wait)
    if not ended:
        raise Timeout(
            f"the daemon at {path} has not ended within {wait:g} s",
            hint="it finishes what runs; --now does not let it",
        )
    if as_json:
        write_json({"stopped": str(path)})
    else:
        note(f"the daemon at {path} has ended")


@contextlib.contextmanager
def _process_of(path: Path, client: Client) -> Iterator[int | None]:
    """Give a descriptor of the daemon's process; None where it cannot be reached from here.

    The number that the daemon gives is another one beyond a container's border, and the socket's
    listener is systemd where that opened it: only where both agree it is believed.
    """
    pid, descriptor = client.stats()["pid"], None
    if pid == _listener(path):
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _listener(path: Path) -> int:
    """Return the process that listens on *path*; 0 where it is not known here."""
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
            data = probe.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return 0
    pid: int = _CREDENTIALS.unpack(data)[0]
    return pid


def _end(process: int | None) -> None:
    """Send the second signal, which ends a stopping daemon at once."""
    if process is None:
        raise PermissionDenied(
            "the daemon's process cannot be reached from here",
            hint="send it SIGTERM where it runs: `systemctl kill inferd`",
        )
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise PermissionDenied("the daemon is another user's process", hint="use sudo") from None


def _wait_until_gone(path: Path, process: int | None, wait_s: float) -> bool:
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


def _wait_until_left(client: Client, wait_s: float) -> bool:
    """Wait for the daemon's goodbye."""
    deadline = time.monotonic() + wait_s
    while not client.asynchronous.connection.lost:
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (cancel, park, forget, stop):
        app.command()(command)
