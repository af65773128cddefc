"""The journal of sessions with an id, and the schedule of its writes.

A session's recording notes its changes. The journal notes which sessions have changed and reads
their values when it writes. So the number of sessions bounds the pending data, however slow the
disk is.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec
import structlog

from ...backends.errors import BackendError
from ...scheduler import messages as m
from ...scheduler.messages import pack_floats, pack_tokens
from ...scheduler.owner import Owner
from ..entries import (
    CopyChange,
    Dates,
    SessionFacts,
    StoredSession,
    TurnBegin,
    TurnEnd,
    TurnPiece,
    encode,
)
from ..identity import SessionKey
from ..turn.turn import TokensSink, Turn
from ..usage.rows import (
    Group,
    StoredUsage,
    Sum,
    UsageQuery,
    UsageRow,
    add_rows,
    read_stored,
    read_sums,
)
from ..usage.usage import Usage
from .journal_file import (
    Change,
    ChangeUsage,
    Erase,
    Found,
    JournalFile,
    NewerJournal,
    SaveDeletions,
    SaveFacts,
    SavePast,
    SavePiece,
    damaged,
)

Shift = tuple[int, int, int]
"""Tokens of the turn before the shift; tokens of the history kept, then dropped."""
NO_KEY: SessionKey = (Owner(0), "")


class ChangeSender(Protocol):
    """The part of a connection that sends copies of its sessions to its client."""

    def note_changed(self, recording: Recording) -> None:
        """Note that a session has changed; the change is sent before the next reply."""

    def send_change(self, recording: Recording) -> None:
        """Send the change of a session now."""

    def note_erased(self, recording: Recording) -> None:
        """Note that the stored data of a session is deleted."""


class RecordedSession(Protocol):
    """The part of a session that is stored."""

    @property
    def facts(self) -> SessionFacts:
        """Its present settings and counts."""

    @property
    def packed(self) -> bytes:
        """Its history up to the turn: a `HistoryEntry` in msgpack."""


class Recording:
    """The part of a session that the journal has, and its pending changes. Owned by the session.

    Without a *journal* nothing is written, and *durable* says why: None if that is intended, False
    if the journal is refused. With *present*, the file has the session's present state.
    """

    def __init__(
        self,
        session: RecordedSession | None = None,
        key: SessionKey = NO_KEY,
        journal: Journal | None = None,
        *,
        present: bool = False,
        durable: bool | None = None,
    ):
        self.key = key
        self.shifts: list[Shift] = []
        """The turn's context shifts."""
        self._journal, self._session, self._durable = journal, session, durable
        self._turn: Turn | None = None
        self._begin = TurnBegin()
        self._end: TurnEnd | None = None
        self._stored = _Progress(past=not present)
        self._copied: _Progress | None = None
        """The part that was sent to the connection's client, while it wants copies."""
        self._copier: ChangeSender | None = None

    @property
    def durable(self) -> bool | None:
        """Whether the session's answers are written; None if they are not meant to be."""
        return self._durable if self._journal is None else self._journal.cause is None

    def facts_changed(self) -> None:
        """Note a change of settings; it is written before the call's reply."""
        for progress in self._progresses():
            progress.facts = True
        self._note_change(urgent=True)

    def history_changed(self) -> None:
        """Note a new history without a turn on it; it is written before the call's reply."""
        self._turn = None
        for progress in self._progresses():
            progress.past = True
        self._note_change(urgent=True)

    def _progresses(self) -> Iterator[_Progress]:
        yield self._stored
        if self._copied is not None:
            yield self._copied

    def turn_began(
        self,
        turn: Turn,
        begin: TurnBegin,
        shifts: Sequence[Shift] = (),
        end: TurnEnd | None = None,
    ) -> None:
        """Note a turn that begins on the present history, or continues after *shifts*, or has come
        to its *end*. It is written with the next group of changes.
        """
        if self._journal is not None:
            self._turn, self._begin, self._end = turn, begin, end
            self.shifts = list(shifts)
            for progress in self._progresses():
                progress.written = _Written()
            self._note_change()

    def history_restored(
        self, turn: Turn | None, begin: TurnBegin, shifts: Sequence[Shift], end: TurnEnd | None
    ) -> None:
        """Note that an earlier history was restored, with its last *turn*; both are written before
        the call's reply.
        """
        self.history_changed()
        if turn is not None and turn.generates:
            self.turn_began(turn, begin, shifts, end)

    def watch_tokens(self, sink: TokensSink | None) -> TokensSink | None:
        """Return a sink for a turn's tokens that notes them and passes them on to *sink*."""
        if self._journal is None:
            return sink

        def note_tokens(report: m.Tokens) -> None:
            if (turn := self._turn) is not None:
                if len(turn.shifts) > len(self.shifts):
                    self._note_shifts(turn, len(turn.tokens) - len(report.tokens))
                if self._journal is not None:
                    self._journal.note_change(self, len(report.tokens))
            if sink is not None:
                sink(report)

        return note_tokens

    def _note_change(self, *, urgent: bool = False) -> None:
        if self._journal is not None:
            self._journal.note_change(self, urgent=urgent)
            if self._copier is not None:
                self._copier.note_changed(self)

    def _note_shifts(self, turn: Turn, at: int) -> None:
        """Note the new shifts, which came after *at* tokens of the turn."""
        self.shifts += [(at, *shift) for shift in turn.shifts[len(self.shifts) :]]

    def turn_ended(self, end: TurnEnd | None) -> None:
        """Note the turn's *end*, or None if it was interrupted; it is written before the reply."""
        if self._turn is not None:
            self._end = end
            self._note_shifts(self._turn, len(self._turn.tokens))
            self._note_change(urgent=True)

    @property
    def is_written(self) -> bool:
        """Whether the journal has all noted changes, or there is none."""
        return self._journal is None or self._journal.is_written(self)

    async def wait_written(self) -> None:
        """Wait until all noted changes are written, or writing them has failed."""
        if self._journal is not None:
            await self._journal.wait_written(self)

    # Copies for the client of the session's connection.

    def begin_copies(self, copier: ChangeSender, *, changed: bool) -> None:
        """Send changes to *copier* from now on; the first one has the whole session. If the session
        has *changed*, it is sent before the next reply.
        """
        if self._journal is not None:
            self._copier, self._copied = copier, _Progress(past=True)
            if changed:
                copier.note_changed(self)

    def end_copies(self) -> None:
        """Send no further changes."""
        self._copier = self._copied = None

    def send_beginning(self) -> None:
        """Send a turn's beginning to the copier, so that the copy can continue the turn."""
        if self._copier is not None:
            self._copier.send_change(self)

    def erased(self) -> None:
        """Note that the session's rows are being deleted."""
        if self._copier is not None:
            self._copier.note_erased(self)
            self.end_copies()

    @property
    def is_copied(self) -> bool:
        return self._copier is not None

    @property
    def is_stored(self) -> bool:
        return self._journal is not None

    @property
    def model(self) -> str:
        return "" if self._session is None else self._session.facts.model

    def take_copy(
        self, *, whole: bool = False, media: tuple[bytes, ...] | None = None
    ) -> CopyChange:
        """Return the changes since the last call, or the *whole* session, with the contents of its
        images and sounds; from now on they count as sent to the copier.
        """
        progress = _Progress(past=True) if whole or self._copied is None else self._copied
        if self._copied is not None:
            self._copied = progress
        facts, past, piece = self._take(progress)
        return CopyChange(
            facts=facts, past=past, piece=None if piece is None else piece[1], media=media
        )

    # Called by the journal as it writes.

    def give_up(self) -> None:
        """Store nothing more: a value of it cannot be stored, or the journal is refused."""
        self._journal, self._durable = None, False

    def write_again(self) -> None:
        """Mark the whole session to be written again, after a failed write."""
        self._stored = _Progress(past=True)

    def take_changes(self, at: float) -> list[Change]:
        """Return the pending changes; from now on they count as written."""
        key: dict[str, Any] = {"owner": self.key[0], "session_id": self.key[1]}
        changes: list[Change] = []
        facts, past, piece = self._take(self._stored)
        if past is not None and facts is not None:
            changes.append(SavePast(**key, facts=facts, past=past, at=at))
        elif facts is not None:
            changes.append(SaveFacts(**key, facts=facts, at=at))
        if piece is not None:
            changes.append(SavePiece(**key, number=piece[0], data=piece[1]))
        return changes

    def _take(
        self, progress: _Progress
    ) -> tuple[bytes | None, bytes | None, tuple[int, bytes] | None]:
        """Return the facts, the history and the numbered piece that *progress* lacks."""
        assert self._session is not None, "a recording without a session has no journal"
        facts = past = packed = None
        if progress.past or progress.facts:
            facts = encode(self._session.facts)
            past = self._session.packed if progress.past else None
            progress.past = progress.facts = False
        if (piece := self._next_piece(progress.written)) is not None:
            packed = progress.written.pieces, encode(piece)
            progress.written.pieces += 1
        return facts, past, packed

    def _next_piece(self, done: _Written) -> TurnPiece | None:
        """Return the turn's output since the last piece, or None if there is none."""
        turn, end = self._turn, self._end
        if turn is None or done.end:
            return None
        piece = TurnPiece(
            tokens=pack_tokens(turn.tokens[done.tokens :]),
            text=bytes(turn.text[done.text :]),
            surprisals=pack_floats(turn.surprisals[done.surprisals :]),
            shifts=tuple(self.shifts[done.shifts :]),
            begin=None if done.pieces else self._begin,
            end=None if end is None else end.reason,
            metadata=b"" if end is None else end.metadata,
            error=None if end is None else end.error,
            ending_left=turn.ending_left,
        )
        done.tokens, done.text, done.shifts = len(turn.tokens), len(turn.text), len(self.shifts)
        done.surprisals = len(turn.surprisals)
        done.end = piece.end is not None
        new = piece.tokens or piece.text or piece.shifts or piece.begin or done.end
        return piece if new else None


@dataclass(slots=True)
class _Written:
    """The written part of a turn."""

    pieces: int = 0
    tokens: int = 0
    text: int = 0
    surprisals: int = 0
    shifts: int = 0
    end: bool = False


@dataclass(slots=True)
class _Progress:
    """The progress of a reader of a session's changes: the journal, or a copier.

    With *facts* the reader lacks the present facts, with *past* these and the history. *written* is
    the part of the turn that it has.
    """

    past: bool = False
    facts: bool = False
    written: _Written = field(default_factory=_Written)


GROUP_S = 0.05
GROUP_TOKENS = 256
"""Output of turns is written after this time, or once there are this many tokens."""
RETRY_S = 1.0
"""A failed write is tried again after this time, and by each call that needs it."""

log = structlog.get_logger(logger_name="sessions")
_T = TypeVar("_T")


class Journal:
    """Lives on the daemon's event loop; *file* is used by one thread at a time.

    `run` writes all pending changes in one transaction. `cause` says why writing fails, and is None
    while it works. `set_aside` is the path of an unreadable file, `set_aside_cause` its defect.
    *on_change* is called when one of them changes.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[], None] = lambda: None,
        dates: Dates | None = None,
        facts: type[SessionFacts] = SessionFacts,
        usage: Usage | None = None,
    ):
        self.cause: str | None = None
        self.set_aside: Path | None = None
        self.set_aside_cause = ""
        self._report_change = on_change
        self._dates = dates or Dates()
        self._file = JournalFile(path, self._dates.now, facts)
        self._usage = usage
        self._refused = False
        self._closed = False
        self._recordings: dict[SessionKey, Recording] = {}
        self._changed: dict[Recording, None] = {}
        self._noted_at: float | None = None
        """The time at which the oldest pending change was noted."""
        self._writing_at: float | None = None
        """The time at which the oldest change that is being written was noted."""
        self._erasing: dict[SessionKey, None] = {}
        self._deletions: dict[Owner, Callable[[], bytes]] = {}
        """Owners whose notes on deleted sessions are to be written, with functions that pack them.
        """
        self.found_deletions: dict[Owner, bytes] = {}
        """The packed notes that were in the file when it was opened."""
        self._present: set[SessionKey] = set()
        """Sessions that are in the file, or may be."""
        self._tokens = 0
        self._wake, self._urgent, self._flushed = anyio.Event(), anyio.Event(), anyio.Event()
        self._begun = self._done = 0
        self._usage_flush = 0
        """The number of the write that has all requests that have ended."""
        self._lock = anyio.Lock()
        self._thread = anyio.CapacityLimiter(1)

    async def open_file(self) -> list[StoredSession]:
        """Open the file and return its sessions. If that fails, the daemon runs without it."""
        try:
            found, stored_usage = await self._in_thread(self._open)
        except NewerJournal as exc:
            self._refused, self.cause = True, str(exc)
            log.error("journal.refused", path=str(self._file.path), cause=str(exc))
            self._report_change()
            return []
        except (OSError, sqlite3.Error) as exc:
            self._failed([], exc)
            return []
        self._note_found(found, stored_usage)
        self.found_deletions = found.deletions
        self._dates.not_before(max((s.at for s in found.sessions), default=0.0))
        return found.sessions

    def date(self) -> float:
        """Return the present date, in seconds since 1970."""
        return self._dates.now()

    def store_deletions(self, owner: Owner, pack: Callable[[], bytes]) -> None:
        """Write the notes on an owner's deleted sessions, which *pack* returns, before a session is
        erased from now on.
        """
        if not self._refused:
            self._deletions[owner] = pack
            self._wake.set()

    async def wait_deletions(self) -> None:
        """Wait until the notes on deleted sessions are written, or writing them has failed."""
        changed = bool(self._deletions)
        if changed:
            self._urgent.set()
        await self._wait_for_flush(self._begun + changed)

    def age_s(self, stored: StoredSession) -> float:
        """Return the seconds since a session was written."""
        return self._dates.age_s(stored.at)

    def _note_found(self, found: Found, stored_usage: StoredUsage | None) -> None:
        if self._usage is not None and stored_usage is not None:
            self._usage.restore(stored_usage)
        if found.set_aside is None:
            self._present |= {(s.owner, s.session_id) for s in found.sessions}
            return
        self.set_aside, self.set_aside_cause = found.set_aside, found.cause
        log.error(
            "journal.set_aside",
            path=str(self._file.path),
            moved_to=str(found.set_aside),
            cause=found.cause,
            sessions_read=len(found.sessions),
        )
        self._report_change()

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await anyio.to_thread.run_sync(work, limiter=self._thread)

    def open_recording(
        self, session: RecordedSession, key: SessionKey, *, found: bool = False
    ) -> Recording:
        """Return the recording of a session; with *found*, `open_file` returned it."""
        if self._refused:
            return Recording(durable=False)
        present = found and key in self._present
        recording = self._recordings[key] = Recording(session, key, self, present=present)
        if found and not present:
            self.note_change(recording)
        return recording

    def add_recording(self, recording: Recording) -> None:
        """Write a recording that was made elsewhere, unless the journal is refused."""
        if self._refused:
            recording.give_up()
        else:
            self._recordings[recording.key] = recording

    def withdraw(self, recording: Recording) -> None:
        """Stop writing a recording whose owner has given up."""
        self._changed.pop(recording, None)
        if self._recordings.get(recording.key) is recording:
            del self._recordings[recording.key]

    @property
    def is_refused(self) -> bool:
        """Whether nothing is written, because a newer version wrote the file."""
        return self._refused

    @property
    def status(self) -> dict[str, Any]:
        """The journal's part of `stats`."""
        state = "refused" if self._refused else "failing" if self.cause else "written"
        return {
            "state": state,
            "cause": self.cause,
            "sessions": len(self._present),
            "moved_to": None if self.set_aside is None else str(self.set_aside),
        }

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest unwritten change was noted, or 0 if all is written."""
        since = self._writing_at or self._noted_at
        return 0.0 if since is None else time.monotonic() - since

    # Changes of recordings.

    def note_change(self, recording: Recording, tokens: int = 0, *, urgent: bool = False) -> None:
        """Note a change of a session; *tokens* of a turn are new."""
        if recording not in self._changed:  # it is, for most tokens of a turn
            if self._recordings.get(recording.key) is not recording:
                return  # the session was deleted
            if self._noted_at is None:
                self._noted_at = time.monotonic()
            self._changed[recording] = None
            self._wake.set()
        self._tokens += tokens
        if urgent or self._tokens >= GROUP_TOKENS:
            self._urgent.set()

    def is_written(self, recording: Recording) -> bool:
        """Return whether the file has all noted changes of a session."""
        return self.cause is None and recording not in self._changed

    async def wait_written(self, recording: Recording) -> None:
        """Wait until a session's noted changes are written, or writing them has failed."""
        changed = recording in self._changed
        if changed:
            self._urgent.set()
        await self._wait_for_flush(self._begun + changed)

    async def _wait_for_flush(self, number: int) -> None:
        while self._done < number and not self._closed:
            await self._flushed.wait()

    async def erase_session(self, owner: Owner, session_id: str) -> None:
        """Delete a session's rows, and stop writing it.

        :raises BackendError: they cannot be deleted; the journal tries again until they are.
        """
        key = owner, session_id
        recording = self._recordings.pop(key, None)
        if recording is not None:
            recording.erased()
            self._changed.pop(recording, None)
        file = self._file
        may_have = key in self._present or (not file.is_open and file.path.exists())
        if self._refused or not may_have:
            return
        self._erasing[key] = None
        self._wake.set()
        self._urgent.set()
        await self._wait_for_flush(self._begun + 1)
        if key in self._erasing:
            raise BackendError(
                f"the journal cannot be written: {self.cause or 'it is closed'}",
                hint="the session's rows are deleted as soon as the journal can be written again",
            )

    # Usage.

    def note_usage(self) -> None:
        """Write the usage now."""
        self._wake.set()
        self._urgent.set()

    async def wait_usage(self) -> None:
        """Wait until the usage of ended requests is written, or writing it has failed."""
        if self._usage is None or self._refused:
            return
        if self._usage.has_ended:
            self.note_usage()
            self._usage_flush = self._begun + 1
        await self._wait_for_flush(self._usage_flush)

    async def read_usage(self, query: UsageQuery, groups_max: int) -> dict[Group, Sum]:
        """Return the sums of usage, with what is not yet written. Some more than *groups_max* mean
        that there are more.

        :raises BackendError: the file cannot be read.
        """
        if self._usage is None:
            return {}
        async with self._lock:  # no row is being written meanwhile
            read = partial(read_sums, query=query, groups_max=groups_max + 1)
            try:
                sums = await self._in_thread(partial(self._file.read, read))
            except sqlite3.Error as exc:
                raise BackendError(
                    f"the journal, which has the usage, cannot be read: {exc}",
                    hint="free space on the disk of state-dir, or let the daemon's user read it",
                ) from exc
            self._usage.count_turns()
            return add_rows(sums, self._usage.unwritten_rows(), query)

    def _take_usage(self) -> list[ChangeUsage]:
        if self._usage is None or self._refused or self._closed:
            return []
        if self._usage.has_ended:
            self._usage_flush = self._begun
        rows = self._usage.take_rows()
        before = self._usage.expired_before(self._dates.now())
        return [] if not rows and before is None else [ChangeUsage(rows=rows, before=before)]

    def _return_usage(self, changes: Sequence[ChangeUsage]) -> None:
        if self._usage is not None:
            rows: list[UsageRow] = [row for change in changes for row in change.rows]
            self._usage.return_rows(rows)

    # Writing.

    async def run(self) -> None:
        """Write changes as they are noted, until cancelled."""
        while True:
            await self._wake.wait()
            with anyio.move_on_after(RETRY_S if self.cause else GROUP_S):
                await self._urgent.wait()
            await self._flush()

    async def close(self) -> None:
        """Write the pending changes and close the file."""
        await self._flush()
        if self._changed and not self._refused:
            log.error("journal.lost", sessions=len(self._changed), cause=self.cause)
        self._closed = True
        self._flushed.set()
        await self._in_thread(self._file.close)

    async def _flush(self) -> None:
        async with self._lock:
            self._begun += 1
            self._wake, self._urgent, self._tokens = anyio.Event(), anyio.Event(), 0
            self._writing_at, self._noted_at = self._noted_at, None
            recordings, erasing = list(self._changed), list(self._erasing)
            deletions, self._deletions = self._deletions, {}
            self._changed.clear()
            usage = self._take_usage()  # in the same step as the changes of sessions
            try:
                changes: list[Change | ChangeUsage] = [
                    SaveDeletions(owner=owner, data=pack()) for owner, pack in deletions.items()
                ]
                changes += self._changes(recordings, erasing)
                changes += usage
                if changes and not self._closed:
                    with anyio.CancelScope(shield=True):  # its result must be noted
                        await self._in_thread(partial(self._write, changes))
            except Exception as exc:  # sessions go on without a journal after any error
                self._deletions = deletions | self._deletions
                self._return_usage(usage)
                self._failed(recordings, exc)
            else:
                self._wrote(erasing, bool(changes))
            self._writing_at = None
            self._done = self._begun
            flushed, self._flushed = self._flushed, anyio.Event()
            flushed.set()

    def _changes(
        self, recordings: Sequence[Recording], erasing: Sequence[SessionKey]
    ) -> list[Change]:
        changes: list[Change] = [Erase(owner=owner, session_id=name) for owner, name in erasing]
        at = self._dates.now()
        for recording in recordings:
            try:
                changes += recording.take_changes(at)
            except (msgspec.MsgspecError, OverflowError, TypeError) as exc:
                # One session must not keep the others from being written.
                log.error("session.not_stored", session=recording.key[1], cause=str(exc))
                self._recordings.pop(recording.key)
                recording.give_up()
                continue
            self._present.add(recording.key)
        return changes

    def _wrote(self, erased: Sequence[SessionKey], anything: bool) -> None:
        for key in erased:
            self._erasing.pop(key, None)
            if key not in self._recordings:
                self._present.discard(key)
        if anything and self.cause is not None:
            self.cause = None
            log.info("journal.recovered", path=str(self._file.path))
            self._report_change()

    def _failed(self, recordings: Sequence[Recording], error: Exception) -> None:
        """Note a failed write, and mark its whole batch to be written again."""
        if isinstance(error, sqlite3.Error) and damaged(error):
            recordings = list(self._recordings.values())
        for recording in recordings:
            if self._recordings.get(recording.key) is recording:
                recording.write_again()
                self._changed[recording] = None
                # `note_change` relies on this: while there are changes, there is the time.
                self._noted_at = self._writing_at or self._noted_at or time.monotonic()
        self._wake.set()
        if self.cause is None:
            expected = isinstance(error, OSError | sqlite3.Error | NewerJournal)
            log.error(
                "journal.not_written",
                path=str(self._file.path),
                cause=str(error),
                exc_info=None if expected else error,
            )
        self.cause = str(error) or repr(error)
        self._report_change()

    # In the thread.

    def _open(self) -> tuple[Found, StoredUsage | None]:
        found, usage = self._file.open(), self._usage
        if usage is None:
            return found, None
        try:
            read = partial(read_stored, hour=usage.hour, day=usage.first_day)
            return found, self._file.read(read)
        except sqlite3.Error as exc:  # sessions can be read all the same
            log.error("usage.not_read", path=str(self._file.path), cause=str(exc))
            return found, None

    def _write(self, changes: Sequence[Change | ChangeUsage]) -> None:
        if not self._file.is_open:
            anyio.from_thread.run_sync(self._note_found, *self._open())
        try:
            self._file.write(changes)
        except sqlite3.Error as exc:
            if damaged(exc):
                self._file.close()  # the next write opens it, which sets it aside
            raise


def write_error(journal: Journal | None) -> BackendError:
    """Return the error for a change that could not be written; *journal* is None if it is off."""
    cause = None if journal is None else journal.cause
    return BackendError(
        f"the journal cannot be written: {cause or 'it is closed'}",
        hint="free space on the disk of state-dir, or let the daemon's user write there",
    )
