"""The copies of the sessions of all clients, and the sessions that continue from them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from ....backends.errors import BackendError, Busy, InferdError, NotFound
from ....ipc import messages as w
from ....ipc.messages import PROTOCOL_VERSION, ClientHello, CopiedChange
from ..calls.frames import raw_of
from ..draining.moves import COPY, LISTED, Listed, NoClient
from ..entry.clients.client import EntryState, FleetClient
from ..entry.placing.homes import FleetUser, SessionKey
from ..entry.several_nodes.gathering import gather
from ..routing.choice import node_unreachable
from ..routing.loads import NodeLoad
from .choice import may_follow
from .pending import PendingChange
from .planning import (
    ListedCopy,
    copy_key,
    listed_copies,
    listed_sessions,
    missing_copies,
    newest_copies,
    stale_copies,
)
from .promotions import Promotion, Promotions
from .session_copier import SessionCopier
from .table import CopyPlace, CopyTable

HOLD_S_MAX = 5.0
"""Time for which an answer waits for the copy of its change."""
PENDING_BYTES_MAX = 256 << 20
"""Maximum bytes of changes on their way; beyond them, sessions go on without a copy."""
CHECK_S = 60.0
"""Time between two searches for sessions without a copy."""
REPAIRS_MAX = 4
"""Copies of dormant sessions that are made at once."""
PARTS_MAX = 4
"""Changes in several parts that are on their way at once."""
NOTE_S = 60.0
"""Time after which sessions without a copy are reported again."""
CopyMode: TypeAlias = Literal["off", "async", "sync"]
Outcome: TypeAlias = Literal["keep", "drop", "release"]


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
        self.promotions = Promotions(folder)
        self._fleet, self._note = fleet, note
        self._follower_after_s = follower_after_s
        self._copiers: dict[SessionKey, SessionCopier] = {}
        self._pending_bytes = 0
        self._parts = anyio.CapacityLimiter(PARTS_MAX)
        self._writing = anyio.Lock()
        """Held while the file of promotions is written."""
        self._wanted = anyio.Event()
        self._noted_at = float("-inf")
        self._client: FleetClient | None = None
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
    def client(self) -> FleetClient:
        """The client that acts on the nodes as the relay's user."""
        assert self._client is not None, "`run` has begun"
        return self._client

    @property
    def under_way(self) -> int:
        """The number of sessions whose changes are on their way."""
        return len(self._copiers)

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Store changes, and make missing copies, until cancelled."""
        hello = ClientHello(protocol=PROTOCOL_VERSION, software="inferd fleet")
        async with anyio.create_task_group() as self._group:
            owner = FleetUser("", "")
            self._client = FleetClient(self._fleet, NoClient(), owner, hello, self._group)
            task_status.started()
            while True:
                with anyio.move_on_after(CHECK_S):
                    await self._wanted.wait()
                self._wanted = anyio.Event()
                if self.are_wanted and len(self._fleet.nodes.links) > 1:
                    await self._repair()

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
            copier = self._copiers[key] = SessionCopier(key, self)
            self._group.start_soon(copier.run)
        return copier

    def copier_idle(self, key: SessionKey) -> None:
        """Note that all changes of a session are done."""
        self._copiers.pop(key, None)

    def loads(self) -> Mapping[str, NodeLoad]:
        """Return the loads of the nodes that can be reached."""
        return self._fleet.nodes.loads()

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
        await self._call(node, "store_copy", params, w.Empty)

    async def read_whole(self, key: SessionKey, home: str) -> w.ReadCopyResult:
        """Read a whole session at its home.

        :raises InferdError: the home does not send it, or is lost.
        """
        params = w.ReadCopyParams(
            session_id=key.session_id, on_behalf_of=key.owner.user, label=key.owner.label
        )
        found: w.ReadCopyResult = await self._call(home, "read_copy", params, w.ReadCopyResult)
        return found

    async def _call(self, node: str, call: str, params: w.Map, result: type[Any]) -> Any:
        fields = {n: raw_of(value) for n, value in msgspec.structs.asdict(params).items()}
        raw = await self.client.upstream(node).call(call, fields)
        return msgspec.msgpack.decode(raw, type=result)

    def drop_soon(self, place: CopyPlace) -> None:
        """Delete a copy that is no longer needed, if its node can be reached."""
        if self._group is not None and self._fleet.nodes.is_reachable(place.follower):
            self._group.start_soon(self._drop, place)

    async def _drop(self, place: CopyPlace) -> None:
        with suppress(InferdError):  # it is deleted when its node is found again
            await self._end(place.follower, place.stream, "drop")

    async def _end(self, node: str, stream: str, outcome: Outcome) -> None:
        params = w.EndTransferParams(transfer=stream, outcome=outcome)
        await self._call(node, "end_transfer", params, w.Empty)

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

    # Sessions whose node is lost.

    async def home_of(self, key: SessionKey, known: str | None = None) -> str | None:
        """Return the node of a session that runs from its copy. If the session's own node is lost,
        first make the copy the session. None: it runs from no copy.

        *known* is the node that is remembered for the session.

        :raises Busy: the session is moving, or cannot continue from its copy yet.
        """
        record = self.promotions.find(key)
        if record is not None and record.is_kept:
            return record.follower
        place = self.table.find(key) if self.are_wanted else None
        if record is None and (place is None or self._fleet.nodes.is_reachable(place.home)):
            return None
        if record is None and known not in (None, place.home if place else None):
            return None
        await self._fleet.moves.wait_settled(key)
        with self._fleet.moves.moving(key):
            return await self._promote(key)

    async def _promote(self, key: SessionKey) -> str | None:
        copier = self._copiers.get(key)
        if copier is not None:  # changes that the lost node has sent are still being stored
            await copier.idle.wait()
        place, record = self.table.find(key), self.promotions.find(key)
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
            await self._end(record.follower, record.stream, "keep")
            self.table.drop(key)
            self._fleet.homes.put(key, record.follower)
            await self._write(msgspec.structs.replace(record, is_kept=True))
        self.counters.promoted += 1
        self._note(f"session {key.session_id!r} of the lost {record.home} is on {record.follower}")
        self.check_soon()

    # Nodes that are found, and copies that are missing.

    async def reconcile(self, listed: Listed) -> None:
        """Note which copies the nodes have, and end promotions whose lost node is back."""
        newest = newest_copies(listed_copies(listed))
        for key, copy in newest.items():
            if self.table.find(key) is None and not self.table.is_full:
                self.table.put(key, copy.place)
        await self._end_promotions(listed)
        self.check_soon()

    async def _end_promotions(self, listed: Listed) -> None:
        for record in self.promotions.all():
            if self._fleet.moves.is_moving(record.key):
                self.check_soon()
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
                await self._remove(record.home, session)
        await self._write(msgspec.structs.replace(record, has_ended=True))

    async def _remove(self, node: str, session: Mapping[str, Any]) -> None:
        """Remove a session that has continued on another node.

        :raises InferdError: it is open on *node*, or the node was lost.
        """
        transfer = secrets.token_hex(16)
        params = w.ExportParams(
            session_id=session["session_id"],
            transfer=transfer,
            uid=session["uid"],
            label=session["label"],
        )
        await self._call(node, "export_session", params, w.ExportResult)
        await self._end(node, transfer, "release")
        await self._end(node, transfer, "drop")

    async def _repair(self) -> None:
        """Delete stale copies, and copy dormant sessions that have none."""
        nodes = self._fleet.nodes
        try:
            reachable = nodes.reachable()
        except Busy:
            return
        before = dict(self.table)
        listed, _ = await gather(self.client, "sessions", LISTED, reachable)
        await self._end_promotions(listed)
        copies, sessions = listed_copies(listed), listed_sessions(listed)
        for key in self._lost_copies(copies, listed):
            if not self._has_changed(key, before):
                self.table.drop(key)
        all_listed = all(name in listed for name in nodes.links)
        for copy in stale_copies(copies, sessions, self.table.find, all_listed=all_listed):
            if self._has_changed(copy.key, before):
                continue
            known = self.table.find(copy.key)
            if known is not None and known.follower == copy.place.follower:
                self.table.drop(copy.key)
            await self._drop(copy.place)
        limiter = anyio.CapacityLimiter(REPAIRS_MAX)
        async with anyio.create_task_group() as group:
            for session in missing_copies(sessions, copies, self.table.find, self._is_usable):
                if not self._has_changed(session.key, before):
                    group.start_soon(self._copy_dormant, session.key, session.node, limiter)

    def _lost_copies(self, copies: list[ListedCopy], listed: Listed) -> list[SessionKey]:
        """Return the sessions whose known copies are missing on their nodes."""
        present = {(copy.key, copy.place.follower) for copy in copies}
        return [
            key
            for key, place in self.table
            if place.follower in listed and (key, place.follower) not in present
        ]

    def _has_changed(self, key: SessionKey, before: Mapping[SessionKey, CopyPlace]) -> bool:
        """Return whether a session was used since the nodes were queried."""
        return key in self._copiers or self.table.find(key) != before.get(key)

    def _is_usable(self, place: CopyPlace) -> bool:
        """Return whether the node of a copy may keep it, or was lost only recently."""
        link = self._fleet.nodes.links.get(place.follower)
        if link is not None and link.load is None:
            return time.monotonic() - link.lost_at < self._follower_after_s
        return may_follow(place.follower, place.model, place.home, self.loads())

    async def _copy_dormant(
        self, key: SessionKey, node: str, limiter: anyio.CapacityLimiter
    ) -> None:
        """Copy a dormant session of *node*. Requests that open it wait meanwhile."""
        async with limiter:
            moves = self._fleet.moves
            with suppress(Busy):
                await moves.wait_settled(key)
                record = self.promotions.find(key)
                if key in self._copiers or (record is not None and record.home == node):
                    return
                with moves.moving(key), suppress(InferdError):  # the next repair tries again
                    try:
                        whole = await self.read_whole(key, node)
                    except NotFound:
                        return  # the session is another user's of the node, or was opened
                    change = CopiedChange(
                        session_id=key.session_id,
                        stream=whole.stream,
                        number=whole.number,
                        data=whole.data,
                        whole=True,
                        model=whole.model,
                    )
                    self.accept_change(key.owner, node, change)
                    copier = self._copiers.get(key)
                    if copier is not None:
                        await copier.idle.wait()


def _is_of(record: Promotion, session: Mapping[str, Any]) -> bool:
    return bool(session["session_id"]) and copy_key(session) == record.key
