"""Commands on turns, sessions and named states: cancel, park, end-reasoning,
edit-session, rm-session, restore-session, states.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...backends.errors import InvalidArgument, NotFound, PermissionDenied
from ...daemon.printable import size_text
from .. import completion
from ..client import NO_END_TEXTS, client_of
from ..monitoring.status_commands import columns_for
from ..one_shot import OneShotClient
from ..options import JsonOutput, Label, SocketPath
from ..output import Columns, write_list, write_result

if TYPE_CHECKING:
    from ...ipc.client import Client

LISTED_MAX = 10
"""Maximum number of sessions of one id that an error lists."""
Turn = Annotated[
    str,
    typer.Argument(
        metavar="ID",
        help="A session's number or id, as `inferd ps`, `queue` and `top` show it.",
        autocompletion=completion.sessions,
    ),
]


SessionId = Annotated[
    str,
    typer.Argument(metavar="ID", help="A session's id.", autocompletion=completion.sessions),
]


def cancel(
    session: Turn, label: Label = "", socket: SocketPath = None, as_json: JsonOutput = False
) -> None:
    """Cancel a session's turn.

    Callers that may see all tasks and manage models can also name other users' sessions.
    """
    with client_of(socket, label=label) as client:
        cancelled = client.cancel(_context_of(client, session))
    text = "cancelled" if cancelled else "there was no running turn"
    write_result(as_json, {"cancelled": cancelled}, text)


def park(
    session: Turn, label: Label = "", socket: SocketPath = None, as_json: JsonOutput = False
) -> None:
    """Park a session's turn: give its slot to waiting tasks until another slot is free.

    Callers that may see all tasks and manage models can also name other users' sessions.
    """
    with client_of(socket, label=label) as client:
        parked = client.park(_context_of(client, session))
    text = "parked" if parked else "not parked: no other task waits for a slot of its model"
    write_result(as_json, {"parked": parked}, text)


def end_reasoning(
    session: Turn, label: Label = "", socket: SocketPath = None, as_json: JsonOutput = False
) -> None:
    """End the reasoning of a session's turn, so that its answer begins now.

    Callers that may see all tasks and manage models can also name other users' sessions.
    """
    with client_of(socket, label=label) as client:
        found = client.end_reasoning(_context_of(client, session))
    text = "the answer begins" if found.ended else NO_END_TEXTS.get(found.reason, found.reason)
    write_result(as_json, {"ended": found.ended, "reason": found.reason}, text)


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
            f"{len(found)} users or labels have a session {wanted!r}",
            hint=f"give its number: {numbers}",
        )
    return found.pop()


def _contexts(client: Client, wanted: str, *, all_users: bool) -> set[int]:
    """Return the contexts with that number, or else those with that id."""
    entries: list[Any] = [*client.sessions(all_users=all_users), *client.queue(all_users=all_users)]
    for key in ("context", "session_id"):
        named = (one["context"] for one in entries if str(one[key] or "") == wanted)
        if found := {context for context in named if context is not None}:
            return found
    return set()


def edit_session(
    session: SessionId,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help='Its title; "" is its first words.')
    ] = None,
    keep: Annotated[
        bool | None,
        typer.Option("--keep/--no-keep", help="Never delete it by itself while it is dormant."),
    ] = None,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Change a session's title, or keep it."""
    with client_of(socket, label=label) as client:
        found = client.update_session(session, title=title, kept=keep)
    text = f"{found['title'] or session}, {'kept' if found['kept'] else 'not kept'}"
    write_result(as_json, {"session": found}, text)


def restore_session(
    session: SessionId,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Restore a session that was deleted with `rm-session --undo`."""
    with client_of(socket, label=label) as client:
        found = client.restore_session(session)
    write_result(as_json, {"session": found}, "restored")


def rm_session(
    session: SessionId,
    undo: Annotated[
        float,
        typer.Option(metavar="S", min=0, max=3600, help="Seconds in which it can be restored."),
    ] = 0.0,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Delete a session: its history and KV states, in memory and on disk."""
    with client_of(socket, label=label) as client:
        deleted = client.delete_session(session_id=session, undo_s=undo)
    text = "deleted" if deleted else f"there was no session {session!r}"
    if deleted and undo:
        text = f"deleted; `inferd restore-session {session}` restores it within {undo:g} s"
    write_result(as_json, {"deleted": deleted}, text)


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
