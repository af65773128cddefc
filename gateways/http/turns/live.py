"""The answer of a session's turn while this gateway reads it, for further readers of it."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import anyio

from ....backends.errors import InferdError, TooLarge
from ....ipc.client import Piece, QueueEvent, ToolCall
from .answers import Answer
from .event_ids import EventId, other_answer, other_turn
from .whole_calls import WholeCalls

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
