"""The bytes received over a connection, and the messages in them."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple, TypeAlias

import msgspec

from ....backends.errors import InferdError, ProtocolError, TooLarge
from ....wire.frames import HEADER_BYTES, REPLY_BYTES_MAX, frame_size

Message: TypeAlias = list[Any]
_decode = msgspec.msgpack.Decoder(list[Any]).decode


class Received(NamedTuple):
    """The result of all reads so far; each read makes a new one.

    An interrupt leaves the old value or the new one, so that no read is lost or counted twice.
    """

    reads: int
    """The number of reads."""
    messages: deque[Message | InferdError]
    """The messages completed by the last read, and the error if its bytes cannot be read."""
    parts: tuple[bytes, ...] = ()
    """The incomplete frame."""
    missing: int = HEADER_BYTES
    """The least number of bytes that the incomplete frame still needs."""

    def after_read(self, data: bytes) -> Received:
        """Return the value after another read, of *data*."""
        missing = self.missing - len(data)
        if missing > 0:
            return Received(self.reads + 1, deque(), (*self.parts, data), missing)
        data = b"".join((*self.parts, data)) if self.parts else data
        messages: deque[Message | InferdError] = deque()
        start = 0
        while True:
            missing = start + HEADER_BYTES - len(data)
            if missing <= 0:
                try:
                    end = start + HEADER_BYTES + frame_size(data, start, REPLY_BYTES_MAX)
                    missing = end - len(data)
                    if missing <= 0:
                        messages.append(_decode(memoryview(data)[start + HEADER_BYTES : end]))
                        start = end
                        continue
                except TooLarge as exc:
                    messages.append(exc)
                except msgspec.DecodeError as exc:
                    messages.append(unreadable(exc))
            rest = (data[start:],) if start < len(data) else ()
            return Received(self.reads + 1, messages, rest, missing)


def unreadable(exc: Exception) -> ProtocolError:
    """Return the error for a frame that cannot be read because of *exc*."""
    return ProtocolError(f"a frame from the daemon cannot be read: {exc}")
