"""A streamed turn at the client's end: its request, its credit and its output."""

from __future__ import annotations

import codecs
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any, TypeAlias

from ...backends.errors import ConnectionLost, InferdError
from ..messages import CREDIT_DEFAULT, QueueEvent, ToolCallPart
from .caller import as_event, is_loss, retrying, with_progress
from .connection.core import InFlight, no_metadata
from .connection.driver import Driver
from .results import Metadata
from .texts import Piece, ToolCall, ToolCalls, tool_call_parts
from .turn_settings import PromptCallback, QueueCallback, StartCallback

SETTLE_S_MAX = 5.0
"""Time that an abandoned stream waits for the daemon's confirmation."""
LOSSES_MAX = 8
"""A turn fails after this many losses of its connection in a row without a new token."""


Starter: TypeAlias = Callable[[float], Awaitable[InFlight]]
"""A function that sends a turn's request, which has a deadline, and returns it. A session's
function first ends its previous turn.
"""
TurnRecovery: TypeAlias = Callable[["StreamedTurn", InFlight], Awaitable[InFlight]]
"""A function that returns a request for the rest of a turn whose request was lost with its
connection, or raises an `InferdError`.
"""


class StreamedTurn:
    """A streamed turn: its request, the credit that it has used, and its output. It has one reader,
    an `AsyncStream`.
    """

    def __init__(
        self,
        start: Starter,
        driver: Driver,
        *,
        timeout_s: float,
        retries: int,
        on_queue: QueueCallback | None = None,
        on_prompt: PromptCallback | None = None,
        on_start: StartCallback | None = None,
        recovery: TurnRecovery | None = None,
        credit: int = CREDIT_DEFAULT,
    ):
        self.request: InFlight | None = None
        self.deadline = 0.0
        self.abandoned = False
        self.tokens: list[int] = []
        self.text, self.reasoning = bytearray(), bytearray()
        self.raw_text = bytearray()
        """The text with tool calls as the model wrote them, from which the turn can be resumed."""
        self.tool_calls = ToolCalls()
        self.probabilities: list[dict[str, Any]] = []
        self.prompt_logprobs: list[dict[str, Any]] = []
        self._start, self._driver = start, driver
        self._timeout_s, self._retries = timeout_s, retries
        self._on_queue, self._on_prompt, self._on_start = on_queue, on_prompt, on_start
        self._recovery = recovery
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._grant_at = max(1, credit // 2)
        self._events_read = 0
        self._losses = self._tokens_at_loss = 0

    async def send_request(self) -> InFlight:
        """Send the request, and repeat it while it is refused and `retries` permits."""
        self.deadline = time.monotonic() + self._timeout_s

        async def attempt() -> InFlight:
            self.request = request = await self._start(self.deadline)
            return request

        request = await retrying(attempt, self._retries, self._driver)
        if self.abandoned:
            self.abandon()
        return request

    def can_recover(self, request: InFlight) -> bool:
        """Return whether *request* ended by a loss, and the turn can be continued."""
        return (
            self._recovery is not None
            and not self.abandoned
            and request.error is not None
            and is_loss(request.error)
            and self._losses < LOSSES_MAX
        )

    async def recover(self, lost: InFlight) -> InFlight:
        """Return a request for the rest of the turn, whose request was *lost*.

        :raises InferdError: the turn cannot be continued; the error has its progress.
        """
        assert self._recovery is not None, "`can_recover` is checked before"
        self._losses = 1 if len(self.tokens) > self._tokens_at_loss else self._losses + 1
        self._tokens_at_loss, self._events_read = len(self.tokens), 0
        try:
            self.request = request = await self._recovery(self, lost)
        except InferdError as exc:
            raise self._with_progress(exc) from None
        if self.abandoned:
            self.abandon()
        return request

    def _with_progress(self, error: InferdError) -> InferdError:
        return with_progress(error, self.tokens, self.text.decode(errors="replace"))

    def read_pieces(self, request: InFlight) -> Iterator[Piece]:
        """Read the events that have arrived, and yield their pieces."""
        while request.has_events():
            piece, grant = self.read_event(request.next_event())
            if grant:
                request.connection.grant_credit(request, grant)
            if not piece.empty:
                yield piece

    def read_event(self, event: dict[str, Any]) -> tuple[Piece, int]:
        """Return an event's piece, and the credit to grant now (mostly 0).

        Events with a place in the queue or the prompt's progress have no text and use no credit.
        """
        if "waiting" in event:
            self._note_place(as_event(event, QueueEvent))
            return Piece(""), 0
        if self._on_prompt is not None and (progress := event.get("prompt_progress")):
            self._on_prompt(progress)
            return Piece(""), 0
        self.probabilities += event.get("completion_probabilities", ())
        if "prompt_logprobs" in event:  # after a loss, a turn may begin again
            self.prompt_logprobs[event.get("prompt_offset", 0) :] = event["prompt_logprobs"]
        tokens, reasoning = event.get("tokens"), event.get("reasoning", b"")
        text = event.get("text", b"")
        self.raw_text += event.get("raw_text", text)
        piece = self._decode_piece(text, reasoning, tool_call_parts(event))
        if tokens:
            self.tokens += tokens
        self._events_read += 1
        if self._events_read < self._grant_at:
            return piece, 0
        self._events_read = 0
        return piece, self._grant_at

    def _note_place(self, place: QueueEvent) -> None:
        if place.position and self._on_queue is not None:
            self._on_queue(place)
        elif not place.position and self._on_start is not None:
            self._on_start()

    def _decode_piece(
        self, text: bytes, reasoning: bytes, calls: list[ToolCallPart], *, final: bool = False
    ) -> Piece:
        self.text += text
        self.reasoning += reasoning
        self.tool_calls.add_parts(calls)
        return Piece(self._decoder.decode(text, final), reasoning.decode(errors="replace"), calls)

    def read_end(self, request: InFlight) -> Piece:
        """Read the turn's end and return the last piece.

        :raises InferdError: the turn failed; after a loss the error has its progress.
        """
        try:
            result = request.outcome()
        except InferdError as exc:
            if is_loss(exc):
                raise self._with_progress(exc) from None
            raise
        text, reasoning = result.get("text", b""), result.get("reasoning", b"")
        return self._decode_piece(text, reasoning, tool_call_parts(result), final=True)

    def abandon(self) -> None:
        """Cancel the turn without waiting."""
        self.abandoned = True
        if self.request is not None and not self.request.answered:
            self.request.connection.abandon_request(self.request)

    async def abandon_and_wait(self) -> None:
        """Cancel the turn and wait for the daemon's confirmation, so that the next can begin."""
        self.abandon()
        if self.request is not None:
            # A fork of the process that sent the request cannot wait for the answer.
            with self._driver.shield(), suppress(ConnectionLost):
                await self.request.wait_answered(SETTLE_S_MAX)


class TurnSoFar:
    """The part of a turn that its reader has received."""

    _turn: StreamedTurn

    @property
    def metadata(self) -> Metadata:
        """The metadata of the turn's end, even if it was cancelled; empty before the end."""
        request = self._turn.request
        return no_metadata() if request is None else request.metadata

    @property
    def tokens(self) -> list[int]:
        """The token ids so far."""
        return self._turn.tokens

    @property
    def probabilities(self) -> list[dict[str, Any]]:
        """With `n-probs`, llama-server's `completion_probabilities` of the tokens so far."""
        return self._turn.probabilities

    @property
    def prompt_logprobs(self) -> list[dict[str, Any]]:
        """With `prompt-logprobs`, the logprobs of the prompt's tokens, before the first piece."""
        return self._turn.prompt_logprobs

    @property
    def reasoning(self) -> str:
        """The reasoning so far; empty except with `reasoning-format`."""
        return self._turn.reasoning.decode(errors="replace")

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls so far; the arguments of the last one may be incomplete."""
        return self._turn.tool_calls.so_far()

    @property
    def raw_text(self) -> str:
        """The text so far with tool calls as the model wrote them, for `resume`."""
        return self._turn.raw_text.decode(errors="replace")


PieceTaker: TypeAlias = Callable[[Iterator[Piece]], bool]
"""A function that takes pieces; it returns whether it takes more at once."""


class AsyncStream(TurnSoFar, AsyncIterator[str], AbstractAsyncContextManager["AsyncStream"]):
    """The pieces of a turn's text, each a `Piece`. Reading the first piece sends the request.

    A turn that is not read to its end is cancelled at the end of the `async with` block, when the
    stream is deleted, or by the session's next call. After the end `metadata` is set.
    """

    def __init__(self, turn: StreamedTurn):
        self._turn = turn
        self._ended = False

    async def __anext__(self) -> str:
        if self._ended:
            raise StopAsyncIteration
        turn = self._turn
        request = turn.request
        try:
            if request is None:
                request = await turn.send_request()
            while True:
                if request.has_events():
                    piece, grant = turn.read_event(request.next_event())
                    if grant:
                        request.connection.grant_credit(request, grant)
                elif request.done and turn.can_recover(request):
                    request = await turn.recover(request)
                    continue
                elif request.done:
                    piece = self._read_end(request)
                    if piece.empty:
                        raise StopAsyncIteration
                    return piece
                else:
                    await request.wait()
                    continue
                if not piece.empty:
                    return piece
        except BaseException:
            self._ended = True
            turn.abandon()
            raise

    async def pass_pieces(self, take: PieceTaker) -> bool:
        """Pass the pieces to *take* as they arrive, until it returns False or the turn has ended.
        Return whether the turn goes on.

        The reader of the connection calls *take*, so that no task has to wake for a piece. *take*
        reads all the pieces that it is given, and must not wait; its exceptions are raised here.
        """
        if self._ended:
            return False
        turn = self._turn
        more = True

        def take_arrived() -> bool:
            nonlocal more
            if request.has_events():
                more = take(turn.read_pieces(request))
            return request.done or not more

        try:
            request = turn.request or await turn.send_request()
            while True:
                await request.connection.wait_for(request, take_arrived)
                if not more:
                    return True
                if not turn.can_recover(request):
                    break
                request = await turn.recover(request)
            piece = self._read_end(request)
            if not piece.empty:
                take(iter((piece,)))
            return False
        except BaseException:
            self._ended = True
            turn.abandon()
            raise

    def _read_end(self, request: InFlight) -> Piece:
        self._ended = True
        return self._turn.read_end(request)

    async def aclose(self) -> None:
        """Cancel the turn if it has not ended."""
        self._ended = True
        await self._turn.abandon_and_wait()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        request = self._turn.request
        if request is not None and not request.answered:
            request.connection.run_soon(partial(request.connection.abandon_request, request))
