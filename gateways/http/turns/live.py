"""Turns of sessions while this gateway runs them: one request for each session, and the answer for
further readers, who continue after the id of an event.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

import anyio

from ....backends.errors import Cancelled, InferdError, InvalidArgument, SessionBusy, TooLarge
from ....ipc.client import Piece, QueueEvent, ToolCall
from ..callers import Caller
from .answers import Answer, WholeCalls

PARAM = "last-event-id"
_FORM = re.compile(
    r"(\d{1,10})\.(\d{1,10})\.([0-9a-f]{8})\.(\d{1,10})\.([0-9a-f]{8})\.(\d{1,4})(\.end)?",
    re.ASCII,
)


class EventId(NamedTuple):
    """The part of an answer that a reader has after an event: the number of the session's turn, the
    bytes of text and reasoning with their checksums, and the number of tool calls. An answer that
    was computed again may differ, which the checksums show.
    """

    turn: int
    text: int = 0
    text_crc: int = 0
    reasoning: int = 0
    reasoning_crc: int = 0
    calls: int = 0
    ended: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the id that a client has sent.

        :raises InvalidArgument: it is not an id of an event.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise InvalidArgument(
                f"{text[:100]!r} is not the id of an event of a turn",
                hint="read the answer from its start, without an id",
                data={"param": PARAM},
            )
        turn, size, crc, reasoning, reasoning_crc, calls, end = found.groups()
        return cls(
            int(turn),
            int(size),
            int(crc, 16),
            int(reasoning),
            int(reasoning_crc, 16),
            int(calls),
            bool(end),
        )

    def __str__(self) -> str:
        end = ".end" if self.ended else ""
        return (
            f"{self.turn}.{self.text}.{self.text_crc:08x}"
            f".{self.reasoning}.{self.reasoning_crc:08x}.{self.calls}{end}"
        )

    def after(self, text: bytes, reasoning: bytes = b"", calls: int = 0) -> Self:
        """Return the id after more of the answer."""
        return self._replace(
            text=self.text + len(text),
            text_crc=zlib.crc32(text, self.text_crc),
            reasoning=self.reasoning + len(reasoning),
            reasoning_crc=zlib.crc32(reasoning, self.reasoning_crc),
            calls=self.calls + calls,
        )

    @property
    def line(self) -> bytes:
        """The line of an event with this id."""
        return b"id: %s\n" % str(self).encode()


def other_turn(after: EventId, turn: int) -> InvalidArgument:
    """Return the error for an id of another turn than the session's last one."""
    return InvalidArgument(
        f"the id belongs to turn {after.turn} of the session, whose last turn is {turn}",
        hint="read the session, or the last answer from its start, without an id",
        data={"param": PARAM, "turn": turn},
    )


def other_answer() -> InvalidArgument:
    """Return the error for an id after which the stored answer does not continue."""
    return InvalidArgument(
        "the answer differs from the part that was read",
        hint="read the answer from its start, without an id",
        data={"param": PARAM},
    )


ANSWER_BYTES_MAX = 4 << 20
"""The longest answer that is kept for further readers. Many times the text of a full context."""
LAG_BYTES_MAX = 256 << 10
"""The most that a turn without a reader of its own is ahead of the reader who has most of it."""


class Rest(NamedTuple):
    """A part of an answer, and the id of the event that ends with it."""

    text: str
    reasoning: str
    calls: list[ToolCall]
    id: EventId


class LiveTurn:
    """A turn that is being read. Its task adds the pieces; any number of readers wait for them.

    It is closed when its task ends: with the `end` of the answer, with an `error`, or with neither,
    if the task's client has disconnected. A reader may then continue the turn. All of its state
    belongs to the event loop.
    """

    def __init__(self) -> None:
        self.turn: int | None = None
        """The number of the session's turn; None until the session is open."""
        self.model = ""
        self.place: QueueEvent | None = None
        self.end: Answer | None = None
        self.error: InferdError | None = None
        self.closed = False
        self.changed = anyio.Event()
        """Set at the next change; each change replaces it."""
        self._text, self._reasoning = bytearray(), bytearray()
        self._calls: list[ToolCall] = []
        self._parts = WholeCalls()
        self._read_most = 0
        self._read = anyio.Event()
        self._too_long = False

    def _report(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def begin(self, turn: int, model: str) -> None:
        """Note the turn's number and model."""
        self.turn, self.model = turn, model
        self._report()

    def note_place(self, place: QueueEvent) -> None:
        """Note the turn's place in the queue."""
        self.place = place
        self._report()

    def add_piece(self, piece: Piece) -> None:
        """Add the next piece of the answer."""
        if self._too_long:
            return
        self._text += str(piece).encode()
        self._reasoning += piece.reasoning.encode()
        self._calls += self._parts.add_parts(piece.tool_calls)
        if self._size > ANSWER_BYTES_MAX:
            self._too_long = True
            self._text, self._reasoning, self._calls = bytearray(), bytearray(), []
        self._report()

    @property
    def _size(self) -> int:
        return len(self._text) + len(self._reasoning)

    def note_end(self, end: Answer) -> None:
        """Note the end of the answer. Readers see it once the turn is closed."""
        self._calls += self._parts.finish()
        if end.error is None:
            self.end = end
        else:
            self.error = end.error

    def close(self, error: InferdError | None = None) -> None:
        """Note that the turn's task has ended, perhaps with an *error*."""
        if not self.closed:
            self.closed, self.error = True, self.error or error
            self._report()

    def rest_after(self, after: EventId) -> Rest | None:
        """Return the part of the answer after an event, or None if it has not arrived yet.

        :raises InvalidArgument: the event belongs to another turn, or to another answer.
        :raises TooLarge: the answer is too long to be kept.
        """
        assert self.turn is not None, "the caller waits until the session is open"
        if after.turn != self.turn:
            raise other_turn(after, self.turn)
        if self._too_long:
            raise TooLarge(
                f"the answer is longer than the {ANSWER_BYTES_MAX} bytes that are kept for"
                " further readers",
                hint="read the session once the answer has ended",
                data={"bytes_max": ANSWER_BYTES_MAX},
            )
        if len(self._text) < after.text or len(self._reasoning) < after.reasoning:
            if self.closed and self.end is not None:
                raise other_answer()
            return None
        self._check(after)
        calls = self._calls[after.calls :]
        text, reasoning = bytes(self._text[after.text :]), bytes(self._reasoning[after.reasoning :])
        if not (text or reasoning or calls):
            return None
        try:
            shown = text.decode(), reasoning.decode()
        except UnicodeDecodeError:  # no event ends within a character
            raise other_answer() from None
        return Rest(*shown, calls, after.after(text, reasoning, len(calls)))

    def _check(self, after: EventId) -> None:
        """Check that the reader's part is the beginning of this answer.

        :raises InvalidArgument: it is not.
        """
        for data, size, crc in (
            (self._text, after.text, after.text_crc),
            (self._reasoning, after.reasoning, after.reasoning_crc),
        ):
            if zlib.crc32(memoryview(data)[:size]) != crc:
                raise other_answer()

    def note_read(self, id: EventId) -> None:
        """Note that a reader has written the answer to its client up to an event."""
        size = id.text + id.reasoning
        if size > self._read_most:
            self._read_most = size
            self._read.set()
            self._read = anyio.Event()

    async def wait_for_readers(self) -> None:
        """Wait while the answer is too far ahead of all readers, so that a turn is computed only as
        fast as somebody reads it.
        """
        while self._size - self._read_most > LAG_BYTES_MAX:
            await self._read.wait()


class Reservation:
    """The place of the only request of a session. Its request owns it."""

    def __init__(self, live: LiveTurn | None = None) -> None:
        self.live = live
        """The request's turn, if others can read it."""
        self.scope = anyio.CancelScope()
        """The scope of the request's turn, if it has one; cancelling the scope ends the turn."""
        self.released = anyio.Event()

    def release(self) -> None:
        """Note that the request has ended, and so has its turn."""
        if self.live is not None:
            self.live.close(turn_cancelled() if self.scope.cancel_called else None)
        self.released.set()


class SessionReservations:
    """The reservations of all sessions. They belong to the event loop."""

    def __init__(self) -> None:
        self._by_session: dict[tuple[str, str, str], Reservation] = {}

    @contextmanager
    def reserve(
        self, caller: Caller, session_id: str, live: LiveTurn | None = None
    ) -> Iterator[Reservation]:
        """Reserve a session, perhaps for a turn that others can read.

        :raises SessionBusy: the session has a request under way.
        """
        reservation = Reservation(live)
        key = (*caller.user.owner, session_id)
        if key in self._by_session:
            raise SessionBusy(
                f"the session {session_id!r} has a request under way",
                hint="wait for its end: a session has one turn at a time",
            )
        self._by_session[key] = reservation
        try:
            yield reservation
        finally:
            del self._by_session[key]
            reservation.release()

    def find(self, caller: Caller, session_id: str) -> Reservation | None:
        """Return the reservation of a session, or None if it has no request under way."""
        return self._by_session.get((*caller.user.owner, session_id))


def turn_cancelled() -> Cancelled:
    """Return the error of a turn that another request of its caller has ended."""
    return Cancelled("the turn was cancelled by another request of its caller")
