"""`inferd states`: list and delete named states."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ...daemon.printable import size_text
from .. import completion
from ..client import client_of
from ..monitoring.status_commands import columns_for
from ..one_shot import OneShotClient
from ..options import JsonOutput, Label, SocketPath
from ..output import Columns, write_list, write_result

STATES: Columns = {
    "NAME": "name",
    "LABEL": lambda s: s["label"] or None,
    "SHARED BY": lambda s: s.get("shared_by"),
    "MODEL": "model",
    "HISTORY": "tokens",
    "ON DISK": lambda s: size_text(s["kv_disk_bytes"]) if s["kv_disk_bytes"] else None,
    "SAVED": lambda s: time.strftime("%Y-%m-%d %H:%M", time.localtime(s["created_at"])),
}

states = typer.Typer(help="List and delete named states.")


@states.callback(invoke_without_command=True)
def list_states(
    ctx: typer.Context,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """List the named states with which you can begin sessions: yours (with --label, only those of
    that label), and those that access rules share with you.
    """
    if ctx.invoked_subcommand is not None:
        return
    with OneShotClient(socket, label=label) as client:
        found = client.list_states()
    write_list(as_json, "states", found, columns_for(found, STATES))


@states.command()
def delete(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A state's name.", autocompletion=completion.states),
    ],
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Delete a named state, with its KV state on disk.

    Sessions that began with it stay.
    """
    with client_of(socket, label=label) as client:
        deleted = client.delete_state(name)
    text = "deleted" if deleted else f"there was no state {name!r}"
    write_result(as_json, {"deleted": deleted}, text)
