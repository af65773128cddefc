"""Sessions that continue from their copies after the loss of their nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.to_thread
import msgspec

from ....backends.errors import BackendError, Busy, InferdError
from ..draining.moves import COPY, Listed
from ..entry.clients.client import EntryState
from ..entry.placing.homes import SessionKey
from ..routing.choice import node_unreachable
from .node_calls import NodeCalls
from .planning import copy_key
from .promotions import Promotion, Promotions
from .table import CopyPlace, CopyTable


class ContinuationOwner(Protocol):
    """The copies of all sessions."""

    table: CopyTable

    @property
    def are_wanted(self) -> bool:
        """Whether clients' sessions are copied."""

    async def wait_stored(self, key: SessionKey) -> None:
        """Wait until no change of a session is on its way."""

    def note_promoted(self) -> None:
        """Count a session that continues from its copy, and make it another one soon."""

    def check_soon(self) -> None:
        """Search soon for sessions without a copy."""


class ContinuedSessions:
    """Lives on the entry's event loop. *follower_after_s* is the time for which a node must have
    been lost before its sessions continue. The records of such sessions are in *folder*.
    """

    def __init__(
        self,
        fleet: EntryState,
        owner: ContinuationOwner,
        calls: NodeCalls,
        follower_after_s: float,
        folder: Path,
        note: Callable[[str], object],
    ):
        self.promotions = Promotions(folder)
        self._fleet, self._owner, self._calls = fleet, owner, calls
        self._follower_after_s, self._note = follower_after_s, note
        self._writing = anyio.Lock()
        """Held while the file of promotions is written."""

    async def home_of(self, key: SessionKey, known: str | None = None) -> str | None:
        """Return the node of a session that runs from its copy. If the session's own node is lost,
        first make the copy the session. None: it runs from no copy.

        *known* is the node that is remembered for the session.

        :raises Busy: the session is moving, or cannot continue from its copy yet.
        """
        record = self.promotions.find(key)
        if record is not None and record.is_kept:
            return record.follower
        place = self._owner.table.find(key) if self._owner.are_wanted else None
        if record is None and (place is None or self._fleet.nodes.is_reachable(place.home)):
            return None
        if record is None and known not in (None, place.home if place else None):
            return None
        await self._fleet.moves.wait_settled(key)
        with self._fleet.moves.moving(key):
            return await self._promote(key)

    async def _promote(self, key: SessionKey) -> str | None:
        await self._owner.wait_stored(key)  # the lost node may have sent further changes
        place, record = self._owner.table.find(key), self.promotions.find(key)
        if record is None:
            if place is None or self._fleet.nodes.is_reachable(place.home):
                return None
            self._check_loss(place)
            if not self._fleet.nodes.is_reachable(place.follower):
                raise node_unreachable(place.home)
            record = Promotion(
                user=key.owner.user,
                label=key.owner.label,
                session_id=key.session_id,
                home=place.home,
                follower=place.follower,
                stream=place.stream,
            )
            await self._write(record)
        await self._keep(record)
        return record.follower

    def _check_loss(self, place: CopyPlace) -> None:
        """Check that the home was lost long enough ago, and that the copy has all changes.

        :raises Busy: the home was lost too recently, or the copy lacks changes.
        """
        link = self._fleet.nodes.links.get(place.home)
        if link is None:
            return  # the node was removed from the fleet
        error = node_unreachable(place.home)
        if not place.is_current:
            raise error
        left_s = self._follower_after_s - (time.monotonic() - link.lost_at)
        if left_s > 0:
            raise Busy(
                f"{error.message}; the session continues on {place.follower} in {left_s:.1f} s",
                data={**error.data, "retry_after_s": min(left_s, 1.0)},
            )

    async def _write(self, record: Promotion) -> None:
        """Write a record.

        :raises BackendError: it cannot be written.
        """
        try:
            async with self._writing:
                with anyio.CancelScope(shield=True):  # once it is written, it must be noted
                    await anyio.to_thread.run_sync(self.promotions.write, record)
        except OSError as exc:
            raise BackendError(f"the entry's state cannot be written: {exc}") from None

    async def _keep(self, record: Promotion) -> None:
        """Turn the copy of *record* into the session."""
        key = record.key
        with anyio.CancelScope(shield=True):
            await self._calls.end_copy(record.follower, record.stream, "keep")
            self._owner.table.drop(key)
            self._fleet.homes.put(key, record.follower)
            await self._write(msgspec.structs.replace(record, is_kept=True))
        self._note(f"session {key.session_id!r} of the lost {record.home} is on {record.follower}")
        self._owner.note_promoted()

    async def end_promotions(self, listed: Listed) -> None:
        """Delete the sessions of lost nodes that are back, which continue on other nodes."""
        for record in self.promotions.all():
            if self._fleet.moves.is_moving(record.key):
                self._owner.check_soon()
                continue
            with self._fleet.moves.moving(record.key):
                try:
                    await self._end_promotion(record, listed)
                except InferdError as exc:
                    self._note(f"session {record.session_id!r} is on two nodes: {exc.message}")

    async def _end_promotion(self, record: Promotion, listed: Listed) -> None:
        """Delete a session on the node that was lost, once it is on the node of its copy."""
        follower = listed.get(record.follower)
        if follower is not None and not record.is_kept:
            there = [s for s in follower["sessions"] if _is_of(record, s)]
            if not there:  # the copy was lost before it was kept, so the session is on its old node
                await self._write(msgspec.structs.replace(record, has_ended=True))
                return
            if there[0]["state"] == COPY:
                await self._keep(record)
            else:
                await self._write(msgspec.structs.replace(record, is_kept=True))
            record = msgspec.structs.replace(record, is_kept=True)
        home = listed.get(record.home)
        if home is None or not record.is_kept:
            return
        for session in home["sessions"]:
            if _is_of(record, session) and session["state"] == COPY:
                continue
            if _is_of(record, session):
                await self._calls.remove_session(record.home, session)
        await self._write(msgspec.structs.replace(record, has_ended=True))


def _is_of(record: Promotion, session: Mapping[str, Any]) -> bool:
    return bool(session["session_id"]) and copy_key(session) == record.key
