"""A turn's answer: read piece by piece (`AsyncStream`), or whole (`Reply`)."""

from __future__ import annotations

import codecs
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
import msgspec

from ..backends.errors import Busy, InferdError, ProtocolError
from .connection import Connection
from .inflight import InFlight, K
from .messages import CREDIT_DEFAULT, QueueEvent

__all__ = ("AsyncStream", "QueueCallback", "Reply", "Turn", "queue_events", "retrying")

QueueCallback = Callable[[QueueEvent], None]

RETRY_S_MAX = 30.0
SETTLE_S_MAX = 5.0
"""How long a stream that is left waits for the daemon to confirm."""


class Reply(str):
    """A turn's whole text, with its `metadata`."""

    __slots__ = ("metadata",)
    metadata: dict[str, Any]

    def __new__(cls, text: str, metadata: dict[str, Any]) -> Self:
        """Make a reply of *text*."""
        self = super().__new__(cls, text)
        self.metadata = metadata
        return self

    def __getnewargs__(self) -> tuple[str, dict[str, Any]]:  # type: ignore[override]
        return str(self), self.metadata


def queue_events(on_queue: QueueCallback | None) -> Callable[[dict[str, Any]], None] | None:
    """Return what takes a call's events to *on_queue*."""
    if on_queue is None:
        return None
    return lambda event: on_queue(_queue_event(event))


def _queue_event(event: dict[str, Any]) -> QueueEvent:
    try:
        return msgspec.convert(event, QueueEvent)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"an event of the queue cannot be read: {exc}") from None


def retry_delay_s(error: InferdError, left_s: float) -> float | None:
    """Return how long to wait before trying again after *error*; None: do not."""
    if not error.retryable:
        return None
    asked_s = error.retry_after_s if isinstance(error, Busy) else 0.0
    # Jitter, upwards only: the daemon has reckoned when a try makes sense.
    delay_s = min(asked_s, RETRY_S_MAX) * random.uniform(1.0, 1.25)
    return delay_s if delay_s < left_s else None


async def retrying(connection: Connection, attempt: Callable[[], Awaitable[K]], retries: int) -> K:
    """Return the request of the first *attempt* that is not refused, or of the last one.

    With retries left it returns once an event or the end is there: after the first token nothing
    is tried again.
    """
    while True:
        request = await attempt()
        if retries <= 0:
            return request
        retries -= 1
        try:
            await request.wait_told()
        except BaseException:
            connection.abandon(request)
            raise
        delay_s = None
        if request.error is not None and not request.told:
            delay_s = retry_delay_s(request.error, request.left_s)
        if delay_s is None:
            return request
        await anyio.sleep(delay_s)


class Starter(Protocol):
    """Sends a turn's request; sessions first see to the turn before it."""

    async def __call__(self, kind: type[K], deadline: float) -> K:
        """Return the request, once it is sent."""


class Turn:
    """A streamed turn: its request, the credit it has used and what it has said.

    Read by one reader: an `AsyncStream` on the loop, or the twin's `Stream` in another thread,
    which then calls nothing here but `take` and `end`.
    """

    def __init__(
        self,
        connection: Connection,
        start: Starter,
        *,
        timeout: float,
        retries: int,
        on_end: Callable[[dict[str, Any]], None] | None = None,
        on_queue: QueueCallback | None = None,
        credit: int = CREDIT_DEFAULT,
    ):
        self.connection = connection
        self.request: InFlight | None = None
        self.left = False
        self.tokens: list[int] = []
        self.metadata: dict[str, Any] = {}
        self._start, self._timeout, self._retries = start, timeout, retries
        self._on_end, self._on_queue = on_end, on_queue
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._grant_at = max(1, credit // 2)
        self._read = 0

    async def start(self, kind: type[K]) -> K:
        """Send the request, again where it is refused and `retries` says so."""
        deadline = time.monotonic() + self._timeout

        async def attempt() -> K:
            self.request = request = await self._start(kind, deadline)
            return request

        request = await retrying(self.connection, attempt, self._retries)
        if self.left:
            self.leave()
        return request

    def take(self, event: dict[str, Any]) -> tuple[str, int]:
        """Return an event's text, and how many events to grant now (mostly 0).

        A place in the queue has no text and uses no credit.
        """
        if self._on_queue is not None and "waiting" in event:
            self._on_queue(_queue_event(event))
            return "", 0
        tokens = event.get("tokens")
        if tokens:
            self.tokens += tokens
        self._read += 1
        if self._read < self._grant_at:
            return self._decoder.decode(event.get("text", b"")), 0
        self._read = 0
        return self._decoder.decode(event.get("text", b"")), self._grant_at

    def end(self, request: InFlight) -> str:
        """Take the turn's end and return what was left of its text.

        :raises InferdError: the turn failed.
        """
        result = request.outcome()
        self.metadata = result.get("metadata") or {}
        if self._on_end is not None:
            self._on_end(self.metadata)
        return self._decoder.decode(result.get("text", b""), final=True)

    def leave(self) -> None:
        """Cancel the turn, on the connection's loop."""
        self.left = True
        if self.request is not None:
            self.connection.abandon(self.request)

    async def settle(self) -> None:
        """Leave the turn and wait for the daemon to confirm, so that the next one can begin."""
        request = self.request
        if request is None:
            self.left = True
            return
        unread = not request.done
        self.leave()
        with anyio.move_on_after(SETTLE_S_MAX, shield=True):
            await request.wait_answered()
        if unread and request.done and request.error is None:
            self.end(request)


class AsyncStream(AsyncIterator[str]):
    """The pieces of a turn's text. The request is sent with the first one that is asked for.

    Leaving the loop early cancels the turn: at once in `async with`, or when the stream is let go
    of, and at the latest with the session's next call. After the end `metadata` is there.
    """

    def __init__(self, turn: Turn):
        self._turn = turn
        self._ended = False

    @property
    def turn(self) -> Turn:
        """The turn behind it, for the synchronous twin."""
        return self._turn

    @property
    def metadata(self) -> dict[str, Any]:
        """What the turn's end told; empty before."""
        return self._turn.metadata

    @property
    def tokens(self) -> list[int]:
        """The token ids so far."""
        return self._turn.tokens

    async def __anext__(self) -> str:
        if self._ended:
            raise StopAsyncIteration
        turn = self._turn
        request = turn.request
        try:
            if request is None:
                request = await turn.start(InFlight)
            while True:
                if request.events:
                    piece, grant = turn.take(request.events.popleft())
                    if grant:
                        turn.connection.grant(request, grant)
                elif request.done:
                    return self._last(request)
                else:
                    await request.wait()
                    continue
                if piece:
                    return piece
        except BaseException:
            self._ended = True
            turn.leave()
            raise

    def _last(self, request: InFlight) -> str:
        self._ended = True
        piece = self._turn.end(request)
        if not piece:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """Cancel the turn if it has not ended."""
        self._ended = True
        await self._turn.settle()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        request = self._turn.request
        if request is not None and not request.answered:
            connection = self._turn.connection
            connection.soon(lambda: connection.abandon(request))
