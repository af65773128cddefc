"""Streams and pulls of the synchronous client: iterators for any thread.

A stream has no thread of its own: its pieces are read from the socket when a thread waits for this
or another answer of the same client. Credit bounds the number of unread pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

from ..connection.driver import run_blocking
from ..results import Metadata
from ..sessions.pull import AsyncPull
from ..streams.async_stream import AsyncStream
from ..streams.turn import TurnSoFar


class Stream(TurnSoFar, Iterator[str], AbstractContextManager["Stream"]):
    """The pieces of a turn's text, as in `AsyncStream`; one thread at a time may read them.

    A turn that is not read to its end is cancelled at the end of the `with` block, when the stream
    is deleted, or by the session's next call.
    """

    def __init__(self, stream: AsyncStream):
        self._stream, self._turn = stream, stream._turn

    def __next__(self) -> str:
        try:
            return run_blocking(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Cancel the turn if it has not ended, and wait for its end."""
        run_blocking(self._stream.aclose())

    def __exit__(self, *_: object) -> None:
        self.close()


class Pull(Iterator[str], AbstractContextManager["Pull"]):
    """The pieces of a turn, each computed on demand, as in `AsyncPull`."""

    def __init__(self, pull: AsyncPull):
        self._pull = pull

    @property
    def metadata(self) -> Metadata:
        """The metadata of the turn's end; empty before."""
        return self._pull.metadata

    def __next__(self) -> str:
        try:
            return run_blocking(self._pull.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the turn if it has not ended."""
        run_blocking(self._pull.aclose())

    def __exit__(self, *_: object) -> None:
        self.close()
