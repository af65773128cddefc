"""Sessions of the caller: list, create, read and delete them, branches, rewinds, and the end of a
turn.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import anyio

from ....backends.errors import InferdError, NotFound, SessionBusy
from ....backends.media_types import media_type_of
from ....ipc.client import AsyncClient, AsyncSession, DeletionInfo, HistoryResult, SessionInfo
from ..callers import Caller
from ..exchange import Exchange
from ..fields import field_error
from ..limits import CLOSE_S_MAX
from ..media import rest_of_content
from .fields import (
    CANCEL,
    CREATE,
    DELETE,
    END_REASONING,
    FORK,
    LIST,
    RESTORE,
    REWIND,
    UPDATE,
    ListQuery,
    NewSession,
)
from .monitoring import is_own


def boundaries_of(history: HistoryResult) -> list[int]:
    """Return the numbers of messages that a session can keep, including the number of all."""
    return sorted({*history.turns, len(history.messages)})


def turns_after(history: HistoryResult, messages: int) -> int:
    """Return the number of turns to remove, so that a history keeps its first *messages*.

    :raises InvalidArgument: the cut after *messages* is not between two turns.
    """
    if messages == len(history.messages):
        return 0
    for back, before in enumerate(reversed(history.turns), 1):
        if before == messages:
            return back
    kept = ", ".join(map(str, boundaries_of(history)))
    raise field_error(
        "messages",
        f"messages: a history of {len(history.messages)} cannot be cut after {messages}",
        hint=f"it can keep {kept[:200]}",
    )


_ACTIVE = frozenset({"waiting", "running", "parked"})
_SHOWN = (
    *("title", "model", "state", "interrupted", "priority", "tokens", "turns", "kept", "idle_s"),
)


async def answer_sessions(exchange: Exchange) -> None:
    """Answer with the caller's sessions, the latest used first."""
    query = LIST.read_query(exchange.query)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        found = await client.list_sessions(search=query.search)
        entries = own_sessions(exchange.caller, cast("list[SessionInfo]", found.sessions))
        entries = [
            entry for entry in entries if (entry["session_id"] or "").startswith(query.prefix)
        ]
        entries.sort(key=lambda entry: float(entry["idle_s"]))
        page, more = _page(entries, query)
        data = await show_sessions(client, exchange.caller, page)
    dormant = {
        "sessions": found.dormant_sessions,
        "sessions_max": found.dormant_sessions_max,
        "seconds_max": found.dormant_s_max,
    }
    await exchange.send_json({"object": "list", "data": data, "has_more": more, "dormant": dormant})


def _page(entries: list[SessionInfo], query: ListQuery) -> tuple[Sequence[SessionInfo], bool]:
    """Return the entries that a query selects, and whether more follow.

    :raises NotFound: there is no session with the id *after*.
    """
    first = 0
    if query.after is not None:
        ids = [entry["session_id"] for entry in entries]
        if query.after not in ids:
            raise no_session(query.after, param="after")
        first = ids.index(query.after) + 1
    end = first + query.limit
    return entries[first:end], len(entries) > end


async def create_session(exchange: Exchange) -> None:
    """Create a session, which is dormant until its first turn."""
    fields, options = exchange.read_fields(CREATE)
    caller, session_id = exchange.caller, fields.id or new_id()
    fields.model = caller.check_model(fields.model)
    caller.check_priority(caller.class_of(fields.priority))
    with exchange.turns.reservations.reserve(caller, session_id):
        async with exchange.turns.pool.lease(caller) as client:
            if await client.sessions(dormant=True, session_id=session_id):
                raise _id_in_use(session_id)
            try:
                if options:
                    await exchange.turns.precheck.check_parameters(options)
                await _open_new(exchange, client, session_id, fields, options)
                if fields.title:
                    await client.update_session(session_id, title=fields.title)
            except SessionBusy:
                raise
            except BaseException as exc:
                await forget_session(client, session_id)
                raise CREATE.name_field(exc) if isinstance(exc, InferdError) else exc from None
            shown = await show_session(client, caller, session_id)
    await exchange.send_json(shown)


async def _open_new(
    exchange: Exchange,
    client: AsyncClient,
    session_id: str,
    fields: NewSession,
    options: dict[str, Any],
) -> None:
    async with client.session(
        fields.model,
        session_id=session_id,
        system=fields.system,
        priority=exchange.caller.class_of(fields.priority),
        queue_timeout=exchange.limits.queue_s_max,
        options=options or None,
    ) as session:
        if session.attached:
            raise _id_in_use(session_id)


async def forget_session(client: AsyncClient, session_id: str) -> None:
    """Delete a session that a failed request has created, also if the request was cancelled."""
    with anyio.move_on_after(CLOSE_S_MAX, shield=True), suppress(InferdError):
        await client.delete_session(session_id=session_id)


def new_id() -> str:
    """Return an id for a new session."""
    return f"session_{secrets.token_hex(12)}"


def _id_in_use(session_id: str) -> SessionBusy:
    return SessionBusy(
        f"there is a session {session_id!r} already",
        hint="delete it, or use another id",
        data={"param": "id"},
    )


async def answer_session(exchange: Exchange) -> None:
    """Answer with a session and its messages."""
    session_id, caller = exchange.params["session"], exchange.caller
    async with exchange.turns.pool.lease(caller) as client:
        try:
            history = await client.history(session_id=session_id)
        except NotFound:
            raise no_session(session_id) from None
        if not caller.may_use(history.session["model"]):
            raise no_session(session_id)
        [shown] = await show_sessions(client, caller, [history.session])
    more = {
        "messages": history.messages,
        "boundaries": boundaries_of(history),
        "options": history.options,
    }
    await exchange.send_json({**shown, **more})


_MEDIA_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; sandbox"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
"""Headers of bytes that a user has sent: no browser runs them as a page."""
_BYTES = b"application/octet-stream"


async def answer_media(exchange: Exchange) -> None:
    """Answer with an image or a sound of a session's messages, in parts, so that clients that read
    slowly take little memory.

    :raises NotFound: the caller has no such session, or this has no such image or sound.
    """
    session_id, sha256 = exchange.params["session"], exchange.params["sha256"]
    if re.fullmatch("[0-9a-f]{64}", sha256) is None:
        raise _no_media(session_id)
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await find_session(client, exchange.caller, session_id)
        try:
            first = await client.session_media(sha256, session_id=session_id, offset=0)
        except NotFound:
            raise _no_media(session_id) from None
        headers = [(b"content-length", str(first.size).encode()), *_MEDIA_HEADERS]
        parts = rest_of_content(client, session_id, sha256, first)
        kind = media_type_of(first.data).encode() or _BYTES
        await exchange.send_parts(parts, kind, headers)


def _no_media(session_id: str) -> NotFound:
    return NotFound(
        f"no message of the session {session_id[:128]!r} has this image or sound",
        hint="the parts of the session's messages have the hashes",
        data={"param": "sha256"},
    )


async def delete_session(exchange: Exchange) -> None:
    """Delete a session, which ends its turn."""
    session_id, undo_s = exchange.params["session"], DELETE.read_query(exchange.query).undo
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await find_session(client, exchange.caller, session_id)
        deleted = await client.delete_session(session_id=session_id, undo_s=undo_s)
    if not deleted:
        raise no_session(session_id)
    more = {"restorable_s": undo_s} if undo_s else {}
    await exchange.send_json({"id": session_id, "object": "session", "deleted": True, **more})


async def restore_session(exchange: Exchange) -> None:
    """Restore a session that was deleted a moment ago."""
    exchange.read_fields(RESTORE)
    session_id, caller = exchange.params["session"], exchange.caller
    async with exchange.turns.pool.lease(caller) as client:
        try:
            await client.restore_session(session_id)
        except NotFound:
            raise no_session(session_id) from None
        shown = await show_session(client, caller, session_id)
    await exchange.send_json(shown)


async def update_session(exchange: Exchange) -> None:
    """Change a session's title, settings, and whether it is kept."""
    fields, options = exchange.read_fields(UPDATE)
    session_id, caller = exchange.params["session"], exchange.caller
    if fields.priority is not None:
        caller.check_priority(fields.priority)
    async with exchange.turns.pool.lease(caller) as client:
        await find_session(client, caller, session_id)
        try:
            if options:
                await exchange.turns.precheck.check_parameters(options)
            await client.update_session(
                session_id,
                title=fields.title,
                kept=fields.kept,
                priority=fields.priority,
                options=options,
                unset=UPDATE.null_parameters(exchange.body),
            )
        except InferdError as exc:
            raise UPDATE.name_field(exc) from None
        shown = await show_session(client, caller, session_id)
    await exchange.send_json(shown)


async def answer_deletions(exchange: Exchange) -> None:
    """Answer with the caller's sessions that the daemon has deleted by itself."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        notes = await client.list_deletions()
    data = [_shown_deletion(note) for note in notes if exchange.caller.may_use(note["model"])]
    await exchange.send_json({"object": "list", "data": data})


async def clear_deletions(exchange: Exchange) -> None:
    """Delete the notes on deleted sessions."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await client.list_deletions(clear=True)
    await exchange.send_json({"object": "list", "deleted": True})


def _shown_deletion(note: DeletionInfo) -> dict[str, Any]:
    return {
        "object": "session.deletion",
        "id": note["session_id"],
        "title": note["title"],
        "model": note["model"],
        "deleted_at": round(note["at"], 3),
        "reason": note["reason"],
    }


def own_sessions(caller: Caller, entries: list[SessionInfo]) -> list[SessionInfo]:
    """Return the sessions with an id that are the caller's own, of models that it may use."""
    return [
        entry
        for entry in entries
        if entry["session_id"] and is_own(caller, entry) and caller.may_use(entry["model"])
    ]


async def find_session(client: AsyncClient, caller: Caller, session_id: str) -> SessionInfo:
    """Return a session of the caller as the daemon lists it.

    :raises NotFound: the caller has no such session.
    """
    found = own_sessions(caller, await client.sessions(dormant=True, session_id=session_id))
    if not found:
        raise no_session(session_id)
    return found[0]


def no_session(session_id: str, param: str = "session_id") -> NotFound:
    """Return the error for an id with which the caller has no session."""
    return NotFound(
        f"there is no session {session_id[:128]!r}",
        hint="GET /v1/inferd/sessions lists the sessions",
        data={"param": param},
    )


async def show_session(client: AsyncClient, caller: Caller, session_id: str) -> dict[str, Any]:
    """Return a session in the form of the API.

    :raises NotFound: the caller has no such session.
    """
    [shown] = await show_sessions(client, caller, [await find_session(client, caller, session_id)])
    return shown


async def show_sessions(
    client: AsyncClient, caller: Caller, entries: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return sessions in the form of the API, with the places of their turns in the queue."""
    tasks: dict[str | None, Mapping[str, Any]] = {}
    if any(entry["state"] in _ACTIVE for entry in entries):
        tasks = {task["session_id"]: task for task in await client.queue() if is_own(caller, task)}
    return [_shown(entry, tasks.get(entry["session_id"], {})) for entry in entries]


def _shown(entry: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    expires_s = entry["expires_s"]
    return {
        "object": "session",
        "id": entry["session_id"],
        **{name: entry[name] for name in _SHOWN},
        "delete_at": None if expires_s is None else round(time.time() + expires_s),
        "position": task.get("position"),
        "starts_in_s": task.get("starts_in_s"),
    }


async def fork_session(exchange: Exchange) -> None:
    """Create a branch of a session, which stays as it is."""
    fields, _ = exchange.read_fields(FORK)
    branch_id = fields.id or new_id()
    reserve = exchange.turns.reservations.reserve
    with reserve(exchange.caller, exchange.params["session"]), reserve(exchange.caller, branch_id):
        async with exchange.turns.pool.lease(exchange.caller) as client:
            async with opened_session(exchange, client) as (session, _):
                await _branch(client, session, branch_id, fields.messages)
            shown = await show_session(client, exchange.caller, branch_id)
    await exchange.send_json(shown)


async def _branch(
    client: AsyncClient, session: AsyncSession, branch_id: str, messages: int | None
) -> None:
    turns = 0
    if messages is not None:
        turns = turns_after(await session.history(), messages)
    [branch] = await session.fork(session_ids=[branch_id])
    if turns:
        try:
            await branch.rewind(turns)
        except BaseException:
            await forget_session(client, branch_id)
            raise


async def rewind_session(exchange: Exchange) -> None:
    """Remove messages from the end of a session."""
    fields, _ = exchange.read_fields(REWIND)
    if (fields.messages is None) == (fields.turns is None):
        raise field_error("messages", "a rewind takes messages or turns, and not both")
    session_id = exchange.params["session"]
    with exchange.turns.reservations.reserve(exchange.caller, session_id):
        async with exchange.turns.pool.lease(exchange.caller) as client:
            async with opened_session(exchange, client) as (session, _):
                turns = fields.turns or 0
                if fields.messages is not None:
                    turns = turns_after(await session.history(), fields.messages)
                if turns:
                    await _rewind(session, turns)
            shown = await show_session(client, exchange.caller, session_id)
    await exchange.send_json(shown)


async def _rewind(session: AsyncSession, turns: int) -> None:
    try:
        await session.rewind(turns)
    except InferdError as exc:
        exc.data.setdefault("param", "turns")
        raise


@asynccontextmanager
async def opened_session(
    exchange: Exchange, client: AsyncClient
) -> AsyncIterator[tuple[AsyncSession, SessionInfo]]:
    """Open the session of a request; yield it with its entry in the daemon's list.

    :raises NotFound: the caller has no such session.
    """
    session_id = exchange.params["session"]
    entry = await find_session(client, exchange.caller, session_id)
    async with client.session(
        entry["model"],
        session_id=session_id,
        priority=entry["priority"],
        queue_timeout=exchange.limits.queue_s_max,
    ) as session:
        if not session.attached:  # it was deleted meanwhile, and opening has created a new one
            await session.delete()
            raise no_session(session_id)
        yield session, entry


async def end_session_reasoning(exchange: Exchange) -> None:
    """End the reasoning of a session's turn, so that its answer begins."""
    exchange.read_fields(END_REASONING)
    session_id, caller = exchange.params["session"], exchange.caller
    async with exchange.turns.pool.lease(caller) as client:
        context = (await find_session(client, caller, session_id))["context"]
        ended, reason = False, "no_turn"
        if context is not None:
            found = await client.end_reasoning(context)
            ended, reason = found.ended, found.reason
    await exchange.send_json(
        {"object": "session", "id": session_id, "ended": ended, "reason": reason}
    )


async def cancel_session(exchange: Exchange) -> None:
    """End the turn of a session, and answer once the session is free.

    :raises SessionBusy: the session is not free in time.
    """
    exchange.read_fields(CANCEL)
    session_id, caller = exchange.params["session"], exchange.caller
    reservation = exchange.turns.reservations.find(caller, session_id)
    if reservation is not None:
        reservation.scope.cancel()
        with anyio.move_on_after(CLOSE_S_MAX):
            await reservation.released.wait()
        if not reservation.released.is_set():
            raise SessionBusy(
                f"the session {session_id!r} still has a request under way", hint="try again soon"
            )
        cancelled = reservation.scope.cancelled_caught
    else:
        async with exchange.turns.pool.lease(caller) as client:
            entry = await find_session(client, caller, session_id)
            context = entry["context"]
            cancelled = context is not None and await client.cancel(context)
    await exchange.send_json({"object": "session", "id": session_id, "cancelled": cancelled})
