"""Stored values of a session: its facts, its history, its last turn, its date.

Each value is stored, even if it equals its default, so that a later change of a default changes no
session that is stored already. Priorities are stored by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from ..backends import Rendering
from ..backends.errors import InvalidArgument
from ..backends.media import MediaItem
from ..scheduler import PRIORITIES, Owner, Priority
from ..scheduler.messages import pack_tokens, unpack_floats, unpack_tokens
from ..scheduler.stopping import cuts_text
from .answers.calls import NO_TOOLS, ToolUse
from .memory import TOKEN_BYTES, memory_bytes


class _WithPriority(msgspec.Struct, frozen=True, kw_only=True):
    priority: str = Priority.NORMAL.label

    def __post_init__(self) -> None:
        """Refuse a name that this version does not know; decoding turns it into its own error."""
        if self.priority not in PRIORITIES:
            raise ValueError(f"unknown priority {self.priority!r}")


class Transfer(msgspec.Struct, frozen=True):
    """The transfer of a session: *id* is the caller's id for it, *peer* the caller's name of the
    other daemon. The session arrives here, unless it has *departed* or this is a *copy* of it.
    """

    id: str
    peer: str = ""
    departed: bool = False
    copy: bool = False


class SessionFacts(_WithPriority, frozen=True, kw_only=True):
    """Settings and counts of a session between its turns. *vocabulary* is the hash of its model's
    vocabulary; *tokens* is the length of its history, with the output of an interrupted turn.
    *out_of_range* has the reasons why *options* differ from what was requested. *on_behalf_of* is
    the user's name, if a gateway opened the session. *note* is the client's own, and so is *title*.
    *opening* is the beginning of the first message; versions that lack it do not store it. A *kept*
    session is not deleted by itself. One with *undo_s* was deleted when it was last written, and
    can be restored for that many seconds. *media* are the hashes of the images and sounds of its
    history, which the media store keeps for it.
    """

    model: str
    fingerprint: str = ""
    vocabulary: str = ""
    options: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    out_of_range: dict[str, str] = {}
    turns: int = 0
    tokens: int = 0
    on_behalf_of: str = ""
    note: bytes = b""
    title: str = ""
    opening: str | None = None
    kept: bool = False
    undo_s: float = 0.0
    transfer: Transfer | None = None
    media: tuple[bytes, ...] = ()


class TurnBegin(_WithPriority, frozen=True, kw_only=True):
    """The beginning of a turn, with its own options only. *turns* counts the session's turns up to
    this one.
    """

    options: dict[str, Any] = {}
    seed: int = 0
    special: bool = False
    turns: int = 0


class TurnEnd(NamedTuple):
    """The end of a turn as its reader gets it: the stop reason or the name of the error, the packed
    metadata, and the error as it is sent.
    """

    reason: str
    metadata: bytes
    error: Mapping[str, Any] | None = None


class TurnPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A turn's output since the previous piece. The first piece has the turn's *begin*. The last
    one has its *end* (a stop reason or the name of an error), the *metadata* and the *error*; of an
    interrupted turn, it may have the metadata alone.

    *tokens*, *surprisals* and *metadata* are packed; *shifts* are (the turn's tokens before the
    shift, kept, dropped). A forced end of reasoning adds *ending_left* tokens behind *tokens*.
    """

    tokens: bytes = b""
    text: bytes = b""
    surprisals: bytes = b""
    shifts: tuple[tuple[int, int, int], ...] = ()
    begin: TurnBegin | None = None
    end: str | None = None
    metadata: bytes = b""
    error: Mapping[str, Any] | None = None
    ending_left: int = 0


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """The start of a turn's input: the number of tokens and messages before it. The tokens of a
    mark that is not *exact* are not in the history's present text, which was rendered anew.
    """

    tokens: int
    messages: int
    exact: bool = True


class DroppedPart(NamedTuple):
    """The tokens and the turns that a history has lost because its context was full."""

    tokens: int = 0
    turns: int = 0


NOTHING_DROPPED = DroppedPart()


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A `History`. *tokens* are packed; *resumable* is the output of the last turn on it, which the
    reader may not have received. *dropped* was dropped for that turn. *items* are the images and
    sounds among the tokens, each once, and the marks in the text have the *nonce*.
    """

    tokens: bytes = b""
    messages: list[dict[str, Any]] = []
    marks: list[Mark] = []
    rendered: str | None = None
    loose: bool = False
    open: bool = False
    shifted: bool = False
    rendering: Rendering = Rendering()
    tool_use: ToolUse = NO_TOOLS
    dropped: DroppedPart = NOTHING_DROPPED
    resumable: TurnPiece | None = msgspec.field(default=None, name="unfinished")
    nonce: str = ""
    items: tuple[MediaItem, ...] = ()
    continued: str = ""
    continued_tokens: int = 0


class Replay:
    """A turn put together from its pieces, on the prompt that it had; `History.after` takes it."""

    generates = True
    """Embedding turns are not stored."""

    def __init__(self, prompt: Sequence[int], pieces: Sequence[TurnPiece]):
        self.prompt = prompt
        self.begin = pieces[0].begin or TurnBegin()
        self.whole = TurnPiece(
            tokens=b"".join(piece.tokens for piece in pieces),
            text=b"".join(piece.text for piece in pieces),
            surprisals=b"".join(piece.surprisals for piece in pieces),
            shifts=tuple(shift for piece in pieces for shift in piece.shifts),
            begin=self.begin,
            end=pieces[-1].end,
            metadata=pieces[-1].metadata,
            error=pieces[-1].error,
            ending_left=next((p.ending_left for p in reversed(pieces) if p.tokens), 0),
        )
        """The whole output as one piece."""
        self.tokens = unpack_tokens(self.whole.tokens)
        self.text = self.whole.text
        self.surprisals = unpack_floats(self.whole.surprisals)
        """The surprisal of each token, where it is known."""
        self.ending_left = self.whole.ending_left
        self.placed_shifts = self.whole.shifts
        """The context shifts: tokens of the turn so far, kept, dropped."""
        self.shifts = [(keep, discard) for _, keep, discard in self.placed_shifts]
        """The context shifts: tokens kept, then dropped."""
        self.stopped_by_text = cuts_text(self.whole.end)
        """The answer's text was cut, while its tokens are complete."""

    @cached_property
    def kept_bytes(self) -> int:
        numbers = TOKEN_BYTES * (len(self.tokens) + len(self.surprisals))
        packed = len(self.whole.tokens) + len(self.whole.metadata)
        maps = memory_bytes(self.begin.options, self.whole.error)
        return numbers + packed + len(self.text) + maps

    @property
    def seed(self) -> int:
        return self.begin.seed

    @property
    def ended(self) -> bool:
        """Whether the turn has ended; otherwise it was interrupted."""
        return self.whole.end is not None

    @property
    def metadata(self) -> dict[str, Any] | None:
        """The metadata of the turn, or None if they were not stored."""
        packed = self.whole.metadata
        return msgspec.msgpack.decode(packed, type=dict[str, Any]) if packed else None

    def missed(self, tokens: Sequence[int], text: bytes) -> tuple[list[int], bytes]:
        """Return the output of an ended turn beyond the part that its reader has.

        :raises InvalidArgument: the reader's output differs.
        """
        whole = self.extended(tokens, text)
        if len(whole.tokens) > len(self.tokens) or len(whole.text) > len(self.text):
            raise self._other_output()
        return self.tokens[len(tokens) :], self.text[len(text) :]

    def extended(self, tokens: Sequence[int], text: bytes) -> Replay:
        """Return the turn with the output that its reader has beyond the stored output.

        :raises InvalidArgument: the reader's output differs.
        """
        own = len(self.tokens)
        if not _share_prefix(self.tokens, list(tokens)) or not _share_prefix(self.text, text):
            raise self._other_output()
        more = tokens[own:]
        rest = TurnPiece(
            tokens=pack_tokens(more),
            text=text[len(self.text) :],
            ending_left=max(0, self.ending_left - len(more)),
        )
        return Replay(self.prompt, (self.whole, rest))

    def _other_output(self) -> InvalidArgument:
        return InvalidArgument(
            "tokens or text differ from those that the turn sent",
            hint="give all its tokens and text from the start, as its events had them",
            data={"tokens": len(self.tokens)},
        )

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
    """A session in the journal. *at* is when it was last written, by `Dates`."""

    owner: Owner
    session_id: str
    at: float
    facts: SessionFacts
    past: bytes
    pieces: tuple[TurnPiece, ...] = ()


class CopyChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a session for a copy of it, in the encoded forms of the journal.

    With *past* the copy begins anew. A *piece* with the beginning of a turn replaces the previous
    pieces. *media* are the contents of images and sounds; None: the change does not carry them.
    """

    facts: bytes | None = None
    past: bytes | None = None
    piece: bytes | None = None
    media: tuple[bytes, ...] | None = None


encode = msgspec.msgpack.Encoder().encode
decode_history = msgspec.msgpack.Decoder(HistoryEntry).decode


class _Resumable(msgspec.Struct):
    """The field of a `HistoryEntry` that is read at once; decoding skips the other fields."""

    resumable: TurnPiece | None = msgspec.field(default=None, name="unfinished")


_decode_resumable = msgspec.msgpack.Decoder(_Resumable).decode


def resumable_of(past: bytes) -> TurnPiece | None:
    """Return the output of the last turn on a packed history, if that can be resumed."""
    return _decode_resumable(past).resumable


def _boot_s() -> float:
    """Return seconds since boot, suspended time included. No user can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Dates:
    """Seconds since 1970: the system clock at the start plus the time elapsed since. So setting the
    system clock makes no stored value older or younger.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _boot_s
    ):
        self._elapsed = elapsed
        self._zero = wall() - elapsed()
        self._ahead_s = 0.0

    def now(self) -> float:
        """Return the date to store."""
        return self._zero + self._ahead_s + self._elapsed()

    def not_before(self, at: float) -> None:
        """Store no date before *at*. Without a battery, a machine's clock starts in the past."""
        self._ahead_s += max(0.0, at - self.now())

    def age_s(self, at: float) -> float:
        """Return the age of a date; a date in the future has age 0."""
        return max(0.0, self._zero + self._elapsed() - at)
