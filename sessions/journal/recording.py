"""The recording of a session: the part that the journal has, and the pending changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...scheduler import Owner
from ...scheduler import messages as m
from ...scheduler.messages import pack_floats, pack_tokens
from ..turn import TokensSink, Turn
from .entries import SessionFacts, TurnBegin, TurnPiece, encode
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
    if the journal is refused. *present*: the file has the session's present state.
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
        self._facts, self._past = False, not present
        self._turn: Turn | None = None
        self._begin = TurnBegin()
        self._written = _Written()

    @property
    def durable(self) -> bool | None:
        """Whether the session's answers are written; None: they are not meant to be."""
        return self._durable if self._journal is None else self._journal.cause is None

    def facts_changed(self) -> None:
        """Note a change of settings: it is written before the answer."""
        self._facts = True
        self._note_change(urgent=True)

    def history_changed(self) -> None:
        """Note a new history without a turn on it: it is written before the answer."""
        self._past, self._turn = True, None
        self._note_change(urgent=True)

    def turn_began(self, turn: Turn, begin: TurnBegin, shifts: Sequence[Shift] = ()) -> None:
        """Note a turn that begins on the present history, or continues after *shifts*. It is
        written with the next group.
        """
        if self._journal is not None:
            self._turn, self._begin = turn, begin
            self.shifts, self._written = list(shifts), _Written()
            self._note_change()

    def history_restored(
        self, turn: Turn | None, begin: TurnBegin, shifts: Sequence[Shift]
    ) -> None:
        """Note that an earlier history was restored, with its last *turn*: both are written before
        the answer.
        """
        self.history_changed()
        if turn is not None and turn.generates:
            self.turn_began(turn, begin, shifts)

    def watch_tokens(self, sink: TokensSink | None) -> TokensSink | None:
        """Return a sink for a turn's tokens that notes them and passes them on to *sink*."""
        if self._journal is None:
            return sink

        def note_tokens(report: m.Tokens) -> None:
            if (turn := self._turn) is not None:
                if len(turn.shifts) > len(self.shifts):
                    self._note_shifts(turn, len(turn.tokens) - len(report.tokens))
                self._note_change(len(report.tokens))
            if sink is not None:
                sink(report)

        return note_tokens

    def _note_change(self, tokens: int = 0, *, urgent: bool = False) -> None:
        if self._journal is not None:
            self._journal.note_change(self, tokens, urgent=urgent)

    def _note_shifts(self, turn: Turn, at: int) -> None:
        """Note the new shifts, which came after *at* tokens of the turn."""
        self.shifts += [(at, *shift) for shift in turn.shifts[len(self.shifts) :]]

    def turn_ended(self) -> None:
        """Note the end of the turn: it is written before the answer."""
        if self._turn is not None:
            self._note_shifts(self._turn, len(self._turn.tokens))
            self._note_change(urgent=True)

    async def wait_written(self) -> None:
        """Wait until all noted changes are written, or writing them has failed."""
        if self._journal is not None:
            await self._journal.wait_written(self)

    # Called by the journal as it writes.

    def give_up(self) -> None:
        """Store nothing more: the session has a value that cannot be stored."""
        self._journal, self._durable = None, False

    def write_again(self) -> None:
        """Have the whole session written again, after a failed write."""
        self._past, self._written = True, _Written()

    def take_changes(self, at: float) -> list[Change]:
        """Return the pending changes; from now on they count as written."""
        assert self._session is not None, "a recording without a session has no journal"
        key: dict[str, Any] = {"owner": self.key[0], "session_id": self.key[1]}
        changes: list[Change] = []
        if self._past or self._facts:
            facts = encode(self._session.facts)
            if self._past:
                changes.append(SavePast(**key, facts=facts, past=self._session.packed, at=at))
            else:
                changes.append(SaveFacts(**key, facts=facts, at=at))
            self._past = self._facts = False
        if (piece := self._next_piece()) is not None:
            changes.append(SavePiece(**key, number=self._written.pieces, data=encode(piece)))
            self._written.pieces += 1
        return changes

    def _next_piece(self) -> TurnPiece | None:
        """Return the turn's output since the last piece; None: there is none."""
        turn, done = self._turn, self._written
        if turn is None or done.end:
            return None
        end = None if turn.error is None else turn.error.name
        end = end if turn.stats is None else turn.stats.stop_reason
        piece = TurnPiece(
            tokens=pack_tokens(turn.tokens[done.tokens :]),
            text=bytes(turn.text[done.text :]),
            surprisals=pack_floats(turn.surprisals[done.surprisals :]),
            shifts=tuple(self.shifts[done.shifts :]),
            begin=None if done.pieces else self._begin,
            end=end,
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
