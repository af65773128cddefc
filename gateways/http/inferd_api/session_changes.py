"""Changes of the caller's sessions: branches, rewinds, and the end of a turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from ....backends.errors import InferdError, SessionBusy
from ....ipc.client import AsyncClient, AsyncSession
from ..exchange import Exchange
from ..fields import field_error
from ..limits import CLOSE_S_MAX
from .fields import CANCEL, FORK, REWIND
from .sessions import (
    find_session,
    forget_session,
    new_id,
    no_session,
    show_session,
    turns_after,
)


async def fork_session(exchange: Exchange) -> None:
    """Create a branch of a session, which stays as it is."""
    fields, _ = exchange.read_fields(FORK)
    branch_id = fields.id or new_id()
    reserve = exchange.turns.reservations.reserve
    with reserve(exchange.caller, exchange.params["session"]), reserve(exchange.caller, branch_id):
        async with exchange.turns.pool.lease(exchange.caller) as client:
            async with _opened(exchange, client) as session:
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
            async with _opened(exchange, client) as session:
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
async def _opened(exchange: Exchange, client: AsyncClient) -> AsyncIterator[AsyncSession]:
    """Open the session of a request.

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
        yield session


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
