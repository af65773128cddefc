"""`inferd top`: the daemon's current activity, on a screen on a terminal, otherwise as one frame of
plain tables.

`top_view` is pure. `top_source` queries the daemon. Only this module imports `top_screen`, which
needs textual.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..client import socket_of
from ..commands import optional_import
from ..nodes import Node, check_node
from ..one_shot import OneShotClient
from ..options import AllUsers, JsonOutput, SocketPath
from ..output import table, write, write_json

if TYPE_CHECKING:
    from .top_view import TopFrame

INTERVAL_HELP = "The time between two updates."


def top(
    interval: Annotated[
        float,
        typer.Option("--interval", "-n", metavar="SECONDS", min=0.1, max=3600, help=INTERVAL_HELP),
    ] = 1.0,
    all_users: AllUsers = False,
    node: Node = None,
    once: Annotated[
        bool, typer.Option("--once", "-b", help="Print one frame as plain tables.")
    ] = False,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Watch the daemon: models, tasks in the order of the queue, sessions, tokens per second.

    ? lists the keys, which cancel and park tasks and unload models. Without a terminal, and with
    --json, it prints one frame.
    """
    path = socket_of(socket)
    if once or as_json or not _on_terminal():
        _write_once(path, interval, node, all_users, as_json)
        return
    otherwise = "; `inferd top --once` needs no textual"
    with optional_import("the screen of inferd top needs textual", "top", otherwise):
        from .top_screen import Top
    if not os.environ.get("NO_COLOR"):
        os.environ.pop("NO_COLOR", None)  # textual would take an empty value for a set one
    with OneShotClient(path) as client:  # fail now if the daemon, or the node, is missing
        check_node(client, node)
    screen = Top(path, interval, node, all_users=all_users)
    screen.run()
    raise typer.Exit(screen.return_code or 0)


def _on_terminal() -> bool:
    """Return whether a screen can be shown; textual draws it on standard error."""
    return os.environ.get("TERM") != "dumb" and all(
        stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)
    )


def _write_once(
    path: Path, interval: float, node: str | None, all_users: bool, as_json: bool
) -> None:
    import anyio

    from .top_source import first_frame

    frame: TopFrame = anyio.run(partial(first_frame, path, interval, node, all_users=all_users))
    if as_json:
        write_json(frame.document())
        return
    write("\n".join(frame.header))
    for panel, rows in frame.tables():
        write("")
        table(panel.heads, [row.cells for row in rows])
