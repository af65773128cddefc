"""The stream of a turn's text, for asyncio and trio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import partial

from ..connection.inflight import InFlight
from .texts import Piece
from .turn import StreamedTurn, TurnSoFar


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
                    return self._last_piece(request)
                else:
                    await request.wait()
                    continue
                if not piece.empty:
                    return piece
        except BaseException:
            self._ended = True
            turn.abandon()
            raise

    def _last_piece(self, request: InFlight) -> Piece:
        self._ended = True
        piece = self._turn.read_end(request)
        if piece.empty:
            raise StopAsyncIteration
        return piece

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
