"""Arguments shared by several calls: priority and timeouts of turns, tensors, JSON metadata."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from anyio.lowlevel import checkpoint

from ...backends.errors import InvalidArgument, TooLarge, not_utf8
from ...backends.tensors import number_of as number_of
from ...backends.tensors import type_number
from ...backends.texts import mark_bytes, offset_of
from ...ipc.messages import Tensor
from ...ipc.server.connection import Request
from ...ipc.server.descriptors import read_tensor, tensor_size
from ...ipc.server.request_bytes import COPIES
from ...scheduler.arguments import TIMEOUT_S_MAX as TIMEOUT_S_MAX
from ...scheduler.arguments import priority_of as priority_of
from ...scheduler.arguments import seconds_of as seconds_of
from ...sessions import TurnOptions

TEXT_PART_BYTES = 8 << 10
RAW_BYTES_MAX = 64 << 10
"""Maximum number of bytes of a message that are not UTF-8; replacing one takes 0.3 us."""
TIMEOUT_S_MIN = 0.001
"""The least remaining timeout after a wait, because 0 means no timeout."""


def turn_options(params: Any, options: TurnOptions) -> TurnOptions:
    """Return *options* with the priority and timeouts of a call's *params*; some calls have no
    `queue_timeout_s`.

    :raises InvalidArgument: the priority or a timeout is not valid.
    """
    return msgspec.structs.replace(
        options,
        priority=priority_of(params.priority),
        queue_timeout_s=seconds_of(getattr(params, "queue_timeout_s", 0.0)),
        timeout_s=seconds_of(params.timeout_s),
    )


def tensor_type(tensor: Tensor) -> int:
    """Return the number of a tensor's type; see `type_number`."""
    return type_number(tensor.type)


async def tensor_bytes(request: Request, tensor: Tensor) -> bytes:
    """Return a tensor's bytes; if it has a descriptor, read them from it and close it.

    :raises TooLarge: the bytes exceed the limit.
    :raises Busy: the user's requests in flight hold too many bytes.
    """
    tensor_type(tensor)
    if tensor.kept or tensor.buffer:
        raise InvalidArgument(
            "only a graph's inputs are in buffers, or have stayed in the daemon",
            hint="send the bytes of the tensor",
        )
    if tensor.fd < 0:
        return tensor.data
    data = await request.connection.user.run(_read_descriptor, tensor.fd)
    request.charge.grow(COPIES * len(data))
    request.close_descriptors((tensor.fd,))
    return data


def _read_descriptor(fd: int) -> bytes:
    return read_tensor(fd, tensor_size(fd))


async def decode_text(data: bytes) -> str:
    """Return *data* as text, in which a mark stands for each byte that is not UTF-8. The data is
    decoded in parts, so that it does not occupy the loop.

    :raises TooLarge: more than `RAW_BYTES_MAX` bytes are not UTF-8.
    """
    decoder = getincrementaldecoder("utf-8")("surrogateescape")
    parts, marks = [], 0
    for end in range(TEXT_PART_BYTES, len(data) + TEXT_PART_BYTES, TEXT_PART_BYTES):
        part, found = mark_bytes(
            decoder.decode(data[end - TEXT_PART_BYTES : end], final=end >= len(data))
        )
        parts.append(part)
        marks += found
        if marks > RAW_BYTES_MAX:
            raise TooLarge(
                f"more than {RAW_BYTES_MAX} bytes of the text are not UTF-8",
                hint="send text in UTF-8",
                data={"raw_bytes_max": RAW_BYTES_MAX},
            )
        await checkpoint()
    return "".join(parts)


@contextmanager
def located_in(text: str) -> Iterator[None]:
    """Let an error for a byte without a token report its offset in *text*, the user's message."""
    try:
        yield
    except InvalidArgument as exc:
        at = offset_of(text, exc.data.get("value", 0)) if "byte" in exc.data else -1
        if at < 0:
            raise
        raise not_utf8(exc.data["value"], at) from None


def metadata_text(value: str | bytes) -> bytes:
    """Return JSON text as bytes, without the NUL that C guests may append."""
    return (value.encode() if isinstance(value, str) else value).rstrip(b"\0")


def bounded(data: bytes, size_max: int) -> bytes:
    """Return *data* if it fits a buffer of *size_max* bytes (any *data* fits if negative).

    :raises TooLarge: the data does not fit; the error has the size that is needed, and the data can
        be read again.
    """
    if 0 <= size_max < len(data):
        raise TooLarge(
            f"the output has {len(data)} bytes, the buffer {size_max}",
            data={"needed": len(data), "size_max": size_max},
        )
    return data
