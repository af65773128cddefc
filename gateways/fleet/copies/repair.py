"""The search for copies that are missing or no longer needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import anyio

from ....backends.errors import Busy, InferdError, NotFound
from ....ipc.messages import CopiedChange
from ..draining.moves import Listed
from ..entry.clients.client import EntryState
from ..entry.placing.homes import FleetUser, SessionKey
from .choice import may_follow
from .continued_sessions import ContinuedSessions
from .node_calls import NodeCalls
from .pending import PendingChange
from .planning import ListedCopy, listed_copies, listed_sessions, missing_copies, stale_copies
from .table import CopyPlace, CopyTable

REPAIRS_MAX = 4
"""Copies of dormant sessions that are made at once."""


class RepairOwner(Protocol):
    """The copies of all sessions."""

    table: CopyTable

    def has_changes(self, key: SessionKey) -> bool:
        """Return whether changes of a session are on their way."""

    async def wait_stored(self, key: SessionKey) -> None:
        """Wait until no change of a session is on its way."""

    def accept_change(
        self, owner: FleetUser, home: str, change: CopiedChange
    ) -> PendingChange | None:
        """Take a change of a session on *home*, and return it; None if there can be no copy."""


class Repair:
    """Lives on the entry's event loop. After a loss of *follower_after_s*, a node keeps no copy."""

    def __init__(
        self,
        fleet: EntryState,
        owner: RepairOwner,
        calls: NodeCalls,
        continued: ContinuedSessions,
        follower_after_s: float,
    ):
        self._fleet, self._owner, self._calls = fleet, owner, calls
        self._continued, self._follower_after_s = continued, follower_after_s

    async def run_once(self) -> None:
        """Delete stale copies, and copy dormant sessions that have none."""
        nodes = self._fleet.nodes
        try:
            reachable = nodes.reachable()
        except Busy:
            return
        before = dict(self._owner.table)
        listed = await self._calls.list_sessions(reachable)
        await self._continued.end_promotions(listed)
        copies, sessions = listed_copies(listed), listed_sessions(listed)
        for key in self._lost_copies(copies, listed):
            if not self._has_changed(key, before):
                self._owner.table.drop(key)
        all_listed = all(name in listed for name in nodes.links)
        for copy in stale_copies(copies, sessions, self._owner.table.find, all_listed=all_listed):
            if self._has_changed(copy.key, before):
                continue
            known = self._owner.table.find(copy.key)
            if known is not None and known.follower == copy.place.follower:
                self._owner.table.drop(copy.key)
            with suppress(InferdError):  # it is deleted when its node is found again
                await self._calls.end_copy(copy.place.follower, copy.place.stream, "drop")
        limiter = anyio.CapacityLimiter(REPAIRS_MAX)
        async with anyio.create_task_group() as group:
            for session in missing_copies(
                sessions, copies, self._owner.table.find, self._is_usable
            ):
                if not self._has_changed(session.key, before):
                    group.start_soon(self._copy_dormant, session.key, session.node, limiter)

    def _lost_copies(self, copies: list[ListedCopy], listed: Listed) -> list[SessionKey]:
        """Return the sessions whose known copies are missing on their nodes."""
        present = {(copy.key, copy.place.follower) for copy in copies}
        return [
            key
            for key, place in self._owner.table
            if place.follower in listed and (key, place.follower) not in present
        ]

    def _has_changed(self, key: SessionKey, before: Mapping[SessionKey, CopyPlace]) -> bool:
        """Return whether a session was used since the nodes were queried."""
        return self._owner.has_changes(key) or self._owner.table.find(key) != before.get(key)

    def _is_usable(self, place: CopyPlace) -> bool:
        """Return whether the node of a copy may keep it, or was lost only recently."""
        link = self._fleet.nodes.links.get(place.follower)
        if link is not None and link.load is None:
            return time.monotonic() - link.lost_at < self._follower_after_s
        return may_follow(place.follower, place.model, place.home, self._fleet.nodes.loads())

    async def _copy_dormant(
        self, key: SessionKey, node: str, limiter: anyio.CapacityLimiter
    ) -> None:
        """Copy a dormant session of *node*. Requests that open it wait meanwhile."""
        async with limiter:
            moves = self._fleet.moves
            with suppress(Busy):
                await moves.wait_settled(key)
                record = self._continued.promotions.find(key)
                if self._owner.has_changes(key) or (record is not None and record.home == node):
                    return
                with moves.moving(key), suppress(InferdError):  # the next repair tries again
                    try:
                        change = await self._calls.read_whole(key, node)
                    except NotFound:
                        return  # the session is another user's of the node, or was opened
                    self._owner.accept_change(key.owner, node, change)
                    await self._owner.wait_stored(key)
