"""The search for copies that are missing or no longer needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import anyio

from ....backends.errors import Busy, InferdError, NotFound
from ..nodes.moves import LISTED, Listed, Moves, end_transfer
from ..routing.homes import SessionKey
from .continued_sessions import ContinuedSessions
from .copies import Copies
from .table import (
    CopyPlace,
    ListedCopy,
    listed_copies,
    listed_sessions,
    may_follow,
    missing_copies,
    newest_copies,
    stale_copies,
)

CHECK_S = 60.0
"""Time between two searches for sessions without a copy."""
REPAIRS_MAX = 4
"""Copies of dormant sessions that are made at once."""


class Repair:
    """Lives on the entry's event loop. A node that has been lost for *follower_after_s* keeps no
    copy.
    """

    def __init__(
        self,
        copies: Copies,
        continued: ContinuedSessions,
        moves: Moves,
        follower_after_s: float,
    ):
        self._copies, self._continued, self._moves = copies, continued, moves
        self._nodes, self._table = copies.nodes, copies.table
        self._follower_after_s = follower_after_s

    async def run(self) -> None:
        """Make missing copies until cancelled."""
        while True:
            with anyio.move_on_after(CHECK_S):
                await self._copies.check_wanted.wait()
            self._copies.check_wanted = anyio.Event()
            if self._copies.are_wanted and len(self._nodes.links) > 1:
                await self.run_once()

    async def check_after_loss(self) -> None:
        """Search for sessions without a copy once a lost node counts as lost for good."""
        await anyio.sleep(self._follower_after_s)
        self._copies.check_soon()

    async def reconcile(self, listed: Listed) -> None:
        """Note which copies the nodes have, and end promotions whose lost node is back."""
        for key, copy in newest_copies(listed_copies(listed)).items():
            if self._table.find(key) is None and not self._table.is_full:
                self._table.put(key, copy.place)
        await self._continued.end_promotions(listed)
        self._copies.check_soon()

    async def run_once(self) -> None:
        """Delete stale copies, and copy dormant sessions that have none."""
        nodes, table = self._nodes, self._table
        try:
            reachable = nodes.reachable()
        except Busy:
            return
        before = dict(table)
        listed, _ = await self._copies.operator.gather("sessions", LISTED, reachable)
        await self._continued.end_promotions(listed)
        copies, sessions = listed_copies(listed), listed_sessions(listed)
        for key in self._lost_copies(copies, listed):
            if not self._has_changed(key, before):
                table.drop(key)
        all_listed = all(name in listed for name in nodes.links)
        for copy in stale_copies(copies, sessions, table.find, all_listed=all_listed):
            if self._has_changed(copy.key, before):
                continue
            known = table.find(copy.key)
            if known is not None and known.follower == copy.place.follower:
                table.drop(copy.key)
            with suppress(InferdError):  # it is deleted when its node is found again
                await end_transfer(
                    self._copies.operator, copy.place.follower, copy.place.stream, "drop"
                )
        limiter = anyio.CapacityLimiter(REPAIRS_MAX)
        async with anyio.create_task_group() as group:
            for session in missing_copies(sessions, copies, table.find, self._is_usable):
                if not self._has_changed(session.key, before):
                    group.start_soon(self._copy_dormant, session.key, session.node, limiter)

    def _lost_copies(self, copies: list[ListedCopy], listed: Listed) -> list[SessionKey]:
        """Return the sessions whose known copies are missing on their nodes."""
        present = {(copy.key, copy.place.follower) for copy in copies}
        return [
            key
            for key, place in self._table
            if place.follower in listed and (key, place.follower) not in present
        ]

    def _has_changed(self, key: SessionKey, before: Mapping[SessionKey, CopyPlace]) -> bool:
        """Return whether a session was used since the nodes were queried."""
        return self._copies.has_changes(key) or self._table.find(key) != before.get(key)

    def _is_usable(self, place: CopyPlace) -> bool:
        """Return whether the node of a copy may keep it, or was lost only recently."""
        link = self._nodes.links.get(place.follower)
        if link is not None and link.load is None:
            return time.monotonic() - link.lost_at < self._follower_after_s
        return may_follow(place.follower, place.model, place.home, self._nodes.loads())

    async def _copy_dormant(
        self, key: SessionKey, node: str, limiter: anyio.CapacityLimiter
    ) -> None:
        """Copy a dormant session of *node*. Requests that open it wait meanwhile."""
        async with limiter:
            moves = self._moves
            with suppress(Busy):
                await moves.wait_settled(key)
                record = self._continued.promotions.find(key)
                if self._copies.has_changes(key) or (record is not None and record.home == node):
                    return
                with moves.moving(key), suppress(InferdError):  # the next repair tries again
                    try:
                        change = await self._copies.read_whole(key, node)
                    except NotFound:
                        return  # the session is another user's of the node, or was opened
                    self._copies.accept_change(key.owner, node, change)
                    await self._copies.wait_stored(key)
