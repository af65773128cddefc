"""The stream of a turn's text, for asyncio and trio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TypeAlias

from ..connection.inflight import InFlight
from .texts import Piece
from .turn import StreamedTurn, TurnSoFar

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
