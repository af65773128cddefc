"""Frames of messages: a 4-byte little-endian length, then one msgpack array."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from ..backends.errors import TooLarge

FRAME_BYTES_MAX = 1 << 20
"""Bytes of a frame to the daemon, which decodes it on its loop. Descriptors carry larger texts."""
REPLY_BYTES_MAX = 8 << 20
"""Bytes of a frame to a client."""
CREDIT_MAX = 1024
"""Events that a reader of a stream has granted and not received; more credit is not counted."""
ANY_LENGTH = 0xFFFF_FFFF
"""Bound for ends that trust each other: the largest length that a frame can announce."""
READ_BYTES = 1 << 14
"""Bytes of one read from a socket. A read of 256 KiB costs 45 to 60 us more, because malloc maps
such a buffer anew each time; with 64 KiB malloc trims its free lists each time.
"""
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size
_encoder = msgspec.msgpack.Encoder()


def pack_frame(message: Any, encoder: msgspec.msgpack.Encoder = _encoder) -> bytes:
    """Return *message* as a frame."""
    body = encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_size(data: bytes | bytearray, start: int, bytes_max: int) -> int:
    """Return the size of the frame whose header is at *start*, without the header.

    :raises TooLarge: the frame announces more than *bytes_max*; reading cannot continue.
    """
    (size,) = _LENGTH.unpack_from(data, start)
    if size > bytes_max:
        raise TooLarge(
            f"a frame of {size} bytes; the limit is {bytes_max}",
            hint="pass large prompts and tensors in a descriptor (memfd)",
            data={"bytes": size, "frame_bytes_max": bytes_max},
        )
    return int(size)


class FrameReader:
    """Splits a byte stream into frames. It holds at most the bytes of one frame and one read."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX):
        self._buffer = bytearray()
        self._bytes_max = bytes_max

    @property
    def pending(self) -> int:
        """Bytes of the incomplete frame."""
        return len(self._buffer)

    @property
    def announced(self) -> int:
        """Size of the incomplete frame, or of its header until that is complete. 0 without one."""
        if len(self._buffer) < _LENGTH.size:
            return _LENGTH.size if self._buffer else 0
        return int(_LENGTH.unpack_from(self._buffer)[0]) + _LENGTH.size

    @property
    def missing(self) -> int:
        """Bytes of the incomplete frame that have not arrived."""
        return max(0, self.announced - self.pending)

    def clear(self) -> None:
        """Free the incomplete frame. A reference cycle may keep the reader until a collection."""
        self._buffer = bytearray()

    def read_frames(self, data: bytes) -> Iterator[bytes]:
        """Add *data*, the stream's next bytes, and yield the frames that are now complete.

        :raises TooLarge: a frame announces more than the limit; reading cannot continue.
        """
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            size = frame_size(self._buffer, start, self._bytes_max)
            if len(self._buffer) - start - HEADER_BYTES < size:
                break
            yield bytes(self._buffer[start + HEADER_BYTES : start + HEADER_BYTES + size])
            start += HEADER_BYTES + size
        del self._buffer[:start]
