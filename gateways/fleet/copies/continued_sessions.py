"""Sessions that continue from their copies after the loss of their nodes, and the records of that.

A record is on disk before the copy can be used. While the record exists, the session is on the
copy's node, whatever the session's old node has when it is back.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from ....backends.errors import BackendError, Busy, InferdError, InvalidArgument
from ..certificates import write_private
from ..nodes.moves import COPY, Listed, Moves, begin_export, end_transfer
from ..routing.choice import node_unreachable
from ..routing.homes import FleetUser, NodeTable, SessionKey
from .copies import Copies
from .table import CopyPlace, copy_key

log = logging.getLogger(__name__)

RECORDS_MAX = 100_000
LINES_SPARE = 1000
"""Lines of ended records beyond which the file is written anew."""


class Promotion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file. With `has_ended` it removes the record, as one node alone has the session
    again.
    """

    user: str
    label: str
    session_id: str
    home: str
    follower: str
    stream: str
    is_kept: bool = False
    """Whether the copy has become the session. Until then, the copy may have been lost."""
    has_ended: bool = False

    @property
    def key(self) -> SessionKey:
        return SessionKey(FleetUser(self.user, self.label), self.session_id)


class Promotions:
    """The records by session. Owned by the entry's event loop; `write` blocks until they are on
    disk.
    """

    def __init__(self, folder: Path):
        self._file = folder / "promotions.jsonl"
        self._records: dict[SessionKey, Promotion] = {}
        self._lines = 0

    def __len__(self) -> int:
        return len(self._records)

    def open(self) -> None:
        """Read the file. An incomplete last line belongs to a record that was not used.

        :raises InvalidArgument: it cannot be read.
        """
        try:
            text = self._file.read_bytes() if self._file.exists() else b""
            for line in text.split(b"\n")[:-1]:
                self._note(msgspec.json.decode(line, type=Promotion))
            self._write_anew()
        except (OSError, msgspec.DecodeError) as exc:
            raise InvalidArgument(
                f"the promoted copies in {self._file} cannot be read: {exc}",
                hint="the file says which node has a session after a loss: restore it if possible",
            ) from None

    def find(self, key: SessionKey) -> Promotion | None:
        return self._records.get(key)

    def all(self) -> list[Promotion]:
        return list(self._records.values())

    def _note(self, record: Promotion) -> None:
        if record.has_ended:
            self._records.pop(record.key, None)
        else:
            self._records[record.key] = record

    def write(self, record: Promotion) -> None:
        """Write a record, or its end; the line is on disk before this returns.

        :raises Busy: there are too many records.
        :raises OSError: the line cannot be written, and does not count.
        """
        is_new = not record.has_ended and record.key not in self._records
        if is_new and len(self._records) >= RECORDS_MAX:
            raise Busy(
                f"there are {RECORDS_MAX} records of promoted copies",
                hint="bring lost nodes back, or remove them from the fleet",
            )
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                line = msgspec.json.encode(record) + b"\n"
                if os.pwrite(descriptor, line, size) != len(line):
                    raise OSError("the line was not written as a whole")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        self._note(record)
        self._lines += 1
        if self._lines > 2 * len(self._records) + LINES_SPARE:
            try:
                self._write_anew()
            except OSError as exc:  # the record is on disk; the next one tries this again
                log.warning("%s stays long: %s", self._file, exc)

    def _write_anew(self) -> None:
        lines = [msgspec.json.encode(record) + b"\n" for record in self._records.values()]
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._file, b"".join(lines))
        self._lines = len(lines)


class ContinuedSessions:
    """Lives on the entry's event loop. *follower_after_s* is the time for which a node must have
    been lost before its sessions continue. The records of such sessions are in *folder*.
    """

    def __init__(
        self,
        copies: Copies,
        moves: Moves,
        homes: NodeTable[SessionKey],
        follower_after_s: float,
        folder: Path,
    ):
        self.promotions = Promotions(folder)
        self._copies, self._moves, self._homes = copies, moves, homes
        self._nodes, self._operator, self._note = copies.nodes, copies.operator, copies.note
        self._follower_after_s = follower_after_s
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
        place = self._copies.table.find(key) if self._copies.are_wanted else None
        if record is None and (place is None or self._nodes.is_reachable(place.home)):
            return None
        if record is None and known not in (None, place.home if place else None):
            return None
        await self._moves.wait_settled(key)
        with self._moves.moving(key):
            return await self._promote(key)

    async def _promote(self, key: SessionKey) -> str | None:
        await self._copies.wait_stored(key)  # the lost node may have sent further changes
        place, record = self._copies.table.find(key), self.promotions.find(key)
        if record is None:
            if place is None or self._nodes.is_reachable(place.home):
                return None
            self._check_loss(place)
            if not self._nodes.is_reachable(place.follower):
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
        link = self._nodes.links.get(place.home)
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
            await end_transfer(self._operator, record.follower, record.stream, "keep")
            self._copies.table.drop(key)
            self._homes.put(key, record.follower)
            await self._write(msgspec.structs.replace(record, is_kept=True))
        self._note(f"session {key.session_id!r} of the lost {record.home} is on {record.follower}")
        self._copies.counters.promoted += 1
        self._copies.check_soon()  # it needs another copy

    async def end_promotions(self, listed: Listed) -> None:
        """Delete the sessions of lost nodes that are back, which continue on other nodes."""
        for record in self.promotions.all():
            if self._moves.is_moving(record.key):
                self._copies.check_soon()
                continue
            with self._moves.moving(record.key):
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
                await self._remove_session(record.home, session)
        await self._write(msgspec.structs.replace(record, has_ended=True))

    async def _remove_session(self, node: str, session: Mapping[str, Any]) -> None:
        """Remove a session that has continued on another node.

        :raises InferdError: it is open on *node*, or the node was lost.
        """
        transfer = await begin_export(self._operator, node, session)
        await end_transfer(self._operator, node, transfer, "release")
        await end_transfer(self._operator, node, transfer, "drop")


def _is_of(record: Promotion, session: Mapping[str, Any]) -> bool:
    return bool(session["session_id"]) and copy_key(session) == record.key
