"""One client's connection in the daemon: its reading, its requests under way, their descriptors,
and the decoding of its frames, within bounds on their shape, with the packing of replies.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any

import anyio
import msgspec

from ...backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    ProtocolError,
    TooLarge,
    UnsupportedOperation,
)
from ...backends.params import nearest, with_whole_numbers
from ...scheduler.owner import Owner
from ...wire.frames import (
    REPLY_BYTES_MAX,
    UNREADABLE,
    check_shape,
    pack_frame,
    scalar_size,
)
from ..chat_messages import passed_data
from ..messages import CALLS, CREDIT_MAX, ComputeParams, Kind
from ..peer import Peer
from .descriptors import UnclaimedDescriptors, UserDescriptors
from .fairness import LoopTime, SharedLimit
from .request_bytes import Charge, RequestBytes
from .socket_connection import SocketConnection

CALLS_DESCRIPTORS_MAX = 64
"""Descriptors of a connection's calls that have not ended."""


class ServerConnection(SocketConnection):
    """A client's connection to the daemon."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        requests_max: int,
        user: UserDescriptors,
        outboxes: SharedLimit,
        loop_time: LoopTime,
        request_bytes: RequestBytes,
    ):
        self.descriptors = UnclaimedDescriptors(user)
        super().__init__(sock, peer, user, self.descriptors, outboxes, loop_time)
        self.owner = Owner(peer.uid)
        """The owner of its sessions; the client's hello decides it."""
        self.on_behalf_of = ""
        """The name of the user on behalf of whom it acts."""
        self.key = ""
        """The name of the key of a gateway's caller."""
        self.key_limits: dict[str, int] = {}
        self.identified: anyio.Event | None = None
        """Set once the owner of a connection on behalf of another user is known."""
        self.number = 0
        """Its number in the order in which the daemon accepted connections."""
        self.requests: dict[int, Request] = {}
        self.requests_unstarted = 0
        """The requests whose tasks have not started."""
        self.turns_unstarted = 0
        """Those of them that may start at once, before the ones that are queued."""
        self.requests_queued = 0
        """The requests that will begin without a task, once they may start."""
        self.software = ""
        self.wants_copies = False
        """Whether the client gets the changes of its sessions."""
        self.requests_max, self.request_bytes = requests_max, request_bytes

    def __repr__(self) -> str:
        return f"<ServerConnection of uid {self.peer.uid} [{len(self.requests)} requests]>"

    @property
    def has_requests(self) -> bool:
        """Whether requests are in flight."""
        return bool(self.requests)

    def request_ended(self, request: Request) -> None:
        """Remove a request that was answered, or whose connection has ended."""
        self.requests.pop(request.number, None)
        self.note_request_ended()

    def check_capacity(self, request: Request) -> None:
        """Check that the connection may have another request under way.

        :raises Busy: too many requests are under way, or the requests of the connection, of its
            user or of all users have too many descriptors.
        """
        if len(self.requests) >= self.requests_max:
            raise Busy(
                f"{self.requests_max} requests are in flight on this connection",
                data={"requests_max": self.requests_max, "retry_after_s": 0.1},
            )
        if not request.descriptors:
            return
        kept = sum(len(other.descriptors) for other in self.requests.values())
        if kept + len(request.descriptors) > CALLS_DESCRIPTORS_MAX:
            raise Busy(
                f"the calls in flight on this connection have {kept} descriptors",
                hint="wait for their answers",
                data={"calls_descriptors_max": CALLS_DESCRIPTORS_MAX, "retry_after_s": 0.1},
            )
        self.user.check_call()


_EVENT = int(Kind.EVENT)
"""A plain integer, as msgspec's look-up of an enum's value takes a third of encoding an event."""


class Request:
    """A call under way. `cancelled_data` becomes the data of its error if it is cancelled, and
    `cancelled_why` the message.
    """

    def __init__(self, connection: ServerConnection, number: int, call: str, params: Any):
        self.connection, self.number, self.call, self.params = connection, number, call, params
        self.row = CALLS[call]
        self.uid = connection.uid
        self.charge = Charge(connection.request_bytes, connection.owner.user)
        """Its memory, counted for the user on whose behalf the connection acts now. A request that
        runs at once is not counted.
        """
        self.descriptors: list[int] = []
        """Descriptors passed with the frame. They are closed with the request, except those that
        the call takes.
        """
        self.cancelled_data: dict[str, Any] = {}
        self.cancelled_why = "the request was cancelled"
        self.lost_attempt: Any = None
        """The first attempt of the call, if the death of a worker process has ended it; the call's
        implementation makes and reads it.
        """
        self.on_cancel: Callable[[], None] | None = None
        """Cancels the call if it runs without a task."""
        self._early_credit = 0
        """Credit that the client has granted before the call's turn began."""
        self._add_credit: Callable[[int], None] | None = None

    @cached_property
    def scope(self) -> anyio.CancelScope:
        """The scope in which the call runs, if it has a task."""
        return anyio.CancelScope()

    def cancel(self, why: str, **data: Any) -> None:
        """Cancel the call; its error has this message and these data."""
        self.cancelled_why = why
        self.cancelled_data |= data
        self.interrupt()

    def interrupt(self) -> None:
        """Cancel the call."""
        if self.on_cancel is None:
            self.scope.cancel()
        else:
            self.on_cancel()

    @property
    def owner(self) -> Owner:
        """The owner of the objects that the call makes."""
        return self.connection.owner

    def grant_credit(self, events: int) -> None:
        """Grant the call's turn at most `CREDIT_MAX` more events; keep them until it begins."""
        events = max(0, min(events, CREDIT_MAX))
        if self._add_credit is None:
            self._early_credit = min(self._early_credit + events, CREDIT_MAX)
        else:
            self._add_credit(events)

    def pass_credit_to(self, add_credit: Callable[[int], None]) -> None:
        """Call *add_credit* with all credit that the client has granted and will grant."""
        self._add_credit = add_credit
        if self._early_credit:
            add_credit(self._early_credit)

    def close(self) -> None:
        """Close the descriptors that came with the request, and count its memory no more."""
        self.params = None  # a reference cycle may keep the request until a collection
        self.charge.end()
        if self.descriptors:
            self.close_descriptors(tuple(self.descriptors))

    def close_descriptors(self, descriptors: Sequence[int]) -> None:
        """Close some of the request's descriptors, which the call no longer needs."""
        for descriptor in descriptors:
            self.descriptors.remove(descriptor)
        self.connection.user.close(descriptors)

    def take_descriptor(self, descriptor: int) -> None:
        """Keep a descriptor open after the request; the caller closes it."""
        self.descriptors.remove(descriptor)

    def emit(self, event: Any, *, flush: bool = True) -> None:
        """Send an event before the reply; without *flush*, the next flush sends it."""
        self.connection.send_frame(pack_frame([_EVENT, self.number, event]), flush=flush)


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
    if request.row.has_descriptors and (parts := _parts_with_descriptors(params)):
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
    if isinstance(params, ComputeParams):
        return [tensor for tensor in tensors if tensor.fd >= 0]
    parts = [params, *(getattr(params, name, None) for name in ("weights", "tensor")), *tensors]
    if messages := getattr(params, "messages", None):
        parts += passed_data(messages)
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
