"""Sessions that move between daemons: held ones, arriving ones, and records of departed ones.

The caller moves a session in three steps, under its own id for the *transfer*. The export holds the
session here, the import lets it arrive at the other daemon, and the release replaces it here by a
record. Until the release the session belongs to this daemon, and afterwards to the other one,
whatever fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
import structlog

from ...backends.errors import (
    BackendError,
    Busy,
    InvalidArgument,
    NotFound,
    SessionBusy,
)
from ...scheduler.kv.file_format import KvHead
from ...scheduler.owner import Owner
from ..admission.ledger import Ledger
from ..conversation.session import Session
from ..entries import HistoryEntry, SessionFacts, StoredSession, Transfer, encode
from ..identity import SessionKey
from ..journal.journal import Journal, write_error
from ..lifetimes.deletion import SessionDeletion
from ..lifetimes.sessions_in_memory import DormantSessions, LiveSessions
from ..table import SessionCall
from ..worker_client import ModelSource
from .copies import StoredCopies
from .documents import ExportedSession, MediaHead

HOLD_S_MAX = 60.0
"""Time without a call of its transfer after which a hold ends."""
HOLDS_MAX = 64
DEPARTED_MAX = 10_000
"""Records of departed sessions; beyond that, no session is released."""
_NO_HISTORY = encode(HistoryEntry())
log = structlog.get_logger(logger_name="sessions")


@dataclass(eq=False)
class Hold:
    """A session that is being exported over the connection *holder*."""

    session: Session
    transfer: Transfer
    holder: object
    document: bytes
    """The exported session, without its images, sounds and KV state."""
    used_at: float
    media: tuple[MediaHead, ...] = ()
    """Its images and sounds, which follow the document."""
    kv_file: Path | None = None
    kv_offset: int = 0
    kv_bytes: int = 0
    releasing: bool = False

    @property
    def media_bytes(self) -> int:
        return sum(head.size for head in self.media)

    @property
    def size(self) -> int:
        """The bytes of the whole export."""
        return len(self.document) + self.media_bytes + self.kv_bytes


@dataclass(frozen=True, eq=False)
class DepartedSession:
    """The record of a session that has moved to another daemon; the journal stores it."""

    owner: Owner
    session_id: str
    facts: SessionFacts
    packed: bytes = _NO_HISTORY


class MovingSessions:
    """Lives on the daemon's event loop. Owned by the manager, whose parts it uses."""

    def __init__(
        self,
        live: LiveSessions,
        dormant: DormantSessions,
        deletion: SessionDeletion,
        copies: StoredCopies,
        ledger: Ledger,
        journal: Journal | None,
    ):
        self._live, self._dormant, self._deletion = live, dormant, deletion
        self._copies = copies
        self._ledger, self._journal = ledger, journal
        self._holds: dict[SessionKey, Hold] = {}
        self._arriving: dict[SessionKey, Session] = {}
        self._departed: dict[SessionKey, DepartedSession] = {}

    @property
    def arriving(self) -> Iterator[Session]:
        return iter(list(self._arriving.values()))

    @property
    def departed(self) -> Iterator[DepartedSession]:
        return iter(list(self._departed.values()))

    def restore_session(self, stored: StoredSession, model: ModelSource) -> None:
        """Add an arriving or departed session from the journal."""
        assert stored.facts.transfer is not None
        key = stored.owner, stored.session_id
        assert self._journal is not None, "stored sessions come from a journal"
        if stored.facts.transfer.departed:
            record = self._departed[key] = DepartedSession(*key, stored.facts)
            self._journal.open_recording(record, key, found=True)
        else:
            session = self._arriving[key] = Session.from_stored(stored, model, self._ledger)
            session.hold_contents()
            session.recording = self._journal.open_recording(session, key, found=True)

    def check_free(self, owner: Owner, session_id: str) -> None:
        """Check that a session may be opened: it neither moves nor is at another daemon.

        :raises SessionBusy: it moves or has departed, or only a copy of it is here.
        """
        self._copies.check_free(owner, session_id)
        key = owner, session_id
        if key in self._departed:
            raise SessionBusy(
                f"session {session_id!r} has moved to another daemon", hint="open it there"
            )
        if self._hold_of(key) or key in self._arriving:
            raise SessionBusy(
                f"session {session_id!r} is being moved between daemons", hint="try again soon"
            )

    # Export.

    def hold_session(
        self, owner: Owner, session_id: str, transfer: Transfer, holder: object
    ) -> Hold:
        """Hold a dormant session for its export, without images and sounds that were lost. An
        earlier hold of it ends.

        :raises NotFound: there is no such session.
        :raises SessionBusy: it is open, or is being released.
        :raises Busy: too many sessions are held.
        """
        key = owner, session_id
        _, live = self._live.find_id(owner, session_id)
        session = self._dormant.find_session(owner, session_id)
        before = self._hold_of(key)
        if live is not None or self._deletion.under_way(owner, session_id):
            raise SessionBusy(f"session {session_id!r} is open", hint="close it with `keep` first")
        if session is None:
            raise NotFound(f"there is no dormant session {session_id!r}")
        if before is not None and before.releasing:
            raise SessionBusy(f"session {session_id!r} is being moved", hint="try again soon")
        if before is None and len(self._holds) >= HOLDS_MAX:
            raise Busy(
                f"{HOLDS_MAX} sessions are being exported, which is the limit",
                hint="try again when an export has ended",
                data={"holds_max": HOLDS_MAX},
            )
        store, user = self._ledger.media, owner.user
        contents = [c for c in sorted(session.contents) if store.has(user, c)]
        media = tuple(MediaHead(content, store.size_of(user, content)) for content in contents)
        document = ExportedSession.of_session(session, media).encode()
        hold = Hold(session, transfer, holder, document, self._ledger.seconds(), media)
        self._holds[key] = hold
        return hold

    @staticmethod
    def add_kv(hold: Hold, path: Path, head: KvHead, offset: int) -> None:
        """Include the KV state at *offset* of a file in the export."""
        hold.document = ExportedSession.of_session(hold.session, hold.media, head).encode()
        hold.kv_file, hold.kv_offset, hold.kv_bytes = path, offset, head.size

    @staticmethod
    def remove_kv(hold: Hold) -> None:
        """Exclude the KV state from the export."""
        hold.document = ExportedSession.of_session(hold.session, hold.media).encode()
        hold.kv_file, hold.kv_bytes = None, 0

    def _hold_of(self, key: SessionKey) -> Hold | None:
        """Return the hold of a session, if it has one that has not ended."""
        hold = self._holds.get(key)
        if hold is None or hold.releasing:
            return hold
        is_old = self._ledger.seconds() > hold.used_at + HOLD_S_MAX
        if is_old or self._dormant.find_session(*key) is not hold.session:
            del self._holds[key]
            return None
        return hold

    def get_hold(self, transfer: str, holder: object) -> Hold:
        """Return the hold of a transfer, as `find_hold` does.

        :raises NotFound: there is none.
        """
        hold = self.find_hold(transfer, holder)
        if hold is None:
            raise NotFound(
                f"the export of the transfer {transfer!r} has ended, or never began",
                hint="begin it again with the part at 0, over this connection",
            )
        return hold

    def find_hold(self, transfer: str, holder: object) -> Hold | None:
        """Return the hold of a transfer over the connection *holder*, and note its use."""
        for key in list(self._holds):
            hold = self._hold_of(key)
            if hold is not None and hold.transfer.id == transfer and hold.holder is holder:
                hold.used_at = self._ledger.seconds()
                return hold
        return None

    def end_holds(self, holder: object) -> None:
        """End the holds of a connection that was closed."""
        for key, hold in list(self._holds.items()):
            if hold.holder is holder and not hold.releasing:
                del self._holds[key]

    async def _release(self, hold: Hold) -> None:
        """Replace a session by the record of its departure, on disk before this returns.

        :raises Busy: there are too many records; the session stays.
        :raises BackendError: the journal cannot be written; the session stays.
        :raises NotFound: the session was deleted meanwhile.
        """
        session, key = hold.session, (hold.session.owner, hold.session.session_id or "")
        if len(self._departed) >= DEPARTED_MAX:
            raise Busy(
                f"there are {DEPARTED_MAX} records of departed sessions, which is the limit",
                hint="end their transfers with `drop`, once the sessions have arrived",
                data={"departed_max": DEPARTED_MAX},
            )
        hold.releasing = True
        try:
            transfer = msgspec.structs.replace(hold.transfer, departed=True)
            facts = msgspec.structs.replace(
                session.facts, transfer=transfer, options={}, defaults={}, out_of_range={}
            )
            record = DepartedSession(*key, facts)
            with anyio.CancelScope(shield=True):  # once it is written, it must be noted
                await self._write_departed(session, record, key)
            if self._dormant.find_session(*key) is not session:
                raise NotFound(f"session {key[1]!r} was deleted meanwhile")
            self._departed[key] = record
            self._dormant.remove_session(session)
            session.end(SessionCall.CLOSE, "the session has moved to another daemon")
            session.release_contents()
        finally:
            self._holds.pop(key, None)
        try:
            await self._deletion.delete_kv_states(session)
        except BackendError as error:
            log.warning("session.not_deleted", session=session.name, cause=str(error))

    async def _write_departed(
        self, session: Session, record: DepartedSession, key: SessionKey
    ) -> None:
        if self._journal is None or session.recording.durable is None:
            return  # it was not stored here
        self._journal.withdraw(session.recording)
        recording = self._journal.open_recording(record, key)
        recording.history_changed()
        await recording.wait_written()
        if recording.durable:
            return
        self._journal.withdraw(recording)
        session.recording = self._journal.open_recording(session, key)
        session.recording.history_changed()
        raise write_error(self._journal)

    # Import.

    async def accept_session(
        self, stored: StoredSession, model: ModelSource, *, persist: bool
    ) -> None:
        """Add a session that arrives; it is in the journal before this returns. An earlier arrival
        of the session, the record of its departure and a copy of it are replaced.

        :raises SessionBusy: the session is here already.
        :raises Busy: there is no space for a dormant session.
        :raises BackendError: the journal cannot be written.
        """
        key = stored.owner, stored.session_id
        session = self.check_arrival(stored, model)
        self._departed.pop(key, None)
        self._copies.forget_copy(*key)
        before = self._arriving.get(key)
        self._arriving[key] = session
        session.hold_contents()
        if before is not None:
            before.release_contents()
        session.settings.persist = persist
        if not persist or self._journal is None:
            return
        if before is not None:
            self._journal.withdraw(before.recording)
        session.recording = self._journal.open_recording(session, key)
        session.recording.history_changed()
        await session.wait_recorded()
        if not session.recording.durable:
            self._journal.withdraw(session.recording)
            self._arriving.pop(key, None)
            session.release_contents()
            raise write_error(self._journal)

    def check_arrival(self, stored: StoredSession, model: ModelSource) -> Session:
        """Return a session that may arrive.

        :raises SessionBusy: the session is here already.
        :raises Busy: there is no space for a dormant session.
        """
        key = stored.owner, stored.session_id
        _, live = self._live.find_id(*key)
        found = live or self._dormant.find_session(*key) or self._dormant.find_deleted(*key)
        if found or self._deletion.under_way(*key):
            raise SessionBusy(f"there is a session {stored.session_id!r} already")
        session = Session.from_stored(stored, model, self._ledger)
        self._check_bounds(session, key)
        return session

    def _check_bounds(self, session: Session, key: SessionKey) -> None:
        """Check that a session can become dormant here without the deletion of another one.

        :raises Busy: a bound would be exceeded.
        """
        others = [other for k, other in self._arriving.items() if k != key]
        own = sum(s.kept_bytes for s in others if s.owner.user == session.owner.user)
        limits, size = self._dormant.limits, session.kept_bytes
        count = self._dormant.bounded + len(others)
        left = self._ledger.kept_bytes.left_for_dormant(session.owner.user)
        for bound, wanted, limit in (
            ("dormant-sessions-max", count + 1, limits.sessions_max),
            (
                "dormant-bytes-max",
                self._dormant.bytes + sum(s.kept_bytes for s in others) + size,
                limits.bytes_max,
            ),
            (
                "session-bytes-user-max",
                self._dormant.bytes_of(session.owner.user) + own + size,
                left,
            ),
        ):
            if wanted > limit:
                raise Busy(
                    f"{bound} is {limit}; with this session, {wanted} would be needed",
                    hint="raise the limit, or delete sessions that are no longer needed",
                    data={"bound": bound},
                )

    # The end of a transfer.

    async def end_transfer(self, transfer: str, outcome: str, holder: object) -> None:
        """End a transfer with an *outcome*, which is on disk before this returns. A held session
        allows `keep` or `release`, an arriving one or a copy `keep` or `drop`, a departed one only
        `drop`.

        :raises NotFound: there is no such transfer.
        :raises InvalidArgument: the session does not allow the outcome.
        :raises BackendError: the journal cannot be written.
        """
        copy = self._copies.find_stream(transfer)
        if copy is not None:
            await self._copies.end_copy(copy, outcome)
            return
        hold = self.find_hold(transfer, holder)
        if hold is not None and outcome == "keep":
            del self._holds[hold.session.owner, hold.session.session_id or ""]
            return
        if hold is not None and outcome == "release":
            await self._release(hold)
            return
        for session in self.arriving:
            if session.transfer is not None and session.transfer.id == transfer:
                await self._end_arrival(session, outcome)
                return
        for record in self.departed:
            if record.facts.transfer is not None and record.facts.transfer.id == transfer:
                if outcome != "drop":
                    break
                await self._erase((record.owner, record.session_id))
                return
        if hold is not None:
            raise InvalidArgument(f"a held session cannot end with {outcome!r}")
        raise NotFound(f"there is no transfer {transfer!r} that can end with {outcome!r}")

    async def _end_arrival(self, session: Session, outcome: str) -> None:
        key = session.owner, session.session_id or ""
        if outcome == "drop":
            del self._arriving[key]
            session.end(SessionCall.CLOSE, "the session has not moved here")
            await self._deletion.delete_now(session)
        elif outcome == "keep":
            transfer, session.transfer = session.transfer, None
            session.recording.facts_changed()
            await session.wait_recorded()
            if self._journal is not None and session.recording.durable is False:
                session.transfer = transfer
                raise write_error(self._journal)
            if self._arriving.pop(key, None) is session:  # else it was deleted meanwhile
                session.used_at = self._ledger.seconds()
                self._dormant.add_session(session)
        else:
            raise InvalidArgument(f"an arriving session cannot end with {outcome!r}")

    async def _erase(self, key: SessionKey) -> None:
        """Delete the record of a departed session."""
        del self._departed[key]
        if self._journal is not None:
            with suppress(BackendError):  # the journal tries again
                await self._journal.erase_session(*key)

    def forget_session(self, owner: Owner, session_id: str) -> bool:
        """Drop the arrival or the departure record of a session that is deleted; return whether it
        was arriving.
        """
        key = owner, session_id
        self._departed.pop(key, None)
        session = self._arriving.pop(key, None)
        if session is not None:
            session.end(SessionCall.CLOSE, "the session was deleted")
            session.release_contents()
        return session is not None
