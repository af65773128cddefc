"""Frames of messages: a 4-byte little-endian length, then one msgpack array; and bounds on the
shape of a frame, checked before anything decodes it.

A decoded item costs about 50 ns in the decoder, and more in the code that reads it. So without
these bounds, a frame of few bytes could occupy the daemon's loop for long.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgspec

from ..backends.errors import InvalidArgument, TooLarge
from ..backends.fd_frames import LENGTH, frame_of

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
HEADER_BYTES = LENGTH.size
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for bytes that it cannot decode."""
_encoder = msgspec.msgpack.Encoder()


def pack_frame(message: Any, encoder: msgspec.msgpack.Encoder = _encoder) -> bytes:
    """Return *message* as a frame."""
    return frame_of(encoder.encode(message))


def frame_size(data: bytes | bytearray, start: int, bytes_max: int) -> int:
    """Return the size of the frame whose header is at *start*, without the header.

    :raises TooLarge: the frame announces more than *bytes_max*; reading cannot continue.
    """
    (size,) = LENGTH.unpack_from(data, start)
    if size > bytes_max:
        raise TooLarge(
            f"a frame of {size} bytes; the limit is {bytes_max}",
            hint="pass large prompts and tensors in a descriptor (memfd)",
            data={"bytes": size, "frame_bytes_max": bytes_max},
        )
    return int(size)


class Kind(IntEnum):
    """The first item of a frame."""

    HELLO = 0
    REQUEST = 1
    REPLY = 2
    ERROR = 3
    EVENT = 4
    CREDIT = 5
    GOODBYE = 6
    COPY = 7


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
        if len(self._buffer) < HEADER_BYTES:
            return HEADER_BYTES if self._buffer else 0
        return int(LENGTH.unpack_from(self._buffer)[0]) + HEADER_BYTES

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
        body_bytes = len(data) - HEADER_BYTES
        is_whole = not self._buffer and body_bytes >= 0  # mostly it is one frame
        if is_whole and frame_size(data, 0, self._bytes_max) == body_bytes:
            yield data[HEADER_BYTES:]
            return
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            size = frame_size(self._buffer, start, self._bytes_max)
            if len(self._buffer) - start - HEADER_BYTES < size:
                break
            yield bytes(self._buffer[start + HEADER_BYTES : start + HEADER_BYTES + size])
            start += HEADER_BYTES + size
        del self._buffer[:start]


NESTING_MAX = 64
"""Levels of arrays and maps in a frame, in both directions."""
ITEMS_MAX = 32_000
"""Items of a frame. Numbers in long runs, which are quick to skip and decode, count as a quarter.
"""
_RUN = 256
"""Numbers that are skipped at once."""
_RUN_ITEMS = _RUN // 4
_HEADERS = bytes((*range(0x80, 0xA0), *range(0xDC, 0xE0)))
"""First bytes of msgpack's maps and arrays."""
_NUMBER_SIZES = {0xC0: 1, 0xC1: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5,
                 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}  # fmt: skip
_EXTENSION_SIZES = {0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18}
_SIZED = {0xC4: (1, 0, 0), 0xC5: (2, 0, 0), 0xC6: (4, 0, 0), 0xC7: (1, 1, 0), 0xC8: (2, 1, 0),
          0xC9: (4, 1, 0), 0xD9: (1, 0, 0), 0xDA: (2, 0, 0), 0xDB: (4, 0, 0), 0xDC: (2, 0, 1),
          0xDD: (4, 0, 1), 0xDE: (2, 0, 2), 0xDF: (4, 0, 2)}  # fmt: skip
"""By first byte: the size of the length field, that of an extension's type, and the number of items
in one entry.
"""


def scalar_size(byte: int) -> int:
    """Return the size of the values that begin with *byte*; 0 if it varies, or they have items."""
    if byte < 0x80 or byte >= 0xE0:
        return 1
    if 0xA0 <= byte < 0xC0:
        return 1 + (byte & 0x1F)
    return _NUMBER_SIZES.get(byte, 0) or _EXTENSION_SIZES.get(byte, 0)


_SIZES = [scalar_size(byte) for byte in range(256)]
_SHORT_NUMBERS = re.compile(rb"[\x00-\x7f\xc0-\xc3\xe0-\xff]{%d}" % _RUN)
_NUMBERS = re.compile(
    rb"(?s:[\x00-\x7f\xc0-\xc3\xe0-\xff]|[\xcd\xd1]..|[\xcc\xd0].|[\xca\xce\xd2].{4}"
    rb"|[\xcb\xcf\xd3].{8}){%d}" % _RUN
)


def check_shape(frame: bytes) -> None:
    """Check that a frame nests at most `NESTING_MAX` deep and has at most `ITEMS_MAX` items.

    Two counts in C settle nearly every frame; the others are walked. A text is one step, whatever
    its length. A frame that is cut short passes: the decoder reports it.

    :raises InvalidArgument: the frame nests too deep.
    :raises TooLarge: it has too many items.
    """
    containers_max = len(frame) - len(frame.translate(None, _HEADERS))
    if containers_max <= NESTING_MAX and len(frame) <= ITEMS_MAX:
        return
    unread: list[int] = []  # the items to come in each map and array around the present one
    left, position, items, run_at, end, sizes = 1, 0, 0, 0, len(frame), _SIZES
    while position < end:
        items += 1
        left -= 1
        byte = frame[position]
        if size := sizes[byte]:
            position += size
            if left >= _RUN and items >= run_at:
                position, runs = _skip_numbers(frame, position, left // _RUN)
                left -= runs * _RUN
                items += runs * _RUN_ITEMS
                run_at = items + _RUN  # a search costs as much as walking so many items
        else:
            if byte < 0xA0:
                children = byte & 0x0F if byte >= 0x90 else 2 * (byte & 0x0F)
                position += 1
            else:
                width, extra, factor = _SIZED[byte]
                length = int.from_bytes(frame[position + 1 : position + 1 + width], "big")
                children = factor * length
                position += 1 + width + (0 if factor else extra + length)
            if children:
                unread.append(left)
                left = children
                if len(unread) > NESTING_MAX:
                    raise InvalidArgument(
                        f"a message of more than {NESTING_MAX} levels of maps and arrays",
                        hint="use fewer levels, or send a JSON schema as JSON text",
                        data={"nesting_max": NESTING_MAX},
                    )
        if items > ITEMS_MAX:
            raise TooLarge(
                f"a message of more than {ITEMS_MAX} values",
                hint="send less at a time, or long lists in a tensor or as JSON text",
                data={"items_max": ITEMS_MAX},
            )
        while not left:
            if not unread:
                return  # the decoder reports bytes that follow
            left = unread.pop()


def _skip_numbers(frame: bytes, position: int, runs_max: int) -> tuple[int, int]:
    """Return the position after runs of numbers, and how many runs there are."""
    for runs in range(min(runs_max, ITEMS_MAX // _RUN_ITEMS)):
        found = _SHORT_NUMBERS.match(frame, position) or _NUMBERS.match(frame, position)
        if found is None:
            return position, runs
        position = found.end()
    return position, min(runs_max, ITEMS_MAX // _RUN_ITEMS)
