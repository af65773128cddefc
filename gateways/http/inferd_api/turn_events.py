"""`/v1/inferd/sessions/ID/events`: the rest of the session's last turn, for any number of readers.

A turn that another request of this gateway reads is read with it. Otherwise the request continues
the turn in the daemon, which has it in its journal, and is then the one that others read with. If
its client disconnects, the next reader continues the turn in the same way, so that no task outlives
its request.
"""

from __future__ import annotations

import time
from typing import Any

import anyio
import msgspec

from ....backends.errors import InferdError, NotFound, SessionBusy
from ....ipc.client import AsyncClient, AsyncSession, AsyncStream, QueueEvent
from ..exchange import Exchange
from ..exchange.exchange import status_of
from ..exchange.streaming import EVENT_STREAM, STREAM_HEADERS
from ..limits import CLOSE_S_MAX, WAITING_PAUSE_S
from ..openai.chat import ChatFrame, ChatStream
from ..openai.chat_fields import ChatRequest, StreamOptions
from ..turns import (
    Answer,
    EventId,
    LiveTurn,
    Reservation,
    Rest,
    TurnRequest,
    finish_reason_of,
    turn_cancelled,
)
from .fields import TURN_EVENTS
from .sessions import find_session, opened_session

_INTERRUPTED = "detached"


async def answer_turn_events(exchange: Exchange) -> None:
    """Stream the rest of a session's last turn after an event that the client names."""
    query = TURN_EVENTS.read_query(exchange.query)
    name = exchange.headers.get("last-event-id") or query.after
    after = None if not name else EventId.parse(name)
    if after is not None and after.ended:
        await _check_ended(exchange, after)
        return
    reader = _Reader(exchange, after)
    try:
        await _follow(exchange, reader)
    except InferdError as exc:
        if not exchange.started:
            raise
        await reader.write_error(exc)


async def _check_ended(exchange: Exchange, after: EventId) -> None:
    """Answer a client that has the whole turn, so that an `EventSource` connects no more."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        await find_session(client, exchange.caller, exchange.params["session"])
    await exchange.start(204, EVENT_STREAM)
    await exchange.write(b"", more=False)


class _Reader:
    """The client of a request, and the part of the answer that it has."""

    def __init__(self, exchange: Exchange, after: EventId | None):
        self.after = after
        self._exchange = exchange
        self._form: ChatStream | None = None
        self._whole = after is None
        self._place: QueueEvent | None = None

    def _begin(self, live: LiveTurn) -> ChatStream:
        """Return the form of the events, which begins with the first event of the live turn."""
        if self._form is None:
            chat = ChatRequest(
                model=live.model,
                messages=[],
                stream=True,
                stream_options=StreamOptions(include_usage=True),
            )
            self._form = ChatStream(ChatFrame(chat, TurnRequest(model=live.model, prompt=[])))
        return self._form

    async def write(self, live: LiveTurn, rest: Rest) -> None:
        """Write a part of the answer; wait while the client does not read."""
        data = self._beginning(live) + self._begin(live).rest(rest)
        await self._write(data)
        self.after = rest.id
        live.note_read(rest.id)

    def _beginning(self, live: LiveTurn) -> bytes:
        """Return the first event of a whole answer."""
        if not self._whole:
            return b""
        self._whole = False
        form = self._begin(live)
        form.number_events(live.turn or 0)
        return form.begin()

    async def write_end(self, live: LiveTurn, end: Answer) -> None:
        form, data = self._begin(live), self._beginning(live)
        assert self.after is not None, "it is set before a part is read"
        form.continue_after(self.after)
        await self._write(data + form.end(0, end) + form.finish(), more=False)

    async def show_waiting(self, live: LiveTurn) -> None:
        """Write a comment with the place in the queue, unless the answer has begun."""
        if self._exchange.link.blocked:
            return
        if self._form is None or live.place is not self._place:
            self._place = live.place
            await self._write(self._begin(live).waiting(live.place))
        else:
            await self._write(b": waiting\n\n")

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self._exchange.started:
            await self._exchange.start(200, EVENT_STREAM, STREAM_HEADERS)
        await self._exchange.write(data, more=more)

    async def write_error(self, error: InferdError) -> None:
        """Write an error as the last event."""
        form = self._form
        assert form is not None, "the response has begun"
        await self._exchange.write(form.error(error, status_of(error)), more=False)


async def _follow(exchange: Exchange, reader: _Reader) -> None:
    """Read the turn to its end, whichever request has begun it.

    :raises InferdError: the turn cannot be read, or has failed.
    """
    caller, session_id = exchange.caller, exchange.params["session"]
    reservations = exchange.turns.reservations
    while True:
        reservation = reservations.find(caller, session_id)
        if reservation is None:
            if await _carry_on(exchange, reader):
                return
        elif reservation.live is not None:
            if await _read(reservation.live, reader):
                return
        else:
            await _wait_released(reservation, session_id)


async def _wait_released(reservation: Reservation, session_id: str) -> None:
    """Wait for the end of another request that changes the session.

    :raises SessionBusy: it does not end in time.
    """
    with anyio.move_on_after(CLOSE_S_MAX):
        await reservation.released.wait()
    if not reservation.released.is_set():
        raise SessionBusy(
            f"the session {session_id!r} has a request under way", hint="try again soon"
        )


async def _read(live: LiveTurn, reader: _Reader) -> bool:
    """Write the rest of a live turn. Return whether it has ended: if not, its task has ended
    because its client disconnected.

    :raises InferdError: the turn has failed, or the reader's part belongs to another turn.
    """
    while True:
        changed = live.changed
        rest = None
        if live.turn is not None:
            reader.after = reader.after or EventId(live.turn)
            rest = live.rest_after(reader.after)
        if rest is not None:
            await reader.write(live, rest)
            continue
        if live.closed:
            if live.end is not None:
                await reader.write_end(live, live.end)
                return True
            if live.error is not None:
                raise live.error
            return False
        place = live.place
        with anyio.move_on_after(WAITING_PAUSE_S) as pause:
            await changed.wait()
        if pause.cancelled_caught or live.place is not place:
            await reader.show_waiting(live)


async def _carry_on(exchange: Exchange, reader: _Reader) -> bool:
    """Continue the turn in the daemon, and write its rest. Return whether it has ended.

    :raises InferdError: the turn cannot be continued, or has failed.
    """
    live, failure, ended = LiveTurn(), None, False
    session_id = exchange.params["session"]
    with exchange.turns.reservations.reserve(exchange.caller, session_id, live) as reservation:
        async with anyio.create_task_group() as group:
            group.start_soon(_feed, exchange, live, reservation)
            try:
                ended = await _read(live, reader)
            except InferdError as exc:
                failure = exc
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return ended


async def _feed(exchange: Exchange, live: LiveTurn, reservation: Reservation) -> None:
    """Continue the turn, and add its answer to *live*, which is closed in any case."""
    try:
        with reservation.scope:
            await _resume(exchange, live)
        live.close(turn_cancelled() if reservation.scope.cancelled_caught else None)
    except InferdError as exc:
        live.close(exc)
    finally:
        live.close()


async def _resume(exchange: Exchange, live: LiveTurn) -> None:
    async with (
        exchange.turns.pool.lease(exchange.caller) as client,
        opened_session(exchange, client) as (session, entry),
    ):
        reason = await _stop_reason(client, session)
        live.begin(entry["turns"], entry["model"])
        stream = session.resume(
            on_queue=live.note_place,
            queue_timeout=exchange.limits.queue_s_max,
            timeout=exchange.limits.turn_s_max,
        )
        answer, computed = await _read_stream(stream, live)
        if reason == _INTERRUPTED:
            tokens = computed + answer.input_tokens - answer.cached_tokens
            exchange.turns.quotas.charge_tokens(exchange.caller, max(0, tokens), time.monotonic())
    live.note_end(answer)


async def _stop_reason(client: AsyncClient, session: AsyncSession) -> str:
    """Return the end of the session's last turn.

    :raises NotFound: there is no turn whose answer can be read.
    """
    metadata: dict[str, Any] = msgspec.json.decode(await client.get_output(session.context, 1))
    reason = metadata.get("stop_reason")
    if reason is None:
        raise NotFound(
            f"the session {session.session_id!r} has no turn to read: it has had none yet, or was"
            " changed since",
            hint="read the session: it has all messages",
            data={"param": "session_id"},
        )
    return str(reason)


async def _read_stream(stream: AsyncStream, live: LiveTurn) -> tuple[Answer, int]:
    """Add the pieces of a stream to a live turn. Return its end, and the number of tokens after the
    first event, which has those that were there before.
    """
    error: InferdError | None = None
    before: int | None = None
    try:
        async with stream:
            async for piece in stream:
                before = len(stream.tokens) if before is None else before
                live.add_piece(piece)  # type: ignore[arg-type]  # every piece is a `Piece`
                await live.wait_for_readers()
    except InferdError as exc:
        error = exc
    answer = Answer(
        metadata=stream.metadata,
        finish_reason=finish_reason_of(stream.metadata, bool(stream.tool_calls)),
        error=error,
    )
    return answer, len(stream.tokens) - (before or 0)
