"""A turn's answer, read piece by piece."""

from __future__ import annotations

import codecs
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol, Self

import anyio
import msgspec

from ....backends.errors import Busy, InferdError, ProtocolError, ShuttingDown
from ...messages import CREDIT_DEFAULT, QueueEvent
from ..connection.inflight import InFlight, InFlightT
from ..sessions.resuming import is_loss, told_so_far
from .texts import Piece

__all__ = ("AsyncStream", "QueueCallback", "Turn", "TurnSoFar", "queue_events", "retrying")

QueueCallback = Callable[[QueueEvent], None]

RETRY_S_MAX = 30.0
SETTLE_S_MAX = 5.0
"""How long a stream that is left waits for the daemon to confirm."""
LOSSES_MAX = 8
"""So often in a row a turn loses its connection without a new token; then it is given up."""


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
    if not error.retryable or isinstance(error, ShuttingDown):
        return None  # a daemon that ends takes nothing more on this connection
    asked_s = error.retry_after_s if isinstance(error, Busy) else 0.0
    # Jitter, upwards only: the daemon has reckoned when a try makes sense.
    delay_s = min(asked_s, RETRY_S_MAX) * random.uniform(1.0, 1.25)
    return delay_s if delay_s < left_s else None


async def retrying(attempt: Callable[[], Awaitable[InFlightT]], retries: int) -> InFlightT:
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
            await request.wait_begun()
        except BaseException:
            if not request.answered:
                request.connection.abandon_request(request)
            raise
        delay_s = None
        if request.error is not None and not request.begun:
            delay_s = retry_delay_s(request.error, request.left_s)
        if delay_s is None:
            return request
        await anyio.sleep(delay_s)


class Starter(Protocol):
    """Sends a turn's request; sessions first see to the turn before it."""

    async def __call__(self, kind: type[InFlightT], deadline: float) -> InFlightT:
        """Return the request, once it is sent."""


class GoingOn(Protocol):
    """Goes on with a turn whose connection was lost."""

    async def __call__(self, kind: type[InFlightT], turn: Turn, lost: InFlight) -> InFlightT:
        """Return the request that tells the rest of *turn*, whose request was *lost*.

        :raises InferdError: it cannot be gone on with.
        """


class Turn:
    """A streamed turn: its request, the credit it has used and what it has said.

    Read by one reader: an `AsyncStream` on the loop, or the synchronous `Stream` in another thread,
    which then calls nothing here but `take` and `end`.
    """

    def __init__(
        self,
        start: Starter,
        *,
        timeout: float,
        retries: int,
        on_end: Callable[[dict[str, Any]], None] | None = None,
        on_queue: QueueCallback | None = None,
        go_on: GoingOn | None = None,
        credit: int = CREDIT_DEFAULT,
    ):
        self.request: InFlight | None = None
        self.deadline = 0.0
        self.left = False
        self.tokens: list[int] = []
        self.text, self.reasoning = bytearray(), bytearray()
        self.metadata: dict[str, Any] = {}
        self.probabilities: list[dict[str, Any]] = []
        self._start, self._timeout, self._retries = start, timeout, retries
        self._on_end, self._on_queue, self._go_on = on_end, on_queue, go_on
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._grant_at = max(1, credit // 2)
        self._read = 0
        self._losses = self._told_before = 0

    async def start(self, kind: type[InFlightT]) -> InFlightT:
        """Send the request, again where it is refused and `retries` says so."""
        self.deadline = time.monotonic() + self._timeout

        async def attempt() -> InFlightT:
            self.request = request = await self._start(kind, self.deadline)
            return request

        request = await retrying(attempt, self._retries)
        if self.left:
            self.leave()
        return request

    def goes_on(self, request: InFlight) -> bool:
        """Tell whether *request*, which is done, has lost its daemon, and the turn goes on."""
        return (
            self._go_on is not None
            and not self.left
            and request.error is not None
            and is_loss(request.error)
            and self._losses < LOSSES_MAX
        )

    async def go_on(self, kind: type[InFlightT], lost: InFlight) -> InFlightT:
        """Return the request that tells what is left, after this one was *lost*.

        :raises InferdError: it cannot be gone on with; the error says how far it got.
        """
        assert self._go_on is not None, "`goes_on` is asked before"
        self._losses = 1 if len(self.tokens) > self._told_before else self._losses + 1
        self._told_before, self._read = len(self.tokens), 0
        try:
            self.request = request = await self._go_on(kind, self, lost)
        except InferdError as exc:
            raise self._how_far(exc) from None
        if self.left:
            self.leave()
        return request

    def _how_far(self, error: InferdError) -> InferdError:
        return told_so_far(error, self.tokens, self.text.decode(errors="replace"))

    def take(self, event: dict[str, Any]) -> tuple[Piece, int]:
        """Return an event's piece, and how many events to grant now (mostly 0).

        A place in the queue has no text and uses no credit.
        """
        if self._on_queue is not None and "waiting" in event:
            self._on_queue(_queue_event(event))
            return Piece(""), 0
        self.probabilities += event.get("completion_probabilities", ())
        tokens, reasoning = event.get("tokens"), event.get("reasoning", b"")
        piece = self._piece(event.get("text", b""), reasoning)
        if tokens:
            self.tokens += tokens
        self._read += 1
        if self._read < self._grant_at:
            return piece, 0
        self._read = 0
        return piece, self._grant_at

    def _piece(self, text: bytes, reasoning: bytes, *, final: bool = False) -> Piece:
        self.text += text
        self.reasoning += reasoning
        return Piece(self._decoder.decode(text, final), reasoning.decode(errors="replace"))

    def end(self, request: InFlight) -> Piece:
        """Take the turn's end and return what was left of it.

        :raises InferdError: the turn failed; where its daemon is gone the error says how far it
            got.
        """
        try:
            result = request.outcome()
        except InferdError as exc:
            if is_loss(exc):
                raise self._how_far(exc) from None
            raise
        self.metadata = result.get("metadata") or {}
        if self._on_end is not None:
            self._on_end(self.metadata)
        return self._piece(result.get("text", b""), result.get("reasoning", b""), final=True)

    def leave(self) -> None:
        """Cancel the turn, on the connection's loop."""
        self.left = True
        if self.request is not None and not self.request.answered:
            self.request.connection.abandon_request(self.request)

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


class TurnSoFar:
    """What its reader has been told of a turn."""

    _turn: Turn

    @property
    def metadata(self) -> dict[str, Any]:
        """What the turn's end told; empty before."""
        return self._turn.metadata

    @property
    def tokens(self) -> list[int]:
        """The token ids so far."""
        return self._turn.tokens

    @property
    def probabilities(self) -> list[dict[str, Any]]:
        """With `n-probs`, how likely the tokens so far were: llama-server's
        `completion_probabilities`.
        """
        return self._turn.probabilities

    @property
    def reasoning(self) -> str:
        """What was told of the reasoning so far; empty but with `reasoning-format`."""
        return self._turn.reasoning.decode(errors="replace")


class AsyncStream(TurnSoFar, AsyncIterator[str]):
    """The pieces of a turn's text, each a `Piece`. The request is sent with the first one that is
    asked for.

    Leaving the loop early cancels the turn: at once in `async with`, or when the stream is let go
    of, and at the latest with the session's next call. After the end `metadata` is there.
    """

    def __init__(self, turn: Turn):
        self._turn = turn
        self._ended = False

    @property
    def turn(self) -> Turn:
        """The turn behind it, for the synchronous stream."""
        return self._turn

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
                        request.connection.grant_credit(request, grant)
                elif request.done and turn.goes_on(request):
                    request = await turn.go_on(InFlight, request)
                    continue
                elif request.done:
                    return self._last(request)
                else:
                    await request.wait()
                    continue
                if piece or piece.reasoning:
                    return piece
        except BaseException:
            self._ended = True
            turn.leave()
            raise

    def _last(self, request: InFlight) -> Piece:
        self._ended = True
        piece = self._turn.end(request)
        if not piece and not piece.reasoning:
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
            connection = request.connection
            connection.run_soon(lambda: connection.abandon_request(request))
