"""Decoding of clients' frames, within bounds on their shape, and packing of replies."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from ...backends.errors import (
    InferdError,
    InvalidArgument,
    ProtocolError,
    TooLarge,
    UnsupportedOperation,
)
from ...backends.params import nearest, with_whole_numbers
from ...wire.frames import REPLY_BYTES_MAX, pack_frame
from ...wire.nesting import check_shape, scalar_size
from ..messages import CALLS, Kind
from .connection import Request, ServerConnection

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec raises for bytes that it cannot decode."""

_WIRE_NAMES = {"None": "nil", "null": "nil", "object": "map", "bytes": "bin"}
_TYPES = re.compile(rf"(?<=[` ])({'|'.join(_WIRE_NAMES)})(?=[` ])")
"""Names that msgspec gives to msgpack's types."""
MESSAGE_ITEMS_MAX = 16
"""Items of a frame's array: more than any message has, so that newer clients can add some."""

_envelope = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MESSAGE_ITEMS_MAX)]
)
_kind = msgspec.msgpack.Decoder(int)
_name = msgspec.msgpack.Decoder(str)
_params = {name: msgspec.msgpack.Decoder(call.params) for name, call in CALLS.items()}


def open_frame(frame: bytes) -> tuple[int, list[msgspec.Raw]]:
    """Return the kind of a message and its items, which are not decoded yet."""
    try:
        try:
            items = _envelope.decode(frame)
        except RecursionError:
            items = _envelope.decode(_without_params(frame))
        return _kind.decode(items[0]), items
    except IndexError:
        raise ProtocolError("the frame is an empty array") from None
    except UNREADABLE as exc:
        raise ProtocolError(f"the frame is not a msgpack array of the protocol: {exc}") from None


def _without_params(frame: bytes) -> bytes:
    """Return a request with only the kind and id of *frame*, which nests deeper than msgspec reads.
    `check_shape` refuses the frame later; its id is needed for the answer.
    """
    begin = end = {0xDC: 3, 0xDD: 5}.get(frame[0], 1)  # bytes of the array's header
    for _ in range(2):
        end += scalar_size(frame[end])
    return b"\x94" + frame[begin:end] + b"\xc0\xc0"


def decode_integer(raw: msgspec.Raw) -> int:
    """Return an item that must be an integer."""
    try:
        return _kind.decode(raw)
    except UNREADABLE as exc:
        raise ProtocolError(f"a frame lacks an integer where one is required: {exc}") from None


def decode_request(
    connection: ServerConnection, number: int, frame: bytes, items: list[msgspec.Raw]
) -> Request:
    """Return the request in *frame*, which has these *items*.

    :raises InferdError: the request cannot be served; a ProtocolError ends the connection.
    """
    check_shape(frame)
    try:
        call = _name.decode(items[2])
        if call not in _params:
            raise UnsupportedOperation(f"there is no call {call[:50]!r}", hint=nearest(call, CALLS))
        params = _decode_params(call, items[3])
    except UNREADABLE as exc:
        cause = _TYPES.sub(lambda match: _WIRE_NAMES[match[1]], str(exc))
        raise InvalidArgument(f"the params do not match the call: {cause}") from None
    request = Request(connection, number, call, params)
    if request.row.has_descriptors:
        parts = _parts_with_descriptors(params)
        request.descriptors += connection.descriptors.claim(len(parts))
        for part, descriptor in zip(parts, request.descriptors, strict=True):
            part.fd = descriptor
    return request


def _decode_params(call: str, raw: msgspec.Raw) -> Any:
    try:
        return _params[call].decode(raw)
    except msgspec.ValidationError:
        # Some clients have only floats; most have none, and are not to pay for it.
        params = with_whole_numbers(msgspec.msgpack.decode(raw), CALLS[call].params)
        return msgspec.convert(params, CALLS[call].params)


def _parts_with_descriptors(params: Any) -> list[Any]:
    """Return the parts of a call's params that refer to a descriptor, in the frame's order."""
    tensors = [tensor for _, tensor in getattr(params, "inputs", None) or ()]
    parts = [params, getattr(params, "tensor", None), *tensors]
    return [part for part in parts if getattr(part, "fd", -1) >= 0]


def pack_reply(request: Request, result: Any) -> bytes:
    """Return the reply to a request as a frame.

    :raises TooLarge: the reply is larger than a client accepts.
    """
    frame = pack_frame([Kind.REPLY, request.number, result])
    if len(frame) - 4 > REPLY_BYTES_MAX:
        raise TooLarge(
            f"the reply to {request.call} has {len(frame) - 4} bytes; the limit is"
            f" {REPLY_BYTES_MAX}",
            hint="request less: fewer answers, fewer probabilities (n-probs), or a stream",
            data={"bytes": len(frame) - 4, "reply_bytes_max": REPLY_BYTES_MAX},
        )
    return frame


def pack_error(number: int, error: InferdError) -> bytes:
    """Return the error reply to a request as a frame, without `data` that a client cannot read."""
    fields = error.to_wire()
    frame = pack_frame([Kind.ERROR, number, fields])
    if len(frame) - 4 > REPLY_BYTES_MAX:
        frame = pack_frame([Kind.ERROR, number, fields | {"data": {}}])
    return frame
