"""The recording of a session: the part that the journal has, and the pending changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...scheduler import Owner
from ...scheduler import messages as m
from ...scheduler.messages import pack_floats, pack_tokens
from ..turn import TokensSink, Turn
from .entries import CopyChange, SessionFacts, TurnBegin, TurnEnd, TurnPiece, encode
from .journal_file import Change, SaveFacts, SavePast, SavePiece

Shift = tuple[int, int, int]
"""Tokens of the turn before the shift; tokens of the history kept, then dropped."""
SessionKey = tuple[Owner, str]
"""A session's owner and id."""
NO_KEY: SessionKey = (Owner(0), "")


class RecordingWriter(Protocol):
    """The part of the journal that recordings use."""

    cause: str | None

    def note_change(self, recording: Recording, tokens: int = 0, *, urgent: bool = False) -> None:
        """Note a change of a session; *tokens* of a turn are new."""

    async def wait_written(self, recording: Recording) -> None:
        """Wait until a session's changes are written, or writing them has failed."""


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
        journal: RecordingWriter | None = None,
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
        """Whether a copier gets its changes."""
        return self._copier is not None

    @property
    def is_stored(self) -> bool:
        """Whether the session is written at all."""
        return self._journal is not None

    @property
    def model(self) -> str:
        """The name of the session's model."""
        return "" if self._session is None else self._session.facts.model

    def take_copy(self, *, whole: bool = False) -> CopyChange:
        """Return the changes since the last call, or the *whole* session; from now on they count as
        sent to the copier.
        """
        progress = _Progress(past=True) if whole or self._copied is None else self._copied
        if self._copied is not None:
            self._copied = progress
        facts, past, piece = self._take(progress)
        return CopyChange(facts=facts, past=past, piece=None if piece is None else piece[1])

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
