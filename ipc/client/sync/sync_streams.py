"""Streams and pulls of the synchronous client: iterators for any thread.

The loop's reader task puts a stream's pieces into a queue, which credit bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from ..connection.inflight import InFlightThread
from ..results import Metadata
from ..sessions.pull import AsyncPull
from ..streams.async_stream import AsyncStream
from ..streams.texts import Piece
from ..streams.turn import TurnSoFar
from .loop_thread import LoopThread


class Stream(TurnSoFar, Iterator[str], AbstractContextManager["Stream"]):
    """The pieces of a turn's text, as in `AsyncStream`; one thread at a time may read them.

    A turn that is not read to its end is cancelled at the end of the `with` block, when the stream
    is deleted, or by the session's next call.
    """

    def __init__(self, thread: LoopThread, stream: AsyncStream):
        self._thread, self._stream, self._turn = thread, stream, stream._turn
        self._request: InFlightThread | None = None
        self._begun = self._ended = False

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        try:
            while True:
                piece = self._next_piece()
                if not piece.empty:
                    return piece
                if self._ended:
                    raise StopIteration
        except BaseException:
            # Ctrl-C too: the exception's traceback keeps this object alive, so __del__ runs late.
            self._abandon()
            raise

    def _next_piece(self) -> Piece:
        request = self._request
        if request is None:
            self._begun = True
            request = self._thread.run_call(self._turn.send_request, InFlightThread)
            self._request = request
        event = request.pieces.get()
        if event is None and self._turn.can_recover(request):
            self._request = self._thread.run_call(self._turn.recover, InFlightThread, request)
            return Piece("")
        if event is None:
            self._ended = True
            return self._turn.read_end(request)
        piece, grant = self._turn.read_event(event)
        if grant:
            self._thread.run_soon(request.connection.grant_credit, request, grant)
        return piece

    def _abandon(self) -> None:
        self._ended = True
        request = self._turn.request
        if self._begun and not (request and request.answered):
            self._thread.run_soon(self._turn.abandon)

    def close(self) -> None:
        """Cancel the turn if it has not ended, and wait for its end."""
        self._ended = True
        request = self._turn.request
        if request is not None and not request.answered and not self._thread.forked:
            self._thread.run_call(self._stream.aclose)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._abandon()


class Pull(Iterator[str], AbstractContextManager["Pull"]):
    """The pieces of a turn, each computed on demand, as in `AsyncPull`."""

    def __init__(self, thread: LoopThread, pull: AsyncPull):
        self._thread, self._pull = thread, pull

    @property
    def metadata(self) -> Metadata:
        """The metadata of the turn's end; empty before."""
        return self._pull.metadata

    def __next__(self) -> str:
        try:
            return self._thread.run_call(self._pull.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        except BaseException:
            self._thread.run_soon(self._pull._abandon)
            raise

    def close(self) -> None:
        """End the turn if it has not ended."""
        if not self._thread.forked:
            self._thread.run_call(self._pull.aclose)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._thread.run_soon(self._pull._abandon)
