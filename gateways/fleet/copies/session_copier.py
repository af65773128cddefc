"""The changes of one session on their way to its copy, in their order."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

import anyio

from ....backends.errors import BackendError, InferdError, NotFound
from ....ipc.messages import CopiedChange
from ..entry.placing.homes import SessionKey
from ..routing.loads import NodeLoad
from .choice import choose_follower, may_follow
from .node_calls import NodeCalls
from .pending import PendingChange
from .table import CopyPlace, CopyTable

STORE_S_MAX = 2.0
"""Time for one node to store a change, after which another node is chosen."""
DELETED, TOO_LARGE = "deleted", "too-large"


class CopyOwner(Protocol):
    """The copies of all sessions."""

    table: CopyTable

    def loads(self) -> Mapping[str, NodeLoad]:
        """Return the loads of the nodes that can be reached."""

    def drop_soon(self, place: CopyPlace) -> None:
        """Delete a copy that is no longer needed, if its node can be reached."""

    def note_stored(self, changes: int) -> None:
        """Count *changes* that the copy has."""

    def note_missed(self, key: SessionKey, changes: int, cause: str) -> None:
        """Count *changes* that no copy has."""

    def copier_idle(self, key: SessionKey) -> None:
        """Note that all changes of a session are done."""


class SessionCopier:
    """Stores the changes of a session, one after the other. Owned by the entry's event loop; it
    lives as long as changes are under way.
    """

    def __init__(self, key: SessionKey, owner: CopyOwner, calls: NodeCalls):
        self._key, self._owner, self._calls = key, owner, calls
        self._queue: deque[PendingChange] = deque()
        self.idle = anyio.Event()
        """Set once all changes are done."""

    def add(self, pending: PendingChange) -> None:
        """Add the next change."""
        self._queue.append(pending)

    async def run(self) -> None:
        """Store the changes until there are none."""
        try:
            while self._queue:
                await self._store_first()
        finally:
            for pending in self._queue:  # the entry ends
                pending.finish(is_missed=True)
            self._owner.copier_idle(self._key)
            self.idle.set()

    async def _store_first(self) -> None:
        pending = self._queue[0]
        try:
            with anyio.fail_after(max(0.0, pending.deadline - time.monotonic())):
                await self._apply(pending)
        except TimeoutError:
            self._give_up("no node has answered in time")
        except InferdError as exc:
            self._give_up(exc.message)
        else:
            self._finish_stored(pending)

    def _finish_stored(self, pending: PendingChange) -> None:
        """Finish a change, and those after it that the copy has, too."""
        place, done = self._owner.table.find(self._key), 0
        while self._queue and (self._queue[0] is pending or _has(place, self._queue[0])):
            self._queue.popleft().finish()
            done += 1
        self._owner.note_stored(done)

    def _give_up(self, cause: str) -> None:
        """Go on without a copy; the next change then sends the whole session."""
        table, place = self._owner.table, self._owner.table.find(self._key)
        if place is not None:
            table.put(self._key, replace(place, is_current=False))
        missed = list(self._queue)
        self._queue.clear()
        self._owner.note_missed(self._key, len(missed), cause)
        for pending in missed:
            pending.finish(is_missed=True)

    async def _apply(self, pending: PendingChange) -> None:
        change, table = pending.change, self._owner.table
        place = table.find(self._key)
        if change.state == DELETED:
            table.drop(self._key)
            if place is not None:
                self._owner.drop_soon(place)
            return
        if change.state == TOO_LARGE:
            raise BackendError("the session is too large")
        if _has(place, pending):
            return
        excluded, errors, counts = set[str](), list[InferdError](), table.counts
        while True:
            model = change.model or (place.model if place is not None else "")
            follower = self._follower(pending.home, place, model, counts, excluded)
            if follower is None:
                raise errors[0] if errors else BackendError("no other node can take a copy")
            try:
                with anyio.fail_after(STORE_S_MAX):
                    await self._store_at(follower, pending, place)
                return
            except TimeoutError:
                cause = f"the node {follower} has not answered within {STORE_S_MAX:g} s"
                errors.append(BackendError(cause))
            except _HomeFailed as exc:
                raise exc.error from None
            except InferdError as exc:
                errors.append(exc)
            excluded.add(follower)

    def _follower(
        self,
        home: str,
        place: CopyPlace | None,
        model: str,
        counts: Counter[str],
        excluded: set[str],
    ) -> str | None:
        """Return the node that has the copy, if it may keep it, or else another one. None: no node
        can take the copy.
        """
        loads = self._owner.loads()
        if place is not None and may_follow(place.follower, model, home, loads, excluded):
            return place.follower
        if place is None and self._owner.table.is_full:
            return None
        return choose_follower(model, home, loads, counts, excluded)

    async def _store_at(
        self, follower: str, pending: PendingChange, place: CopyPlace | None
    ) -> None:
        """Store a change at a node, or the whole session if the node lacks the change before it."""
        change, owner, home = pending.change, self._owner, pending.home
        is_next = (
            place is not None
            and (place.follower, place.stream) == (follower, change.stream)
            and place.number + 1 == change.number
            and place.is_current
        )
        try:
            if not (change.whole or is_next):
                raise NotFound("the node lacks changes before this one")
            await self._calls.store(self._key, follower, home, change)
        except NotFound:
            change = await self._read_whole(home)
            await self._calls.store(self._key, follower, home, change)
        model = change.model or (place.model if place is not None else "")
        owner.table.put(self._key, CopyPlace(home, follower, change.stream, change.number, model))
        if place is not None and place.follower != follower:
            owner.drop_soon(place)

    async def _read_whole(self, home: str) -> CopiedChange:
        try:
            return await self._calls.read_whole(self._key, home)
        except InferdError as exc:
            raise _HomeFailed(exc) from None


class _HomeFailed(Exception):
    """The node of a session cannot send it."""

    def __init__(self, error: InferdError):
        super().__init__(error.message)
        self.error = error


def _has(place: CopyPlace | None, pending: PendingChange) -> bool:
    """Return whether a copy has a change already."""
    change = pending.change
    return (
        place is not None
        and place.is_current
        and place.stream == change.stream
        and place.number >= change.number
        and not change.state
    )
