"""Connections to nodes, as one user: their requests, and the messages that come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import anyio
import anyio.abc
import msgspec

from ....backends.errors import (
    BackendError,
    ConnectionLost,
    InferdError,
    ProtocolError,
    ShuttingDown,
    WorkerCrashed,
    error_from_wire,
)
from ....ipc import messages as w
from ....ipc.messages import ClientHello, Kind
from ....wire.frames import REPLY_BYTES_MAX, FrameReader, pack_frame
from ..certificates import failure_reason, server_name
from ..frames import (
    Fields,
    OpenFrame,
    open_message,
    raw_of,
    request_frame,
    values_of,
)
from ..link import BUFFER_BYTES, HANDSHAKE_S_MAX, set_options
from ..routing.choice import node_unreachable
from .nodes import NodeLink, Nodes

FrameHandler: TypeAlias = Callable[[OpenFrame], None]
Results: TypeAlias = dict[str, dict[str, Any]]
"""Results by node."""
T = TypeVar("T")
OWN_NUMBERS = range(1 << 62, (1 << 63) - 1)
"""Ids of the entry's own requests, each chosen at random. Ids of clients count up."""


def lost_error(node: str, cause: str) -> WorkerCrashed:
    """Return the error for a turn whose node was lost."""
    return WorkerCrashed(
        f"the node {node} was lost: {cause}",
        hint="send the request again; a session with an id is opened again by its id",
        data={"cause": "node", "node": node},
    )


class Upstream(asyncio.Protocol):
    """The connection. Lives on the entry's event loop. Requests may be sent before it is
    established.

    *prelude* are requests of the client that hold for each connection; they are answered before
    other requests are sent.
    """

    def __init__(
        self,
        link: NodeLink,
        owner: NodeConnections,
        hello: ClientHello,
        prelude: Sequence[tuple[str, Fields]],
    ):
        self.node = link.name
        self.instance = 0
        self.lost: InferdError | None = None
        self._link, self._owner = link, owner
        self._prelude = prelude
        self._hello = hello
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(REPLY_BYTES_MAX)
        self._handlers: dict[int, FrameHandler] = {}
        self._unsent: bytearray | None = bytearray()
        """Frames of requests until the connection is established; None from then on."""
        self._is_reading = True
        self.contents_lock = anyio.Lock()
        """Held while the contents of a request, and then the request itself, are sent."""
        self._accepts = asyncio.Event()
        """Set while the node takes further data; also once the connection has ended."""

    async def connect(self, context: Any) -> None:
        """Connect, greet, and send the requests so far."""
        address = self._link.address
        assert address is not None, "a node that can be reached has an address"
        try:
            with anyio.fail_after(HANDSHAKE_S_MAX):
                await asyncio.get_running_loop().create_connection(
                    lambda: self,
                    address.host,
                    address.port,
                    ssl=context,
                    server_hostname=server_name(self.node),
                )
                for call, params in self._prelude:
                    await self._call_now(call, params)
        except TimeoutError:
            self.end(lost_error(self.node, f"no answer within {HANDSHAKE_S_MAX:g} s"))
        except OSError as exc:
            self.end(lost_error(self.node, failure_reason(exc, self.node)))
        except InferdError as exc:
            self.end(exc)
        else:
            unsent, self._unsent = self._unsent, None
            self._accepts.set()
            if unsent:
                self._write(bytes(unsent))
            self._owner.upstream_full(self, is_full=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=BUFFER_BYTES)
        set_options(transport.get_extra_info("socket"))
        if self.lost is not None:
            self._transport.abort()
            return
        self._transport.write(pack_frame([int(Kind.HELLO), self._hello]))

    def data_received(self, data: bytes) -> None:
        if self.lost is not None:
            return
        try:
            for body in self._reader.read_frames(data):
                self._handle(open_message(body))
        except InferdError as exc:
            self.end(lost_error(self.node, exc.message))
        self._owner.upstream_read()

    def _handle(self, message: OpenFrame) -> None:
        if message.kind == Kind.HELLO:
            self.instance = int(values_of(message.items[1])["instance"])
        elif message.kind == Kind.GOODBYE:
            error = error_from_wire(values_of(message.items[1]))
            if isinstance(error, ShuttingDown | ConnectionLost):  # of the node, not of the client
                error = lost_error(self.node, error.message)
            self.end(error)
        elif message.kind == Kind.COPY:
            self._owner.accept_change(self, message)
        else:
            number = message.number
            if message.kind == Kind.EVENT:
                handler = self._handlers.get(number)
            else:
                handler = self._handlers.pop(number, None)
            if handler is not None:
                handler(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the requests under way."""
        self.end(lost_error(self.node, str(exc) if exc else "the connection has ended"))

    def end(self, error: InferdError) -> None:
        """Close the connection, unless it has ended; requests under way fail with *error*."""
        if self.lost is not None:
            return
        self.lost, self._unsent = error, None
        self._accepts.set()
        if self._transport is not None:
            self._transport.abort()
        handlers, self._handlers = self._handlers, {}
        fields = raw_of(error.to_wire())
        for number, handler in handlers.items():
            body = msgspec.msgpack.encode([int(Kind.ERROR), number, fields])
            handler(open_message(body))
        self._owner.upstream_lost(self)
        self._owner.upstream_read()

    def send_request(self, number: int, frame: bytes, handler: FrameHandler) -> None:
        """Send a request; *handler* gets its events and its reply or error.

        :raises InferdError: the connection has ended.
        :raises ProtocolError: the id is in use.
        """
        self.check_connected()
        if number in self._handlers:
            raise ProtocolError(f"request id {number} is already in use")
        self._handlers[number] = handler
        self.send_frame(frame)

    def send_frame(self, frame: bytes) -> None:
        """Send a frame, once the connection is established."""
        if self._unsent is not None:
            self._unsent += frame
            if len(self._unsent) > BUFFER_BYTES:
                self._owner.upstream_full(self, is_full=True)
        elif self.lost is None:
            self._write(frame)

    async def send_and_wait(self, frame: bytes) -> None:
        """Send a frame, and wait until the node takes further ones."""
        self.send_frame(frame)
        await self._accepts.wait()

    def check_connected(self) -> None:
        """Check that the connection has not ended.

        :raises InferdError: the reason of its end.
        """
        if self.lost is not None:
            raise error_from_wire(self.lost.to_wire())

    def _write(self, frames: bytes) -> None:
        assert self._transport is not None
        self._transport.write(frames)

    def pause_writing(self) -> None:
        """Read nothing from the client while the node does not read."""
        self._accepts.clear()
        self._owner.upstream_full(self, is_full=True)

    def resume_writing(self) -> None:
        self._accepts.set()
        self._owner.upstream_full(self, is_full=False)

    def set_reading(self, reading: bool) -> None:
        """Pause reading while the client does not read, or resume it."""
        if self._transport is None or reading == self._is_reading or self.lost is not None:
            return
        self._is_reading = reading
        if reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    async def call(self, call: str, params: Fields) -> msgspec.Raw:
        """Make a request of the entry's own and return its result; cancel it if this is cancelled.

        :raises InferdError: the request failed.
        """
        return await self._exchange(call, params, self.send_frame)

    def post(self, call: str, params: Fields) -> None:
        """Send a request of the entry's own whose answer does not matter."""
        self.send_frame(request_frame(random.choice(OWN_NUMBERS), call, params))

    async def _call_now(self, call: str, params: Fields) -> msgspec.Raw:
        return await self._exchange(call, params, self._write)

    async def _exchange(
        self, call: str, params: Fields, send: Callable[[bytes], object]
    ) -> msgspec.Raw:
        self.check_connected()
        number = random.choice(OWN_NUMBERS)
        answer: asyncio.Future[OpenFrame] = asyncio.get_running_loop().create_future()

        def handle(message: OpenFrame) -> None:
            if message.kind != Kind.EVENT and not answer.done():
                answer.set_result(message)

        self._handlers[number] = handle
        send(request_frame(number, call, params))
        try:
            message = await answer
        except BaseException:
            if self._handlers.pop(number, None) is not None:
                self.post("cancel", {"request": raw_of(number)})
            raise
        return result_of(message)


def result_of(message: OpenFrame) -> msgspec.Raw:
    """Return the result in a reply.

    :raises InferdError: the message is an error reply.
    """
    if message.kind == Kind.ERROR:
        raise error_from_wire(values_of(message.items[2]))
    return message.items[2]


class NodeConnections:
    """Connections to the nodes as the user whom *hello* names, one for each node. Lives on the
    entry's event loop; *group* runs its tasks. This class makes the entry's own calls; that of a
    client also passes messages on.
    """

    def __init__(self, nodes: Nodes, hello: ClientHello, group: anyio.abc.TaskGroup):
        self.group = group
        self.upstreams: dict[str, Upstream] = {}
        self.prelude: list[tuple[str, Fields]] = []
        """Calls that are repeated on each new connection to a node."""
        self.has_left = False
        """Whether the client has closed its connection."""
        self._nodes, self._hello = nodes, hello

    def upstream(self, node: str) -> Upstream:
        """Return the connection to *node*; a new one connects in the background.

        :raises Busy: the node cannot be reached.
        :raises ConnectionLost: the client has left.
        """
        found = self.upstreams.get(node)
        if found is not None and found.lost is None:
            return found
        if self.has_left:
            raise ConnectionLost("the client has closed its connection")
        if not self._nodes.is_reachable(node):
            raise node_unreachable(node)
        upstream = Upstream(self._nodes.links[node], self, self._hello, tuple(self.prelude))
        self.upstreams[node] = upstream
        self.group.start_soon(upstream.connect, self._nodes.data_context)
        return upstream

    async def call(self, node: str, call: str, params: w.Map, result: type[T]) -> T:
        """Make a request of the entry's own on *node*.

        :raises InferdError: the request failed.
        """
        fields = {name: raw_of(value) for name, value in msgspec.structs.asdict(params).items()}
        return msgspec.msgpack.decode(await self.upstream(node).call(call, fields), type=result)

    async def gather(
        self, call: str, params: Fields, nodes: Iterable[str]
    ) -> tuple[Results, dict[str, InferdError]]:
        """Make a request on *nodes* at once; return the results and the errors by node."""
        results: Results = {}
        errors: dict[str, InferdError] = {}

        async def call_node(node: str) -> None:
            try:
                results[node] = values_of(await self.upstream(node).call(call, params))
            except InferdError as exc:
                errors[node] = exc

        names = list(nodes)
        async with anyio.create_task_group() as group:
            for node in names:
                group.start_soon(call_node, node)
        # In the order of the configuration, not of the answers.
        return {node: results[node] for node in names if node in results}, errors

    def upstream_read(self) -> None:
        """Note that messages of a node were handled."""

    def upstream_full(self, upstream: Upstream, *, is_full: bool) -> None:
        """Note whether a connection has too much to send, so that its client has to wait."""

    def accept_change(self, upstream: Upstream, message: OpenFrame) -> None:
        """Take the change of a session, for its copy."""

    def upstream_lost(self, upstream: Upstream) -> None:
        """Note that a connection has ended; its requests have failed."""
        if self.upstreams.get(upstream.node) is upstream:
            del self.upstreams[upstream.node]

    def close(self) -> None:
        """End the connections, which ends the client's requests and contexts."""
        self.has_left = True
        for upstream in tuple(self.upstreams.values()):
            upstream.end(BackendError("the client has closed its connection"))
