"""Copies of sessions on second nodes: the changes of open sessions on their way there."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

import anyio
import anyio.abc
import msgspec

from ....backends.errors import BackendError, InferdError, NotFound
from ....ipc import messages as w
from ....ipc.messages import CopiedChange
from ..nodes.moves import end_transfer
from ..nodes.nodes import Nodes
from ..nodes.upstream import NodeConnections
from ..routing.homes import FleetUser, SessionKey
from .table import CopyPlace, CopyTable, choose_follower, may_follow

HOLD_S_MAX = 5.0
"""Time for which an answer waits for the copy of its change."""
STORE_S_MAX = 2.0
"""Time for one node to store a change, after which another node is chosen."""
PENDING_BYTES_MAX = 256 << 20
"""Maximum bytes of changes on their way; beyond them, sessions go on without a copy."""
PARTS_MAX = 4
"""Changes in several parts that are on their way at once."""
NOTE_S = 60.0
"""Time after which sessions without a copy are reported again."""
DELETED, TOO_LARGE = "deleted", "too-large"
CopyMode: TypeAlias = Literal["off", "async", "sync"]


class PendingChange:
    """A change until the copy has it, or the session goes on without a copy."""

    def __init__(self, change: CopiedChange, home: str, deadline: float):
        self.change, self.home, self.deadline = change, home, deadline
        self.is_done = self.is_missed = False
        """Whether the change is done, and whether it ended without a copy."""
        self._listeners: list[Callable[[], object]] = []

    def call_when_done(self, listener: Callable[[], object]) -> None:
        """Call *listener* when the change is done; it must not be done yet."""
        self._listeners.append(listener)

    def finish(self, *, is_missed: bool = False) -> None:
        """Note that the change is done; with *is_missed*, no copy has it."""
        self.is_done, self.is_missed = True, is_missed
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()


def call_after(changes: Iterable[PendingChange], listener: Callable[[], object]) -> bool:
    """Call *listener* once all changes are done, and return whether it has to wait. If all are done
    already, it is not called.
    """
    waiting = {change for change in changes if not change.is_done}
    for change in tuple(waiting):

        def note_done(change: PendingChange = change) -> None:
            waiting.discard(change)
            if not waiting:
                listener()

        change.call_when_done(note_done)
    return bool(waiting)


class CopyCounters:
    """Events since the start of the entry."""

    def __init__(self) -> None:
        self.stored = 0
        self.missed = 0
        self.promoted = 0


class Copies:
    """The copies of the sessions of all clients. Lives on the entry's event loop; *group* runs its
    tasks, and *operator* acts on the nodes as the relay's user.
    """

    def __init__(
        self,
        nodes: Nodes,
        operator: NodeConnections,
        mode: CopyMode,
        note: Callable[[str], object],
        group: anyio.abc.TaskGroup,
    ):
        self.nodes, self.operator, self.mode, self.note = nodes, operator, mode, note
        self.table, self.counters = CopyTable(), CopyCounters()
        self.check_wanted = anyio.Event()
        """Set when sessions without a copy are to be searched soon."""
        self._group = group
        self._copiers: dict[SessionKey, SessionCopier] = {}
        self._pending_bytes = 0
        self._parts = anyio.CapacityLimiter(PARTS_MAX)
        self._noted_at = float("-inf")

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

    def check_soon(self) -> None:
        """Search soon for sessions without a copy."""
        self.check_wanted.set()

    def accept_change(
        self, owner: FleetUser, home: str, change: CopiedChange
    ) -> PendingChange | None:
        """Take a change of a session on *home*, and return it; None if there can be no copy."""
        if len(self.nodes.links) < 2:
            return None
        key = SessionKey(owner, change.session_id)
        pending = PendingChange(change, home, time.monotonic() + HOLD_S_MAX)
        size = len(change.data)
        if self._pending_bytes + size > PENDING_BYTES_MAX:
            pending.change = msgspec.structs.replace(change, data=b"", state=TOO_LARGE)
            size = 0
        self._pending_bytes += size
        pending.call_when_done(partial(self._free_bytes, size))
        copier = self._copiers.get(key)
        if copier is None:
            copier = self._copiers[key] = SessionCopier(key, self)
            self._group.start_soon(copier.run)
        copier.add(pending)
        return pending

    def _free_bytes(self, size: int) -> None:
        self._pending_bytes -= size

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

    def drop_soon(self, place: CopyPlace) -> None:
        """Delete a copy that is no longer needed, if its node can be reached."""
        if self.nodes.is_reachable(place.follower):
            self._group.start_soon(self._drop, place)

    async def _drop(self, place: CopyPlace) -> None:
        with suppress(InferdError):  # it is deleted when its node is found again
            await end_transfer(self.operator, place.follower, place.stream, "drop")

    def note_missed(self, key: SessionKey, changes: int, cause: str) -> None:
        """Count *changes* that no copy has; print a *cause* at most once in `NOTE_S`."""
        self.counters.missed += changes
        now = time.monotonic()
        if now >= self._noted_at + NOTE_S:
            self._noted_at = now
            self.note(f"session {key.session_id!r} goes on without a copy: {cause}")

    async def store(self, key: SessionKey, node: str, home: str, change: CopiedChange) -> None:
        """Store a change at a node.

        :raises InferdError: the node refuses the change, or is lost.
        """
        if len(change.data) <= w.PART_BYTES:
            await self._store_part(key, node, home, change, 0)
            return
        async with self._parts:
            for offset in range(0, len(change.data), w.PART_BYTES):
                await self._store_part(key, node, home, change, offset)

    async def _store_part(
        self, key: SessionKey, node: str, home: str, change: CopiedChange, offset: int
    ) -> None:
        params = w.StoreCopyParams(
            session_id=key.session_id,
            stream=change.stream,
            number=change.number,
            data=change.data[offset : offset + w.PART_BYTES],
            size=len(change.data),
            on_behalf_of=key.owner.user,
            label=key.owner.label,
            peer=home,
            offset=offset,
        )
        await self.operator.call(node, "store_copy", params, w.Empty)

    async def read_whole(self, key: SessionKey, home: str) -> CopiedChange:
        """Read a whole session at its home, as a change.

        :raises InferdError: the home does not send it, or is lost.
        """
        params = w.ReadCopyParams(
            session_id=key.session_id, on_behalf_of=key.owner.user, label=key.owner.label
        )
        whole = await self.operator.call(home, "read_copy", params, w.ReadCopyResult)
        return CopiedChange(
            session_id=key.session_id,
            stream=whole.stream,
            number=whole.number,
            data=whole.data,
            whole=True,
            model=whole.model,
        )


class SessionCopier:
    """Stores the changes of a session, one after the other. Owned by the entry's event loop; it
    lives as long as changes are under way.
    """

    def __init__(self, key: SessionKey, copies: Copies):
        self._key, self._copies = key, copies
        self._queue: deque[PendingChange] = deque()
        self.idle = anyio.Event()
        """Set once all changes are done."""

    def add(self, pending: PendingChange) -> None:
        self._queue.append(pending)

    async def run(self) -> None:
        """Store the changes until there are none."""
        try:
            while self._queue:
                await self._store_first()
        finally:
            for pending in self._queue:  # the entry ends
                pending.finish(is_missed=True)
            self._copies.copier_idle(self._key)
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
        place, done = self._copies.table.find(self._key), 0
        while self._queue and (self._queue[0] is pending or _has(place, self._queue[0])):
            self._queue.popleft().finish()
            done += 1
        self._copies.counters.stored += done

    def _give_up(self, cause: str) -> None:
        """Go on without a copy; the next change then sends the whole session."""
        table, place = self._copies.table, self._copies.table.find(self._key)
        if place is not None:
            table.put(self._key, replace(place, is_current=False))
        missed = list(self._queue)
        self._queue.clear()
        self._copies.note_missed(self._key, len(missed), cause)
        for pending in missed:
            pending.finish(is_missed=True)

    async def _apply(self, pending: PendingChange) -> None:
        change, table = pending.change, self._copies.table
        place = table.find(self._key)
        if change.state == DELETED:
            table.drop(self._key)
            if place is not None:
                self._copies.drop_soon(place)
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
        loads = self._copies.nodes.loads()
        if place is not None and may_follow(place.follower, model, home, loads, excluded):
            return place.follower
        if place is None and self._copies.table.is_full:
            return None
        return choose_follower(model, home, loads, counts, excluded)

    async def _store_at(
        self, follower: str, pending: PendingChange, place: CopyPlace | None
    ) -> None:
        """Store a change at a node, or the whole session if the node lacks the change before it."""
        change, copies, home = pending.change, self._copies, pending.home
        is_next = (
            place is not None
            and (place.follower, place.stream) == (follower, change.stream)
            and place.number + 1 == change.number
            and place.is_current
        )
        try:
            if not (change.whole or is_next):
                raise NotFound("the node lacks changes before this one")
            await copies.store(self._key, follower, home, change)
        except NotFound:
            change = await self._read_whole(home)
            await copies.store(self._key, follower, home, change)
        model = change.model or (place.model if place is not None else "")
        copies.table.put(self._key, CopyPlace(home, follower, change.stream, change.number, model))
        if place is not None and place.follower != follower:
            copies.drop_soon(place)

    async def _read_whole(self, home: str) -> CopiedChange:
        try:
            return await self._copies.read_whole(self._key, home)
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
