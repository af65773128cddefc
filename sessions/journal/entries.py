"""Stored values of a session: its facts, its history, its last turn.

Each value is stored, equal to its default or not: a default that changes later changes no session
that was stored before. Priorities are stored by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ...backends import Rendering
from ...backends.errors import InvalidArgument
from ...scheduler import Priority
from ...scheduler.messages import pack_tokens, unpack_floats, unpack_tokens
from ...scheduler.output.stopping import cuts_text


class SessionFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a session between its turns. *vocabulary* is a hash of its model's tokens,
    *tokens* counts those of its past, with what an interrupted turn told.
    """

    model: str
    fingerprint: str = ""
    vocabulary: str = ""
    options: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    priority: str = Priority.NORMAL.label
    turns: int = 0
    tokens: int = 0


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A `History`; *tokens* are packed, *marks* are pairs of tokens and messages. *told* is what a
    turn on it has told, if that has no end.
    """

    tokens: bytes = b""
    messages: list[dict[str, Any]] = []
    marks: list[tuple[int, int]] = []
    rendered: str | None = None
    loose: bool = False
    open: bool = False
    shifted: bool = False
    rendering: Rendering = Rendering()
    told: TurnPiece | None = None


class TurnBegin(msgspec.Struct, frozen=True, kw_only=True):
    """How a turn began: its own options, the seed that was drawn, its class; *turns* counts the
    session's turns, this one among them.
    """

    options: dict[str, Any] = {}
    seed: int = 0
    priority: str = Priority.NORMAL.label
    special: bool = False
    turns: int = 0


class TurnPiece(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn has told since the piece before. The first one says how it began, the last one
    how it ended: by a stop reason, or the name of an error.

    *tokens* and *surprisals* are packed; *shifts* are (tokens of the turn so far, kept, dropped).
    """

    tokens: bytes = b""
    text: bytes = b""
    surprisals: bytes = b""
    shifts: tuple[tuple[int, int, int], ...] = ()
    begin: TurnBegin | None = None
    end: str | None = None


@dataclass(frozen=True)
class Replay:
    """A turn as its pieces tell it, on the prompt that it had: what `History.after` takes."""

    prompt: Sequence[int]
    pieces: Sequence[TurnPiece]
    says = True
    """A turn that makes an embedding is not written down."""

    @cached_property
    def text(self) -> bytes:
        """What the turn has said."""
        return b"".join(piece.text for piece in self.pieces)

    @property
    def surprisals(self) -> list[float]:
        """How unlikely the tokens were, as far as that is known."""
        return unpack_floats(b"".join(piece.surprisals for piece in self.pieces))

    @property
    def placed_shifts(self) -> list[tuple[int, int, int]]:
        """The context shifts: after how many tokens of the turn, kept, dropped."""
        return [shift for piece in self.pieces for shift in piece.shifts]

    @property
    def shifts(self) -> list[tuple[int, int]]:
        """The context shifts: tokens kept, then dropped."""
        return [(keep, discard) for _, keep, discard in self.placed_shifts]

    @property
    def stopped_by_text(self) -> bool:
        """Tell whether text was cut from the answer whose tokens are still there."""
        return bool(self.pieces) and cuts_text(self.pieces[-1].end)

    @property
    def tokens(self) -> list[int]:
        """The token ids that the turn has told."""
        return unpack_tokens(b"".join(piece.tokens for piece in self.pieces))

    @property
    def begin(self) -> TurnBegin:
        """How the turn began."""
        return self.pieces[0].begin or TurnBegin()

    @property
    def interrupted(self) -> TurnPiece | None:
        """All that the turn has told, if it has not ended."""
        if not self.pieces or self.pieces[-1].end is not None:
            return None
        return TurnPiece(
            tokens=b"".join(piece.tokens for piece in self.pieces),
            text=self.text,
            surprisals=b"".join(piece.surprisals for piece in self.pieces),
            shifts=tuple(self.placed_shifts),
            begin=self.begin,
        )

    def extended(self, tokens: Sequence[int], text: bytes) -> Replay:
        """Return the turn with what its reader has of it beyond this.

        :raises InvalidArgument: the reader has something else.
        """
        mine = self.tokens
        if not _alike(mine, list(tokens)) or not _alike(self.text, text):
            raise InvalidArgument(
                "that is not what the interrupted turn has told",
                hint="give all its tokens and text from the start, as its events told them",
                data={"tokens": len(mine)},
            )
        rest = TurnPiece(tokens=pack_tokens(tokens[len(mine) :]), text=text[len(self.text) :])
        return Replay(self.prompt, (*self.pieces, rest))

    def history(self) -> list[int]:
        """Return the token ids of the prompt and of what was told, less what shifts dropped."""
        ids, told, done = list(self.prompt), self.tokens, 0
        for at, keep, discard in self.placed_shifts:
            ids += told[done:at]
            done = at
            del ids[keep : keep + discard]
        return ids + told[done:]


def _alike(a: Sequence[int], b: Sequence[int]) -> bool:
    """Tell whether one begins with the other."""
    return a[: len(b)] == b[: len(a)]


@dataclass(frozen=True)
class StoredSession:
    """A session as it lies in the journal. *at* is when it was last written: seconds since 1970."""

    owner: int
    session_id: str
    at: float
    facts: SessionFacts
    past: bytes
    pieces: tuple[TurnPiece, ...] = ()


encode = msgspec.msgpack.Encoder().encode
decode_history = msgspec.msgpack.Decoder(HistoryEntry).decode
