"""Messages of calls on buffers, which clients share with the daemon's workers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .base import Map

BUFFER_PART_BYTES_MAX = 1 << 20
"""The largest part of a buffer that one call reads."""
BUFFERS_FREED_MAX = 1024
"""The largest number of buffers that one call frees."""


class RegisterBufferParams(Map):
    """`register_buffer`: a memfd of the client's, or a buffer that the daemon makes."""

    fd: int = -1
    """0 or more: the buffer is a memfd in a [descriptor](#descriptors), sealed with
    `F_SEAL_SHRINK`, `F_SEAL_GROW` and `F_SEAL_SEAL`.
    """
    size: int = 0
    """Without `fd`: the bytes of a new buffer, which are zeros."""


class BufferResult(Map):
    """A buffer's handle and size."""

    buffer: int
    """The handle."""
    size: int
    """Its bytes."""


class WriteBufferParams(Map):
    """`write_buffer`: write a part of a buffer."""

    buffer: int
    """The handle."""
    offset: int
    """The place of the first byte."""
    data: bytes
    """The bytes."""


class ReadBufferParams(Map):
    """`read_buffer`: read a part of a buffer."""

    buffer: int
    """The handle."""
    offset: int
    """The place of the first byte."""
    size: int
    """The number of bytes, at most `BUFFER_PART_BYTES_MAX`."""


class ReadBufferResult(Map):
    """The bytes of a part of a buffer."""

    data: bytes
    """The bytes."""


class FreeBuffersParams(Map):
    """`free_buffers`: free buffers."""

    buffers: Annotated[list[int], msgspec.Meta(max_length=BUFFERS_FREED_MAX)]
    """The handles; unknown ones are ignored."""
