"""Stored values of a session: its facts, its history, its last turn.

Each value is stored, even if it equals its default: a later change of a default changes no session
that is stored already. Priorities are stored by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ...backends import Rendering
from ...backends.errors import InvalidArgument
from ...scheduler import PRIORITIES, Priority
from ...scheduler.messages import pack_tokens, unpack_floats, unpack_tokens
from ...scheduler.output.stopping import cuts_text


class _WithPriority(msgspec.Struct, frozen=True, kw_only=True):
    priority: str = Priority.NORMAL.label

    def __post_init__(self) -> None:
        """Refuse a name that this version does not know; decoding turns it into its own error."""
        if self.priority not in PRIORITIES:
            raise ValueError(f"unknown priority {self.priority!r}")


class SessionFacts(_WithPriority, frozen=True, kw_only=True):
    """Settings and counts of a session between its turns. *vocabulary* is the hash of its model's
    vocabulary; *tokens* is the length of its history, with the output of an interrupted turn.
    """

    model: str
    fingerprint: str = ""
    vocabulary: str = ""
    options: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    turns: int = 0
    tokens: int = 0


class TurnBegin(_WithPriority, frozen=True, kw_only=True):
    """The beginning of a turn: its own options, its seed, its class. *turns* counts the session's
    turns up to this one.
    """

    options: dict[str, Any] = {}
    seed: int = 0
    special: bool = False
    turns: int = 0


class TurnPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's output since the previous piece. The first piece has its *begin*, the last one its
    *end*: a stop reason, or the name of an error.

    *tokens* and *surprisals* are packed; *shifts* are (tokens of the turn before, kept, dropped).
    """

    tokens: bytes = b""
    text: bytes = b""
    surprisals: bytes = b""
    shifts: tuple[tuple[int, int, int], ...] = ()
    begin: TurnBegin | None = None
    end: str | None = None


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A `History`. *tokens* are packed; *marks* are pairs of tokens and messages; *unfinished* is
    the output of a turn on it that has not ended.
    """

    tokens: bytes = b""
    messages: list[dict[str, Any]] = []
    marks: list[tuple[int, int]] = []
    rendered: str | None = None
    loose: bool = False
    open: bool = False
    shifted: bool = False
    rendering: Rendering = Rendering()
    unfinished: TurnPiece | None = None


@dataclass(frozen=True)
class Replay:
    """A turn put together from its pieces, on the prompt that it had; `History.after` takes it."""

    prompt: Sequence[int]
    pieces: Sequence[TurnPiece]
    generates = True
    """Embedding turns are not stored."""

    @cached_property
    def text(self) -> bytes:
        """The turn's text."""
        return b"".join(piece.text for piece in self.pieces)

    @property
    def surprisals(self) -> list[float]:
        """The surprisal of each token, as far as it is known."""
        return unpack_floats(b"".join(piece.surprisals for piece in self.pieces))

    @property
    def placed_shifts(self) -> list[tuple[int, int, int]]:
        """The context shifts: tokens of the turn so far, kept, dropped."""
        return [shift for piece in self.pieces for shift in piece.shifts]

    @property
    def shifts(self) -> list[tuple[int, int]]:
        """The context shifts: tokens kept, then dropped."""
        return [(keep, discard) for _, keep, discard in self.placed_shifts]

    @property
    def stopped_by_text(self) -> bool:
        """Whether the answer's text was cut, while its tokens are complete."""
        return bool(self.pieces) and cuts_text(self.pieces[-1].end)

    @property
    def tokens(self) -> list[int]:
        """The turn's output tokens."""
        return unpack_tokens(b"".join(piece.tokens for piece in self.pieces))

    @property
    def begin(self) -> TurnBegin:
        """The turn's beginning."""
        return self.pieces[0].begin or TurnBegin()

    @property
    def interrupted(self) -> TurnPiece | None:
        """The whole output as one piece; None: the turn has ended."""
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
        """Return the turn with the output that its reader has beyond the stored one.

        :raises InvalidArgument: the reader's output differs.
        """
        own = self.tokens
        if not _share_prefix(own, list(tokens)) or not _share_prefix(self.text, text):
            raise InvalidArgument(
                "tokens or text differ from those that the interrupted turn sent",
                hint="give all its tokens and text from the start, as its events had them",
                data={"tokens": len(own)},
            )
        rest = TurnPiece(tokens=pack_tokens(tokens[len(own) :]), text=text[len(self.text) :])
        return Replay(self.prompt, (*self.pieces, rest))

    def history(self) -> list[int]:
        """Return the token ids of prompt and output, less those that shifts dropped."""
        ids, output, done = list(self.prompt), self.tokens, 0
        for at, keep, discard in self.placed_shifts:
            ids += output[done:at]
            done = at
            del ids[keep : keep + discard]
        return ids + output[done:]


def _share_prefix(a: Sequence[int], b: Sequence[int]) -> bool:
    return a[: len(b)] == b[: len(a)]


@dataclass(frozen=True)
class StoredSession:
    """A session in the journal. *at* is when it was last written, in seconds since 1970."""

    owner: int
    session_id: str
    at: float
    facts: SessionFacts
    past: bytes
    pieces: tuple[TurnPiece, ...] = ()


encode = msgspec.msgpack.Encoder().encode
decode_history = msgspec.msgpack.Decoder(HistoryEntry).decode
