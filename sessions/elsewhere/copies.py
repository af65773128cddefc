"""Copies of sessions of other daemons, in the journal. A copy cannot be opened until `end_copy`
makes it an ordinary session.

The caller writes the changes of a session in their order. Each opening of the session sends its
changes as one numbered *stream*.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress

import anyio
import msgspec
import structlog

from ...backends.errors import BackendError, Busy, InvalidArgument, NotFound, SessionBusy
from ...scheduler.owner import Owner
from ..admission.ledger import Ledger
from ..conversation.session import Session
from ..entries import SessionFacts, StoredSession, Transfer, encode
from ..identity import SessionKey
from ..journal.journal import Journal, Recording, write_error
from ..journal.journal_file import Change, SaveFacts, SavePast, SavePiece
from ..lifetimes.deletion import SessionDeletion
from ..lifetimes.sessions_in_memory import DormantLimits, DormantSessions, LiveSessions
from ..worker_client import ModelSource
from .documents import ReceivedChange, decode_piece

UNKNOWN = -1
"""The number of a copy read from the journal: further changes of its stream are refused."""


log = structlog.get_logger(logger_name="sessions")


class CopiedSession:
    """A copy of a session. The journal stores it, too."""

    def __init__(self, key: SessionKey, facts: SessionFacts, model: ModelSource, past: bytes):
        self.owner, self.session_id = key
        self.facts, self.packed, self.model = facts, past, model
        self.pieces: list[bytes] = []
        self.number = UNKNOWN
        """The number of the last change in its stream."""
        self.recording = Recording()
        self.written_at = 0.0
        self.absent = frozenset[bytes]()
        """Images and sounds that its daemon could not send."""
        self.is_promoted = False
        """Whether it is becoming an ordinary session."""

    @property
    def transfer(self) -> Transfer:
        """The stream, and the caller's name of the daemon that has the session."""
        assert self.facts.transfer is not None, "a copy has one"
        return self.facts.transfer

    @property
    def kept_bytes(self) -> int:
        return len(self.packed) + sum(map(len, self.pieces))

    def stored(self, at: float) -> StoredSession:
        """Return it as an ordinary session of the journal."""
        facts = msgspec.structs.replace(self.facts, transfer=None)
        pieces = tuple(map(decode_piece, self.pieces))
        return StoredSession(self.owner, self.session_id, at, facts, self.packed, pieces)


class CopyRecording(Recording):
    """The recording of a copy, whose changes arrive in the form in which they are stored."""

    def __init__(self, copy: CopiedSession, journal: Journal, *, present: bool = False):
        super().__init__(copy, (copy.owner, copy.session_id), journal, present=present)
        self._copy = copy
        self._whole, self._has_new_facts = not present, False
        self._pieces_written = len(copy.pieces) if present else 0

    def note_received(self, change: ReceivedChange) -> None:
        """Note a change that was applied to the copy; it is written soon."""
        self._whole |= change.past is not None
        self._has_new_facts |= change.facts is not None
        if change.begins_turn or change.past is not None:
            self._pieces_written = 0
        self._note_change(urgent=True)

    def write_again(self) -> None:
        """Mark the whole copy to be written again, after a failed write."""
        self._whole, self._pieces_written = True, 0

    def take_changes(self, at: float) -> list[Change]:
        """Return the pending changes; from now on they count as written."""
        owner, name = self.key
        copy, changes = self._copy, list[Change]()
        if self._whole:
            facts = encode(copy.facts)
            changes.append(
                SavePast(owner=owner, session_id=name, facts=facts, past=copy.packed, at=at)
            )
            self._pieces_written = 0
        elif self._has_new_facts:
            changes.append(SaveFacts(owner=owner, session_id=name, facts=encode(copy.facts), at=at))
        for number in range(self._pieces_written, len(copy.pieces)):
            data = copy.pieces[number]
            changes.append(SavePiece(owner=owner, session_id=name, number=number, data=data))
        self._whole = self._has_new_facts = False
        self._pieces_written = len(copy.pieces)
        return changes


class StoredCopies:
    """Lives on the daemon's event loop. Owned by the manager, whose parts it uses."""

    def __init__(
        self,
        live: LiveSessions,
        dormant: DormantSessions,
        deletion: SessionDeletion,
        ledger: Ledger,
        journal: Journal | None,
    ):
        self._live, self._dormant, self._deletion = live, dormant, deletion
        self._ledger, self._journal = ledger, journal
        self._copies: OrderedDict[SessionKey, CopiedSession] = OrderedDict()
        """In order of their last changes, the oldest first."""
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._copies)

    def __iter__(self) -> Iterator[CopiedSession]:
        return iter(list(self._copies.values()))

    @property
    def bytes(self) -> int:
        return self._bytes

    def restore_copy(self, stored: StoredSession, model: ModelSource) -> None:
        assert self._journal is not None, "stored sessions come from a journal"
        key = stored.owner, stored.session_id
        copy = CopiedSession(key, stored.facts, model, stored.past)
        copy.pieces = [encode(piece) for piece in stored.pieces]
        copy.written_at = self._ledger.seconds() - self._journal.age_s(stored)
        self._copies[key] = copy
        self._hold_contents(copy)
        self._bytes += copy.kept_bytes
        self._add_recording(copy, present=True)

    def _add_recording(self, copy: CopiedSession, *, present: bool = False) -> None:
        assert self._journal is not None, "copies are stored"
        copy.recording = CopyRecording(copy, self._journal, present=present)
        self._journal.add_recording(copy.recording)

    def _hold_contents(self, copy: CopiedSession) -> None:
        """Let the media store keep the images and sounds of a copy that are here. After a
        promotion, others are texts in the history.
        """
        self._ledger.media.hold(copy, copy.owner.user, copy.facts.media)

    def _lacks_media(self, user: int, copy: CopiedSession | None, change: ReceivedChange) -> bool:
        """Return whether a change names images or sounds that it lacks, and that are not here."""
        if change.media is not None or change.facts is None:
            return False
        absent = frozenset[bytes]() if copy is None else copy.absent
        wanted = (c for c in change.facts.media if c not in absent)
        return not all(self._ledger.media.has(user, content) for content in wanted)

    def check_free(self, owner: Owner, session_id: str) -> None:
        """Check that an id is not that of a copy.

        :raises SessionBusy: the id is that of a copy.
        """
        if (owner, session_id) in self._copies:
            raise SessionBusy(
                f"session {session_id!r} is on another daemon; here is a copy of it",
                hint="open it there",
            )

    # Writing.

    async def write_change(
        self,
        owner: Owner,
        session_id: str,
        stream: Transfer,
        number: int,
        change: ReceivedChange,
        model: ModelSource | None,
    ) -> None:
        """Apply a change to a copy; it is in the journal before this returns. A whole session needs
        its *model*.

        :raises NotFound: this is not the next change of its stream; send the whole session.
        :raises SessionBusy: the session itself is here, or the copy is becoming it.
        :raises Busy: there is no space for the copy.
        :raises BackendError: the journal cannot be written.
        """
        key = owner, session_id
        copy = self._copies.get(key)
        if copy is not None and copy.is_promoted:
            raise SessionBusy(f"the copy of session {session_id!r} is becoming the session")
        if self._lacks_media(owner.user, copy, change):
            raise NotFound(
                f"images or sounds of session {session_id!r} are not here",
                hint="send the whole session",
            )
        if change.past is not None and model is not None:
            copy = self._begin_copy(key, copy, change, model)
        elif copy is None or copy.transfer.id != stream.id or number > copy.number + 1:
            raise NotFound(
                f"there is no copy of session {session_id!r} that lacks only this change",
                hint="send the whole session",
            )
        elif number <= copy.number:
            await copy.recording.wait_written()
            return
        self._apply(copy, msgspec.structs.replace(stream, copy=True), number, change)
        await copy.recording.wait_written()
        if not copy.recording.durable:
            raise write_error(self._journal)

    def _begin_copy(
        self,
        key: SessionKey,
        before: CopiedSession | None,
        change: ReceivedChange,
        model: ModelSource,
    ) -> CopiedSession:
        """Return the copy that a whole session replaces or begins."""
        assert change.past is not None
        assert change.facts is not None
        if self._journal is None or self._journal.is_refused:
            raise write_error(self._journal)
        _, live = self._live.find_id(*key)
        found = live or self._dormant.find_session(*key) or self._dormant.find_deleted(*key)
        if found or self._deletion.under_way(*key):
            raise SessionBusy(f"the session {key[1]!r} itself is here")
        self._check_bounds(before, len(change.past) + len(change.piece or b""))
        if before is None:
            copy = self._copies[key] = CopiedSession(key, change.facts, model, change.past)
            self._bytes += copy.kept_bytes
            self._add_recording(copy)
            return copy
        self._bytes -= before.kept_bytes
        before.packed, before.model, before.pieces = change.past, model, []
        self._bytes += before.kept_bytes
        return before

    def _apply(
        self, copy: CopiedSession, stream: Transfer, number: int, change: ReceivedChange
    ) -> None:
        assert isinstance(copy.recording, CopyRecording)
        copy.facts = msgspec.structs.replace(change.facts or copy.facts, transfer=stream)
        self._bytes -= copy.kept_bytes
        if change.begins_turn:
            copy.pieces = []
        if change.piece is not None:
            copy.pieces.append(change.piece)
        self._bytes += copy.kept_bytes
        copy.number, copy.written_at = number, self._ledger.seconds()
        self._hold_contents(copy)
        if change.media is not None:
            media = self._ledger.media
            copy.absent = frozenset(
                c for c in copy.facts.media if not media.has(copy.owner.user, c)
            )
        self._copies.move_to_end((copy.owner, copy.session_id))
        copy.recording.note_received(change)

    @property
    def _limits(self) -> DormantLimits:
        """The bounds of dormant sessions, which hold for the copies separately."""
        return self._dormant.limits

    def _check_bounds(self, before: CopiedSession | None, size: int) -> None:
        count = len(self._copies) + (before is None)
        total = self.bytes + size - (0 if before is None else before.kept_bytes)
        for bound, wanted, limit in (
            ("dormant-sessions-max", count, self._limits.sessions_max),
            ("dormant-bytes-max", total, self._limits.bytes_max),
        ):
            if wanted > limit:
                raise Busy(
                    f"{bound} is {limit}; with this copy, {wanted} would be needed",
                    hint="raise the limit, or add a node",
                    data={"bound": bound},
                )

    # The end of a copy.

    def find_stream(self, stream: str) -> CopiedSession | None:
        return next((c for c in self._copies.values() if c.transfer.id == stream), None)

    async def end_copy(self, copy: CopiedSession, outcome: str) -> None:
        """End a copy: `keep` makes it an ordinary dormant session, `drop` deletes it. The outcome
        is on disk before this returns.

        :raises InvalidArgument: *outcome* is neither of them.
        :raises SessionBusy: another call makes the copy an ordinary session.
        :raises BackendError: the journal cannot be written.
        """
        if copy.is_promoted:
            raise SessionBusy("the copy is becoming the session", hint="try again soon")
        if outcome == "drop":
            await self.drop_copy(copy)
        elif outcome == "keep":
            copy.is_promoted = True
            with anyio.CancelScope(shield=True):  # once it is written, it must be noted
                await self._promote(copy)
        else:
            raise InvalidArgument(f"a copy cannot end with {outcome!r}")

    async def _promote(self, copy: CopiedSession) -> None:
        assert self._journal is not None, "copies are stored"
        key = copy.owner, copy.session_id
        session = Session.from_stored(copy.stored(0.0), copy.model, self._ledger)
        self._journal.withdraw(copy.recording)
        session.recording = self._journal.open_recording(session, key)
        session.recording.history_changed()
        await session.wait_recorded()
        if not session.recording.durable:
            self._journal.withdraw(session.recording)
            copy.is_promoted = False
            self._add_recording(copy)
            raise write_error(self._journal)
        session.hold_contents()
        if self._remove(key) is copy:  # else it was deleted meanwhile
            session.used_at = self._ledger.seconds()
            self._dormant.add_session(session)
        else:
            session.release_contents()

    async def drop_copy(self, copy: CopiedSession) -> None:
        """Delete a copy.

        :raises BackendError: its rows cannot be deleted; the journal tries again until they are.
        """
        key = copy.owner, copy.session_id
        self._remove(key)
        if self._journal is not None:
            await self._journal.erase_session(*key)

    def forget_copy(self, owner: Owner, session_id: str) -> bool:
        """Forget the copy of a session that is deleted, or that arrives; return whether there was
        one. Its rows stay.
        """
        copy = self._remove((owner, session_id))
        if copy is not None and self._journal is not None:
            self._journal.withdraw(copy.recording)
        return copy is not None

    def _remove(self, key: SessionKey) -> CopiedSession | None:
        copy = self._copies.pop(key, None)
        if copy is not None:
            self._bytes -= copy.kept_bytes
            self._ledger.media.release(copy)
        return copy

    # Expiry.

    def expires_in_s(self, now: float) -> float:
        """Return the seconds until the oldest copy is too old, or infinity."""
        for oldest in self._copies.values():
            return oldest.written_at + self._limits.seconds_max - now
        return float("inf")

    async def drop_expired(self, now: float) -> None:
        count = 0
        while self.expires_in_s(now) <= 0:
            with suppress(BackendError):  # the journal tries again
                await self.drop_copy(next(iter(self._copies.values())))
            count += 1
        if count:
            log.info("copies.deleted_by_age", copies=count, left=len(self._copies))
