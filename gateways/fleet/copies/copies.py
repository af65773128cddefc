"""The copies of the sessions of all clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
import anyio.abc
import msgspec

from ....backends.errors import InferdError
from ....ipc.messages import CopiedChange
from ..draining.moves import Listed
from ..entry.clients.client import EntryState
from ..entry.placing.homes import FleetUser, SessionKey
from ..routing.loads import NodeLoad
from .continued_sessions import ContinuedSessions
from .node_calls import NodeCalls
from .pending import PendingChange
from .planning import listed_copies, newest_copies
from .repair import Repair
from .session_copier import SessionCopier
from .table import CopyPlace, CopyTable

HOLD_S_MAX = 5.0
"""Time for which an answer waits for the copy of its change."""
PENDING_BYTES_MAX = 256 << 20
"""Maximum bytes of changes on their way; beyond them, sessions go on without a copy."""
CHECK_S = 60.0
"""Time between two searches for sessions without a copy."""
NOTE_S = 60.0
"""Time after which sessions without a copy are reported again."""
CopyMode: TypeAlias = Literal["off", "async", "sync"]


class CopyCounters:
    """Events since the start of the entry."""

    def __init__(self) -> None:
        self.stored = 0
        self.missed = 0
        self.promoted = 0


class Copies:
    """Lives on the entry's event loop. *follower_after_s* is the time for which a node must have
    been lost before its sessions continue from their copies.
    """

    def __init__(
        self,
        fleet: EntryState,
        mode: CopyMode,
        follower_after_s: float,
        folder: Path,
        note: Callable[[str], object],
    ):
        self.mode, self.table, self.counters = mode, CopyTable(), CopyCounters()
        self._fleet, self._note = fleet, note
        self._follower_after_s = follower_after_s
        self._calls = NodeCalls(fleet)
        self.continued = ContinuedSessions(fleet, self, self._calls, follower_after_s, folder, note)
        self._repair = Repair(fleet, self, self._calls, self.continued, follower_after_s)
        self._copiers: dict[SessionKey, SessionCopier] = {}
        self._pending_bytes = 0
        self._wanted = anyio.Event()
        self._noted_at = float("-inf")
        self._group: anyio.abc.TaskGroup | None = None

    @property
    def are_wanted(self) -> bool:
        """Whether clients' sessions are copied."""
        return self.mode != "off"

    @property
    def are_awaited(self) -> bool:
        """Whether answers wait until the copies have their changes."""
        return self.mode == "sync"

    @property
    def under_way(self) -> int:
        """The number of sessions whose changes are on their way."""
        return len(self._copiers)

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Store changes, and make missing copies, until cancelled."""
        async with anyio.create_task_group() as self._group:
            self._calls.begin(self._group)
            task_status.started()
            while True:
                with anyio.move_on_after(CHECK_S):
                    await self._wanted.wait()
                self._wanted = anyio.Event()
                if self.are_wanted and len(self._fleet.nodes.links) > 1:
                    await self._repair.run_once()

    def check_soon(self) -> None:
        """Search soon for sessions without a copy."""
        self._wanted.set()

    def note_lost(self) -> None:
        """Search for sessions without a copy once the lost node counts as lost for good."""
        if self._group is not None:
            self._group.start_soon(self._check_later)

    async def _check_later(self) -> None:
        await anyio.sleep(self._follower_after_s)
        self.check_soon()

    # Changes of open sessions.

    def accept_change(
        self, owner: FleetUser, home: str, change: CopiedChange
    ) -> PendingChange | None:
        """Take a change of a session on *home*, and return it; None if there can be no copy."""
        if len(self._fleet.nodes.links) < 2 or self._group is None:
            return None
        key = SessionKey(owner, change.session_id)
        pending = PendingChange(change, home, time.monotonic() + HOLD_S_MAX)
        size = len(change.data)
        if self._pending_bytes + size > PENDING_BYTES_MAX:
            pending.change = msgspec.structs.replace(change, data=b"", state="too-large")
            size = 0
        self._pending_bytes += size
        pending.call_when_done(partial(self._free_bytes, size))
        self._copier_of(key).add(pending)
        return pending

    def _free_bytes(self, size: int) -> None:
        self._pending_bytes -= size

    def _copier_of(self, key: SessionKey) -> SessionCopier:
        copier = self._copiers.get(key)
        if copier is None:
            assert self._group is not None
            copier = self._copiers[key] = SessionCopier(key, self, self._calls)
            self._group.start_soon(copier.run)
        return copier

    def has_changes(self, key: SessionKey) -> bool:
        """Return whether changes of a session are on their way."""
        return key in self._copiers

    async def wait_stored(self, key: SessionKey) -> None:
        """Wait until no change of a session is on its way."""
        copier = self._copiers.get(key)
        if copier is not None:
            await copier.idle.wait()

    def copier_idle(self, key: SessionKey) -> None:
        """Note that all changes of a session are done."""
        self._copiers.pop(key, None)

    def loads(self) -> Mapping[str, NodeLoad]:
        """Return the loads of the nodes that can be reached."""
        return self._fleet.nodes.loads()

    def drop_soon(self, place: CopyPlace) -> None:
        """Delete a copy that is no longer needed, if its node can be reached."""
        if self._group is not None and self._fleet.nodes.is_reachable(place.follower):
            self._group.start_soon(self._drop, place)

    async def _drop(self, place: CopyPlace) -> None:
        with suppress(InferdError):  # it is deleted when its node is found again
            await self._calls.end_copy(place.follower, place.stream, "drop")

    def note_stored(self, changes: int) -> None:
        """Count *changes* that the copy has."""
        self.counters.stored += changes

    def note_missed(self, key: SessionKey, changes: int, cause: str) -> None:
        """Count *changes* that no copy has; print a *cause* at most once in `NOTE_S`."""
        self.counters.missed += changes
        now = time.monotonic()
        if now >= self._noted_at + NOTE_S:
            self._noted_at = now
            self._note(f"session {key.session_id!r} goes on without a copy: {cause}")

    async def home_of(self, key: SessionKey, known: str | None = None) -> str | None:
        """See `ContinuedSessions.home_of`."""
        return await self.continued.home_of(key, known)

    def note_promoted(self) -> None:
        """Count a session that continues from its copy, and make it another one soon."""
        self.counters.promoted += 1
        self.check_soon()

    async def reconcile(self, listed: Listed) -> None:
        """Note which copies the nodes have, and end promotions whose lost node is back."""
        newest = newest_copies(listed_copies(listed))
        for key, copy in newest.items():
            if self.table.find(key) is None and not self.table.is_full:
                self.table.put(key, copy.place)
        await self.continued.end_promotions(listed)
        self.check_soon()
