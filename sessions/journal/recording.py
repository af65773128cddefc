"""Recordings: how much of each session is written, and what is to be written next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ...scheduler import messages as m
from ...scheduler.messages import pack_floats, pack_tokens
from ..turn import TokensSink, Turn
from .entries import SessionFacts, TurnBegin, TurnPiece, encode
from .journal_file import Change, SaveFacts, SavePast, SavePiece

Shift = tuple[int, int, int]
"""After how many tokens of the turn; how many tokens of the history were kept, and then dropped."""
SessionKey = tuple[int, str]
"""A session's owner and id."""


class RecordingWriter(Protocol):
    """The journal, as recordings need it."""

    cause: str | None

    def note_change(self, recording: Recording, tokens: int = 0, *, urgent: bool = False) -> None:
        """Note that a session has something to be written, *tokens* of a turn among it."""

    async def wait_written(self, recording: Recording) -> None:
        """Wait until the noted changes of a session are written, or cannot be."""


class RecordedSession(Protocol):
    """A session, as the journal sees it."""

    @property
    def facts(self) -> SessionFacts:
        """What holds for it now."""

    @property
    def packed(self) -> bytes:
        """Its past, up to the turn: a `PastEntry` in msgpack."""


class NoRecording:
    """The line of a session of which nothing is written down. *durable* is what its metadata say:
    None, or False where it should be and cannot.
    """

    def __init__(self, durable: bool | None = None):
        self._durable = durable

    @property
    def durable(self) -> bool | None:
        """Tell whether what the session has answered is written down; None: it is not to be."""
        return self._durable

    def facts_changed(self) -> None:
        """Note that parameters or the like have changed."""

    def history_changed(self) -> None:
        """Note that the past is another one, and no turn on it has begun."""

    def turn_began(self, turn: Turn, begin: TurnBegin, shifts: Sequence[Shift] = ()) -> None:
        """Note that a turn begins on the past as it stands, or goes on after such *shifts*."""

    def watch_tokens(self, sink: TokensSink | None) -> TokensSink | None:
        """Return what a turn is to tell its tokens to, where its reader has *sink*."""
        return sink

    def turn_ended(self) -> None:
        """Note that the turn has ended."""

    @property
    def shifts(self) -> Sequence[Shift]:
        """The turn's context shifts."""
        return ()

    async def wait_written(self) -> None:
        """Wait until what was noted is written, or cannot be."""


class Recording(NoRecording):
    """One session's line to the journal, and how much of it is written.

    *present*: it is in the journal as it stands.
    """

    def __init__(
        self,
        journal: RecordingWriter,
        key: SessionKey,
        session: RecordedSession,
        *,
        present: bool = False,
    ):
        super().__init__()
        self.key = key
        self._journal, self._session = journal, session
        self._facts, self._past = False, not present
        self._turn: Turn | None = None
        self._begin = TurnBegin()
        self._shifts: list[Shift] = []
        self._written = _Written()

    @property
    def durable(self) -> bool | None:
        """Tell whether what the session has answered is written down."""
        return self._journal.cause is None

    def facts_changed(self) -> None:
        """Note that parameters or the like have changed: written before the answer."""
        self._facts = True
        self._journal.note_change(self, urgent=True)

    def history_changed(self) -> None:
        """Note that the past is another one: written before the answer."""
        self._past, self._turn = True, None
        self._journal.note_change(self, urgent=True)

    def turn_began(self, turn: Turn, begin: TurnBegin, shifts: Sequence[Shift] = ()) -> None:
        """Note that a turn begins: written some time soon."""
        self._turn, self._begin = turn, begin
        self._shifts, self._written = list(shifts), _Written()
        self._journal.note_change(self)

    def watch_tokens(self, sink: TokensSink | None) -> TokensSink:
        """Return what a turn is to tell its tokens to."""
        note = self._tokens_sent
        if sink is None:
            return note

        def both(report: m.Tokens) -> None:
            note(report)
            sink(report)

        return both

    def _tokens_sent(self, report: m.Tokens) -> None:
        turn = self._turn
        if turn is not None:
            if len(turn.shifts) > len(self._shifts):
                self._note_shifts(turn, len(turn.tokens) - len(report.tokens))
            self._journal.note_change(self, len(report.tokens))

    def _note_shifts(self, turn: Turn, at: int) -> None:
        """Note the shifts that have come since, after *at* tokens of the turn."""
        self._shifts += [(at, *shift) for shift in turn.shifts[len(self._shifts) :]]

    def turn_ended(self) -> None:
        """Note that the turn has ended: written before the answer."""
        if self._turn is not None:
            self._note_shifts(self._turn, len(self._turn.tokens))
            self._journal.note_change(self, urgent=True)

    @property
    def shifts(self) -> Sequence[Shift]:
        """The turn's context shifts."""
        return self._shifts

    async def wait_written(self) -> None:
        """Wait until what was noted is written, or cannot be."""
        await self._journal.wait_written(self)

    # What the journal asks when it writes.

    def write_again(self) -> None:
        """Have everything written again: what was taken was not."""
        self._past, self._written = True, _Written()

    def take_changes(self, at: float) -> list[Change]:
        """Return what is to be written as of now; it counts as written then."""
        owner, session_id = self.key
        changes: list[Change] = []
        if self._past or self._facts:
            facts = encode(self._session.facts)
            if self._past:
                past = self._session.packed
                saved: Change = SavePast(
                    owner=owner, session_id=session_id, facts=facts, past=past, at=at
                )
            else:
                saved = SaveFacts(owner=owner, session_id=session_id, facts=facts, at=at)
            changes.append(saved)
            self._past = self._facts = False
        if (piece := self._piece()) is not None:
            number, data = self._written.pieces, encode(piece)
            changes.append(SavePiece(owner=owner, session_id=session_id, number=number, data=data))
            self._written.pieces += 1
        return changes

    def _piece(self) -> TurnPiece | None:
        """Return what the turn has told since the last piece, if there is something."""
        turn, done = self._turn, self._written
        if turn is None or done.end:
            return None
        piece = TurnPiece(
            tokens=pack_tokens(turn.tokens[done.tokens :]),
            text=bytes(turn.text[done.text :]),
            surprisals=pack_floats(turn.surprisals[done.surprisals :]),
            shifts=tuple(self._shifts[done.shifts :]),
            begin=None if done.pieces else self._begin,
            end=_end_of(turn),
        )
        done.tokens, done.text, done.shifts = len(turn.tokens), len(turn.text), len(self._shifts)
        done.surprisals = len(turn.surprisals)
        done.end = piece.end is not None
        told = piece.tokens or piece.text or piece.shifts or piece.begin or done.end
        return piece if told else None


@dataclass(slots=True)
class _Written:
    """How much of a turn is written."""

    pieces: int = 0
    tokens: int = 0
    text: int = 0
    surprisals: int = 0
    shifts: int = 0
    end: bool = False


def _end_of(turn: Turn) -> str | None:
    if turn.stats is not None:
        return turn.stats.stop_reason
    return None if turn.error is None else turn.error.name
