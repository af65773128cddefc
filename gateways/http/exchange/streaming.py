"""Streamed responses: held headers, places in the queue, pieces, ends and late errors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import anyio

from ....backends.errors import InferdError
from ....ipc.client import Piece, QueueEvent, Rendered
from ..limits import CHECK_AFTER_S, PLACE_PAUSE_S, WAITING_PAUSE_S
from ..turns import Answer, TurnProgress, TurnRequest
from .exchange import Exchange, status_of

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

    The response begins once all turns are accepted: only their computation can then fail. While a
    turn waits for its model, an earlier check by the gateway counts instead.

    :raises InferdError: a turn failed before the response began.
    """
    requests = [request] if isinstance(request, TurnRequest) else request
    for each in requests:
        await each.media.decode(exchange.run_in_thread)
    writer = _StreamWriter(exchange, form, requests)
    if form.shows_waiting:
        exchange.waiting.add(writer.show_waiting, exchange.limits.hold_s)
    try:
        with writer.scope:
            await _stream_all(exchange, writer)
    finally:
        writer.end_waiting()
    await writer.finish()


async def _stream_all(exchange: Exchange, writer: _StreamWriter) -> None:
    if len(writer.turns) == 1:  # the usual case, without a further task and group
        await _stream_one(exchange, writer, *writer.turns[0])
        return
    async with anyio.create_task_group() as group:
        for first, request in writer.turns:
            group.start_soon(_stream_one, exchange, writer, first, request)


async def _stream_one(
    exchange: Exchange, writer: _StreamWriter, first: int, request: TurnRequest
) -> None:
    try:
        await exchange.turns.stream(exchange.caller, request, writer, first)
    except InferdError as exc:
        writer.note_error(request.name_item(exc))


class _StreamWriter:
    """The reader of the answers of one or several turns that writes them to the client."""

    def __init__(self, exchange: Exchange, form: StreamForm, requests: Sequence[TurnRequest]):
        self._exchange, self._form = exchange, form
        self.scope = anyio.CancelScope()
        """The scope of all turns."""
        ends = list(accumulate((request.answers for request in requests), initial=0))
        self.turns = list(zip(ends[:-1], requests, strict=True))
        """The turns, each with the number of its first answer."""
        self._opened: set[int] = set()
        """The first answers of turns whose session is open, so that the daemon checks them."""
        self._unaccepted = set(range(ends[-1]))
        """The answers whose turns may still be refused. Until there are none, nothing is sent."""
        self._accepted = anyio.Event()
        self._check_at = time.monotonic() + CHECK_AFTER_S
        """The time at which turns without a session are checked, or 0 once that has begun."""
        self._check: anyio.CancelScope | None = None
        """The scope of the check, once it has begun."""
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
        """Send the headers and the place in the queue; see `ShowWaiting`."""
        if not self.waits:
            return 0.0
        if not self._unaccepted:
            await self._show_place()
            return self._exchange.waiting.place_pause_s
        now = time.monotonic()
        if now < self._check_at:
            return self._check_at - now
        if self._check_at:
            self._check_at, self._check = 0.0, anyio.CancelScope()
            self._exchange.waiting.start(partial(self._check_unopened, self._check))
        return PLACE_PAUSE_S  # nothing was sent: the headers follow soon after the acceptance

    async def _show_place(self) -> None:
        now = time.monotonic()
        if now >= self._show_at and not self._exchange.link.blocked:
            self._show_at = now + WAITING_PAUSE_S
            await self._write_part(self._form.waiting(self._place))

    def end_waiting(self) -> None:
        """End the wait, and the check of turns: checks run one after the other, so that those of
        lost clients would delay the others.
        """
        self.waits = False
        if self._check is not None:
            self._check.cancel()

    async def _check_unopened(self, scope: anyio.CancelScope) -> None:
        """Check the turns that wait for their model, and accept them, or end the stream."""
        exchange = self._exchange
        with scope:  # without the write, of which a part could be missing
            for first, request in self.turns:
                if not self.waits or first in self._opened:
                    continue
                try:
                    await exchange.turns.precheck.check(exchange.caller, request)
                except InferdError as exc:
                    if self.waits and first not in self._opened:
                        self.note_error(request.name_item(exc))
                        return
                else:
                    for answer in range(first, first + request.answers):
                        self.note_accepted(answer)
        if self.waits and not self._unaccepted:
            await self._show_place()

    def note_accepted(self, answer: int) -> None:
        """Note that the turn of an answer was accepted."""
        if self._unaccepted:
            self._unaccepted.discard(answer)
            if not self._unaccepted:
                self._accepted.set()

    def note_opened(self, first: int) -> None:
        """Note that the session is open of the turn whose answers begin with *first*."""
        self._opened.add(first)

    def note_place(self, answer: int, place: QueueEvent) -> None:
        """Note a place in the queue; only that of the first turn is shown."""
        self.note_accepted(answer)
        if answer < self.turns[0][1].answers:
            self._place, self._show_at = place, 0.0

    def add_progress(self, answer: int, progress: TurnProgress) -> None:
        """Add the progress of an answer's prompt."""
        self.note_accepted(answer)
        if data := self._form.progress(answer, progress):
            self._begin()
            self._added += data

    def add_piece(self, answer: int, piece: Piece, probabilities: list[dict[str, Any]]) -> None:
        self.note_accepted(answer)
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
        if not self._added:
            return True
        if self._unaccepted or self._writing or not self._exchange.link.write_now(self._added):
            return False
        self._added = b""
        return True

    async def write_added(self) -> None:
        """Write the added pieces; wait for the other turns, and while the client does not read."""
        if self._unaccepted:
            await self._accepted.wait()
        data, self._added = self._added, b""
        await self._write_part(data)

    async def _write_part(self, data: bytes) -> None:
        in_order = not self._writing
        self._writing += 1
        try:
            if not self._exchange.started:
                await self._exchange.start(200, self._form.content_type, STREAM_HEADERS)
            if data and not (in_order and self._exchange.link.write_now(data)):
                await self._exchange.write(data)
        finally:
            self._writing -= 1

    async def write_end(self, answer: int, end: Answer) -> None:
        """Write the end of an answer. The first error is kept for the end of the stream."""
        if end.error is not None:
            self.note_error(self._request_of(answer).name_item(end.error))
            return
        self.note_accepted(answer)
        self._begin()
        self._added += self._form.end(answer, end)
        await self.write_added()

    def _request_of(self, answer: int) -> TurnRequest:
        return next(request for first, request in reversed(self.turns) if first <= answer)

    def note_error(self, error: InferdError) -> None:
        """Note an error; the first one ends the stream, and all turns if nothing was sent."""
        self._error = self._error or error
        if self._unaccepted:
            self.scope.cancel()

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


async def collect_answers(exchange: Exchange, request: TurnRequest) -> list[Answer]:
    """Return the whole answers of a turn, and note parameters that were not applied as requested.

    :raises InferdError: the turn failed.
    """
    await request.media.decode(exchange.run_in_thread)
    try:
        answers = await exchange.turns.collect(exchange.caller, request)
    except InferdError as exc:
        raise request.name_item(exc) from None
    for answer in answers:
        exchange.adjusted |= answer.adjusted.get("adjusted", {})
    return answers


async def render_prompt(
    exchange: Exchange, request: TurnRequest, *, add_generation_prompt: bool = True
) -> Rendered:
    """Return the prompt of a turn with messages, as the model's template writes it.

    :raises InferdError: the request was refused or failed.
    """
    await request.media.decode(exchange.run_in_thread)
    try:
        return await exchange.turns.render_prompt(
            exchange.caller,
            request.model,
            request.messages,
            request.options,
            add_generation_prompt=add_generation_prompt,
        )
    except InferdError as exc:
        raise request.name_item(exc) from None


async def collect_turns(exchange: Exchange, requests: Sequence[TurnRequest]) -> list[list[Answer]]:
    """Return the answers of turns that run at the same time.

    :raises InferdError: a turn failed; the first failure ends the other turns.
    """
    found: list[list[Answer]] = [[] for _ in requests]
    errors: list[InferdError] = []

    async def collect(number: int, request: TurnRequest) -> None:
        try:
            found[number] = await collect_answers(exchange, request)
        except InferdError as exc:
            errors.append(exc)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for number, request in enumerate(requests):
            group.start_soon(collect, number, request)
    if errors:
        raise errors[0]
    return found
