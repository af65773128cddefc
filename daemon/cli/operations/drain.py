"""`inferd drain`: running tasks finish, and no new task is admitted."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ....backends.errors import Timeout
from ..client import client_of
from ..options import JsonOutput, SocketPath
from ..output import write, write_json

if TYPE_CHECKING:
    from ....ipc.client import Client

CALL_S_MIN = 0.25
"""Minimum timeout of a call, so that the drain begins even with `--wait 0`."""


def drain(
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long to wait for running tasks.")
    ] = 60.0,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Finish running tasks and admit no new ones; return when all tasks have ended.

    The daemon still answers queries. Only a restart ends the drain; `inferd stop` stops the daemon.
    """
    with client_of(socket) as client:
        unfinished = _drain(client, time.monotonic() + wait)
    if unfinished:
        raise Timeout(
            f"tasks that have not ended within {wait:g} s: {unfinished}",
            hint="they continue, and no new task is admitted; `inferd queue` lists them",
        )
    if as_json:
        write_json({"drained": True})
    else:
        write("drained: no task runs, and none is admitted before a restart")


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
