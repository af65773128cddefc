"""Streamed responses: held headers, places in the queue, pieces, ends and late errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import anyio

from ....backends.errors import InferdError
from ....ipc.client import Piece, QueueEvent
from ..limits import PLACE_PAUSE_S, WAITING_PAUSE_S
from ..turns import Answer, TurnProgress, TurnRequest
from .exchange import Exchange
from .statuses import status_of, without_frames

EVENT_STREAM = b"text/event-stream; charset=utf-8"
STREAM_HEADERS = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class StreamForm(Protocol):
    """The form of one API's stream: each method returns the bytes to send, perhaps none.

    It does no I/O and is called by one task at a time.
    """

    content_type: bytes
    shows_waiting: bool
    """Whether the client gets the bytes of `waiting` while its turn waits; if not, the headers are
    held until the first piece.
    """

    def begin(self) -> bytes:
        """Return the first bytes of the body, sent before the first piece."""

    def waiting(self, place: QueueEvent | None) -> bytes:
        """Return the form of a place in the queue; None means that it is not known, because the
        model is being loaded.
        """

    def progress(self, answer: int, progress: TurnProgress) -> bytes:
        """Return the progress of an answer's prompt, before its first piece."""

    def piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> bytes:
        """Return the next piece of an answer."""

    def end(self, answer: int, end: Answer) -> bytes:
        """Return the end of an answer that did not fail."""

    def error(self, error: InferdError, status: int) -> bytes:
        """Return an error after the start of the stream, which then ends."""

    def finish(self) -> bytes:
        """Return the last bytes of a stream without an error."""


async def stream_turn(
    exchange: Exchange, request: TurnRequest | Sequence[TurnRequest], form: StreamForm
) -> None:
    """Stream a turn as the response, or several turns at the same time. The answers of all turns
    are numbered consecutively.

    :raises InferdError: a turn failed before the response began.
    """
    requests = [request] if isinstance(request, TurnRequest) else request
    writer = _StreamWriter(exchange, form)
    if form.shows_waiting:
        exchange.waiting.add(writer, exchange.limits.hold_s)
    try:
        await _stream_all(exchange, requests, writer)
    finally:
        writer.waits = False
    await writer.finish()


async def _stream_all(
    exchange: Exchange, requests: Sequence[TurnRequest], writer: _StreamWriter
) -> None:
    first, *others = requests
    if not others:  # the usual case, without a further task and group
        await _stream_one(exchange, first, _NumberedReader(writer, 0))
        return
    async with anyio.create_task_group() as group:
        number = 0
        for each in requests:
            group.start_soon(_stream_one, exchange, each, _NumberedReader(writer, number))
            number += each.answers


async def _stream_one(exchange: Exchange, request: TurnRequest, reader: _NumberedReader) -> None:
    try:
        await exchange.turns.stream(exchange.caller, request, reader)
    except InferdError as exc:
        reader.writer.note_error(exc)


class _NumberedReader:
    """The reader of one of several turns, whose answers are numbered from *first* on."""

    def __init__(self, writer: _StreamWriter, first: int):
        self.writer, self._first = writer, first

    def note_place(self, place: QueueEvent) -> None:
        """Note a place in the queue; only that of the first turn is shown."""
        if not self._first:
            self.writer.note_place(place)

    def add_progress(self, answer: int, progress: TurnProgress) -> None:
        """Add the progress of an answer's prompt."""
        self.writer.add_progress(self._first + answer, progress)

    def add_piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> None:
        """Add a piece."""
        self.writer.add_piece(self._first + answer, piece, probabilities)

    def write_now(self) -> bool:
        """Write the added pieces if that needs no waiting; return whether they are written."""
        return self.writer.write_now()

    async def write_added(self) -> None:
        """Write the added pieces."""
        await self.writer.write_added()

    async def write_end(self, answer: int, end: Answer) -> None:
        """Write the end of an answer. The first error is kept for the end of the stream."""
        if end.error is not None:
            self.writer.note_error(end.error)
        else:
            await self.writer.write_end(self._first + answer, end)


class _StreamWriter:
    """The reader of a turn's answers that writes them to the client."""

    def __init__(self, exchange: Exchange, form: StreamForm):
        self._exchange, self._form = exchange, form
        self.waits = True
        """Whether the body has not begun, and may begin with the place in the queue."""
        self._place: QueueEvent | None = None
        self._show_at = 0.0
        """The time at which the place is shown even if it has not changed."""
        self._begun = False
        self._added = b""
        """The part of the body that is not written yet."""
        self._error: InferdError | None = None
        self._writing = 0
        """The number of tasks that write now; they wait in order while the client does not read."""

    async def show_waiting(self) -> float:
        """Send the headers and the place in the queue; see `WaitingStream`."""
        if not self.waits:
            return 0.0
        now = time.monotonic()
        if now >= self._show_at and not self._exchange.link.blocked:
            self._show_at = now + WAITING_PAUSE_S
            await self._write_part(self._form.waiting(self._place))
        return PLACE_PAUSE_S

    def note_place(self, place: QueueEvent) -> None:
        """Note a place in the queue."""
        self._place, self._show_at = place, 0.0

    def add_progress(self, answer: int, progress: TurnProgress) -> None:
        """Add the progress of an answer's prompt."""
        if data := self._form.progress(answer, progress):
            self._begin()
            self._added += data

    def add_piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> None:
        """Add a piece."""
        self._begin()
        self._added += self._form.piece(answer, piece, probabilities)

    def _begin(self) -> None:
        """Begin the body, before the form returns anything else, because it may number its
        events.
        """
        if not self._begun:
            self._begun, self.waits, self._added = True, False, self._form.begin()

    def write_now(self) -> bool:
        """Write the added pieces if that needs no waiting; return whether they are written."""
        if self._added and not self._writing and self._exchange.link.write_now(self._added):
            self._added = b""
        return not self._added

    async def write_added(self) -> None:
        """Write the added pieces; wait while the client does not read."""
        data, self._added = self._added, b""
        await self._write_part(data)

    async def _write_part(self, data: bytes) -> None:
        self._writing += 1
        try:
            if not self._exchange.started:
                await self._exchange.start(200, self._form.content_type, STREAM_HEADERS)
            if data:
                await self._exchange.write(data)
        finally:
            self._writing -= 1

    async def write_end(self, answer: int, end: Answer) -> None:
        """Write the end of an answer."""
        self._begin()
        self._added += self._form.end(answer, end)
        await self.write_added()

    def note_error(self, error: InferdError) -> None:
        """Note an error; the first one ends the stream."""
        self._error = self._error or without_frames(error)

    async def finish(self) -> None:
        """Write the end of the stream.

        :raises InferdError: a turn failed before the response began.
        """
        error = self._error
        if error is None:
            await self._exchange.write(self._form.finish(), more=False)
        elif self._exchange.started:
            await self._exchange.write(self._form.error(error, status_of(error)), more=False)
        else:
            raise error
