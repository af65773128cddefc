"""The texts of tokens that are computed on demand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio


class PulledPieces:
    """The texts of a pulled turn that were not read yet, and the number of tokens requested from
    the engine. Owned by the turn, on the daemon's event loop. *request_token* requests one more.
    """

    def __init__(self, requested: int, request_token: Callable[[], object]):
        self._requested = requested
        self._request_token = request_token
        self._unread: deque[bytes] = deque()
        self._ended = False
        self._changed = anyio.Event()

    @property
    def requested(self) -> int:
        """The number of tokens that were requested and have not arrived."""
        return max(0, self._requested)

    @property
    def kept_bytes(self) -> int:
        """The memory that the unread texts take."""
        return sum(map(len, self._unread))

    def note_request(self) -> None:
        """Note that a token was requested."""
        self._requested += 1

    def add_piece(self, text: bytes) -> None:
        """Add the text of a requested token."""
        self._requested -= 1
        self._unread.append(text)
        self._changed.set()

    def end(self, tail: bytes) -> None:
        """Add the text that was withheld until the end, as a piece of its own."""
        if tail:
            self._unread.append(tail)
        self._ended = True
        self._changed.set()

    async def next_piece(self) -> bytes | None:
        """Return the next text, or None if the turn has ended; request its token if necessary."""
        while not self._unread:
            if self._ended:
                return None
            if self._requested <= 0:
                self._request_token()
            if self._changed.is_set():
                self._changed = anyio.Event()
            await self._changed.wait()
        return self._unread.popleft()
