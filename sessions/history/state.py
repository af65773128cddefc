"""A session's history, active or dormant, and its last turn, while that can be resumed."""

from __future__ import annotations

from ...scheduler.messages import unpack_tokens
from ..journal.entries import (
    Replay,
    StoredSession,
    TurnPiece,
    decode_history,
    encode,
    resumable_of,
)
from ..turn import Turn
from .history import History, packed_history


class HistoryState:
    """The history of a session, which owns this. `now` is the history up to the turn under way. If
    it ends with a `resumable` turn, whose reader may not have all of it, that turn began on the
    history `before`. A dormant session has only the packed form.
    """

    def __init__(self, history: History | None = None) -> None:
        self.resumable: Replay | None = None
        self.now = self.before = history or History()
        self._packed: bytes | None = None
        self._tokens = 0
        self._interrupted = False

    @classmethod
    def from_stored(cls, stored: StoredSession) -> HistoryState:
        """Return the dormant history of a session in the journal."""
        new = cls()
        new._packed = packed_history(stored)
        output = sum(len(unpack_tokens(piece.tokens)) for piece in stored.pieces)
        dropped = sum(discard for piece in stored.pieces for *_, discard in piece.shifts)
        new._tokens = stored.facts.tokens + output - dropped
        last = stored.pieces[-1] if stored.pieces else resumable_of(stored.past)
        new._interrupted = last is not None and last.end is None
        return new

    def replace_history(self, history: History) -> None:
        """Replace the history by one without a resumable turn."""
        self.now = self.before = history
        self.resumable = None

    @property
    def interrupted(self) -> bool:
        """Whether the last turn was interrupted, also of a dormant session."""
        if self._packed is not None:
            return self._interrupted
        return self.resumable is not None and not self.resumable.ended

    @property
    def dormant_tokens(self) -> int | None:
        """The length of a dormant history, or None if the session is active."""
        return None if self._packed is None else self._tokens

    @property
    def packed(self) -> bytes:
        """The history, as the journal stores it."""
        if self._packed is None and self.resumable is not None:
            return encode(self.before.entry(self.resumable.whole))
        return self._packed or encode(self.now.entry())

    @property
    def kept_bytes(self) -> int:
        """The memory that it takes."""
        total = len(self._packed or b"") + self.now.kept_bytes
        if self.before is not self.now:
            total += self.before.kept_bytes
        return total if self.resumable is None else total + self.resumable.kept_bytes

    def pack(self, turn: Turn | None, resumable: TurnPiece | None) -> None:
        """Pack the history with *turn*; *resumable* is its whole output, if it can be resumed."""
        if resumable is not None:
            self._interrupted = resumable.end is None
            self._packed = encode(self.now.entry(resumable))
        elif turn is None:
            self._interrupted = self.interrupted
            self._packed = self.packed  # an earlier turn stays resumable
        else:
            self._interrupted = False
            self._packed = encode(self.now.after(turn).entry())

    def make_dormant(self) -> None:
        """Keep only the packed history."""
        self._tokens = len(self.now.prompt)
        self.now = self.before = History()
        self.resumable = None  # the packed history has it

    def unpacked_history(self) -> History:
        """Return the history of a dormant session, which stays packed."""
        state = HistoryState()
        state._packed = self.packed
        state.activate()
        return state.now

    def activate(self) -> None:
        """Unpack the history."""
        entry = decode_history(self.packed)
        self.now, self._packed = History.from_entry(entry), None
        if entry.resumable is not None:
            self.before = self.now
            self.resumable = Replay(self.before.prompt, (entry.resumable,))
            self.now = self.before.after(self.resumable)
        else:
            self.now = self.now.copy()  # without the notes on its last turn
