"""A session's past, awake or asleep: the history up to the turn, and a turn that has no end."""

from __future__ import annotations

from ...scheduler.messages import unpack_tokens
from ..journal.entries import PastEntry, Piece, Replay, Stored, decode_past, encode
from ..turn import Turn
from .history import History, packed_past

__all__ = ("Past",)


class Past:
    """Owned by its session. `now` is the history up to the turn. `interrupted` is the turn that it
    ends with, if that has no end: it began on the history `before`. Asleep, all of it is packed.
    """

    def __init__(self, history: History | None = None) -> None:
        self.interrupted: Replay | None = None
        self.now = self.before = history or History()
        self._packed: bytes | None = None
        self._tokens = 0

    @classmethod
    def stored(cls, stored: Stored) -> Past:
        """Return the sleeping past that lies in the journal."""
        new = cls()
        new._packed = packed_past(stored)
        told = sum(len(unpack_tokens(piece.tokens)) for piece in stored.pieces)
        dropped = sum(discard for piece in stored.pieces for *_, discard in piece.shifts)
        new._tokens = stored.facts.tokens + told - dropped
        return new

    def set(self, history: History) -> None:
        """Be another history, that ends with no interrupted turn."""
        self.now = self.before = history
        self.interrupted = None

    @property
    def asleep_tokens(self) -> int | None:
        """The tokens of a sleeping past; None: it is awake."""
        return None if self._packed is None else self._tokens

    @property
    def packed(self) -> bytes:
        """The past, as the journal keeps it."""
        return self._packed or encode(self._entry())

    def _entry(self) -> PastEntry:
        if self.interrupted is None:
            return self.now.entry()
        return self.before.entry(self.interrupted.interrupted)

    def pack(self, turn: Turn | None, told: Piece | None) -> None:
        """Pack it, with *turn*, or with what a turn without an end has *told*."""
        if told is not None:
            self._packed = encode(self.now.entry(told))
        elif turn is None:
            self._packed = self.packed  # a turn that was interrupted before stays so
        else:
            self._packed = encode(self.now.after(turn).entry())

    def sleep(self) -> None:
        """Keep of the past what was packed."""
        self._tokens = len(self.now.prompt)
        self.now = self.before = History()

    def wake(self) -> None:
        """Be what was packed."""
        entry = decode_past(self.packed)
        self.now, self._packed = History.of(entry), None
        if entry.told is not None:
            self.before = self.now
            self.interrupted = Replay(self.before.prompt, (entry.told,))
            self.now = self.before.after(self.interrupted)
