"""`drain` of one node: its sessions move to other nodes, and open contexts go with them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import anyio
import msgspec

from ....backends.errors import (
    BackendError,
    InferdError,
    InvalidArgument,
    SessionBusy,
)
from ....ipc import messages as w
from ..frames import Fields, decoded, raw_of, values_of
from ..nodes.moves import ARRIVING, COPY, DEPARTED, MOVE_S_MAX, key_of
from .client import ClientRequest, Fleet, FleetClient
from .contexts import OpenContext, SuspendedContext
from .opening import reopen_context

MOVES_MAX = 8
"""Moves at once."""
DRAIN_S_MAX = 3600.0
DRAIN_RETRY_S = 0.2
"""Time after which a session with a turn under way is tried again."""
STAYING_MAX = 1000
"""Sessions that a reply lists."""
_ACTIVE = ("waiting", "running", "parked")


async def drain_node(client: FleetClient, request: ClientRequest, params: Fields) -> dict[str, Any]:
    """Give a node no new contexts, and move its sessions to other nodes; or use it again.

    :raises PermissionDenied: the client is not an operator.
    :raises NotFound: there is no such node.
    :raises InferdError: the node cannot be reached.
    """
    p = decoded(params, w.DrainParams)
    client.check_operator("drain a node", "drain")
    client.fleet.nodes.check_exists(p.node)
    if not 0 <= p.wait_s <= DRAIN_S_MAX:
        raise InvalidArgument(f"a wait of {p.wait_s} s", hint=f"use 0 to {DRAIN_S_MAX:g} seconds")
    try:
        client.fleet.nodes.drained.set_drained(p.node, is_drained=not p.undo)
    except OSError as exc:
        raise BackendError(f"the entry's state cannot be written: {exc}") from None
    result = w.DrainResult()
    if not p.undo:
        deadline = time.monotonic() + p.wait_s
        async with client.fleet.moves.drains:
            result = await _Drain(client.fleet, p.node).run(deadline)
    return msgspec.structs.asdict(result)


class _Drain:
    """The moves of one drain."""

    def __init__(self, fleet: Fleet, node: str):
        self._fleet, self._node, self._moves = fleet, node, fleet.moves
        self._limiter = anyio.CapacityLimiter(MOVES_MAX)
        self._moved = 0

    async def run(self, deadline: float) -> w.DrainResult:
        """Move the sessions; try those with turns under way again until *deadline*."""
        while True:
            errors = await self._move_all()
            is_busy = any(isinstance(error, SessionBusy) for _, error in errors)
            if not is_busy or time.monotonic() >= deadline:
                staying = [
                    {name: session[name] for name in ("session_id", "user", "label", "model")}
                    | {"error": error.to_wire()}
                    for session, error in errors[:STAYING_MAX]
                ]
                return w.DrainResult(moved=self._moved, staying=staying)
            await anyio.sleep(DRAIN_RETRY_S)

    async def _move_all(self) -> list[tuple[dict[str, Any], InferdError]]:
        """Move the sessions that can be moved now; return the others with their errors."""
        errors: list[tuple[dict[str, Any], InferdError]] = []

        async def move(session: dict[str, Any]) -> None:
            async with self._limiter:
                try:
                    await self._move(session)
                    self._moved += 1
                except InferdError as exc:
                    errors.append((session, exc))

        async with anyio.create_task_group() as group:
            for session in await self._moves.list_sessions(self._node):
                if session["state"] not in (ARRIVING, COPY, DEPARTED):
                    group.start_soon(move, session)
        return errors

    async def _move(self, session: Mapping[str, Any]) -> None:
        if not session["session_id"]:
            raise InvalidArgument(
                "a session without an id cannot move", hint="it ends with its client's connection"
            )
        key = key_of(session)
        for client in self._fleet.clients:
            found = client.contexts.find_session(self._node, key.session_id)
            if client.owner == key.owner and found is not None:
                await self._move_open(client, *found)
                return
        await self._moves.wait_settled(key)
        with self._moves.moving(key):
            await self._moves.move_session(self._node, session)
        self._fleet.copies.check_soon()

    async def _move_open(self, client: FleetClient, handle: int, context: OpenContext) -> None:
        """Move a session that is open on a context of a client."""
        suspended = client.suspend_context(handle, context)
        try:
            await move_open(client, suspended)
        finally:
            client.contexts.resume(suspended)
            if handle in client.contexts.suspended and not client.has_left:
                client.group.start_soon(_try_reopen, client, handle)


async def move_open(
    client: FleetClient,
    suspended: SuspendedContext,
    target: str | None = None,
    copy_s_max: float = MOVE_S_MAX,
) -> None:
    """Close the session of a suspended context, and move it to the best node or to *target*. It
    stays open if a turn is under way, or if its node refuses to close it.

    :raises SessionBusy: a turn of the session is under way.
    :raises InferdError: the session was not closed or not moved; see `Moves.move_session`.
    """
    node, handle, moves = suspended.context.node, suspended.handle, client.fleet.moves
    own, upstream = client.contexts.daemon_handle(handle), client.upstream(node)
    named: Fields = {"session_id": raw_of(suspended.context.session_id)}
    listed = values_of(await upstream.call("sessions", named))["sessions"]
    session = next((found for found in listed if found["context"] == own), None)
    if session is None:
        raise SessionBusy("another connection has opened the session")
    if session["state"] in _ACTIVE:
        raise SessionBusy("a turn of the session is under way")
    await moves.wait_settled(key_of(session))
    with moves.moving(key_of(session)):
        context = {"context": raw_of(own), "keep": raw_of(True)}
        await upstream.call("finalize_execution_context", context)
        client.contexts.drop(handle)
        await moves.move_session(node, session, target, copy_s_max)
    client.fleet.copies.check_soon()  # the copy may have to move, too


async def _try_reopen(client: FleetClient, handle: int) -> None:
    """Open a session again after its move; if that fails, the next request tries again."""
    try:
        if handle in client.contexts.suspended:
            await reopen_context(client, handle)
    except InferdError:
        return
