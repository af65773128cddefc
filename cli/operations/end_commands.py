"""`inferd drain` and `inferd stop`: the end of work, and of the daemon."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket as sockets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...backends.errors import Busy, PermissionDenied, ShuttingDown, Timeout
from ...ipc.peer import peer_of
from ..client import client_of, socket_of
from ..options import JsonOutput, SocketPath
from ..output import Columns, note, table_of, write_json, write_result

if TYPE_CHECKING:
    from ...ipc.client import Client

POLL_S = 0.05
MOVES_S_MAX = 600.0
"""Time for the moves of a node's sessions, beside the wait for turns."""
STAYING: Columns = {
    "SESSION": lambda s: s["session_id"] or None,
    "USER": lambda s: s["user"] or None,
    "MODEL": "model",
    "CAUSE": lambda s: f"{s['error']['name']}: {s['error']['message']}",
}
CALL_S_MIN = 0.25
"""Minimum timeout of a call, so that the drain begins even with `--wait 0`."""


def drain(
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for running tasks.")
    ] = 60.0,
    node: Annotated[
        str,
        typer.Option(
            metavar="NODE",
            help="Move the sessions of this node of a fleet to other nodes.",
            show_default=False,
        ),
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Use the node again.")] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Finish running tasks and admit no new ones; return when all tasks have ended.

    The daemon still answers queries. Only a restart ends the drain; `inferd stop` stops the daemon.
    With --node, the node gets no new sessions until --undo, and its sessions move to other nodes.
    """
    if node or undo:
        _drain_node(node, undo, wait, socket, as_json)
        return
    with client_of(socket) as client:
        unfinished = _drain(client, time.monotonic() + wait)
    if unfinished:
        raise Timeout(
            f"tasks that have not ended within {wait:g} s: {unfinished}",
            hint="they continue, and no new task is admitted; `inferd queue` lists them",
        )
    text = "drained: no task runs, and none is admitted before a restart"
    write_result(as_json, {"drained": True}, text)


def _drain_node(node: str, undo: bool, wait: float, socket: SocketPath, as_json: bool) -> None:
    with client_of(socket) as client:
        result = client.drain(node=node, undo=undo, wait=wait, timeout=wait + MOVES_S_MAX)
    if undo:
        write_result(as_json, {"node": node, "drained": False}, f"node {node} is used again")
        return
    if result.staying and not as_json:
        table_of(STAYING, result.staying)
    found = {"node": node, "drained": True, "moved": result.moved, "staying": result.staying}
    write_result(as_json, found, f"sessions moved from {node}: {result.moved}")
    if result.staying:
        raise Busy(
            f"sessions that stay on {node}: {len(result.staying)}",
            hint="they can be used there; run the command again to try once more",
        )


def _drain(client: Client, deadline: float) -> int:
    """Drain until *deadline*; return the number of unfinished tasks.

    Each call waits for the daemon's shutdown grace time at most.
    """
    while True:
        seconds = max(CALL_S_MIN, deadline - time.monotonic())
        with contextlib.suppress(Timeout):
            client.drain(timeout=seconds)
        stats = client.stats()
        unfinished: int = stats["running"] + stats["waiting"] + stats["parked"]
        if stats["draining"] and (not unfinished or time.monotonic() >= deadline):
            return unfinished


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
            ended = _wait_until(lambda: not client.connected, wait)
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

    The pid that the daemon reports is used only if it is that of the socket's listener. In a
    container the daemon reports another pid, and with socket activation the listener is systemd.
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
    try:
        with sockets.socket(sockets.AF_UNIX) as probe:
            probe.connect(str(path))
            return peer_of(probe).pid
    except OSError:
        return 0


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
    return _wait_until(lambda: not path.exists(), wait_s)


def _wait_until(condition: Callable[[], bool], wait_s: float) -> bool:
    """Wait until *condition* holds; return whether it does."""
    deadline = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
