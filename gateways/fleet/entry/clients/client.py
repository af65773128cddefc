"""One client of the entry: its graphs and contexts on the nodes, and its requests under way."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.abc
import msgspec

from .....backends.errors import (
    BackendError,
    Busy,
    ConnectionLost,
    InferdError,
    InvalidArgument,
    SessionBusy,
    ShuttingDown,
    error_from_wire,
)
from .....ipc.messages import CREDIT_MAX, Call, ClientHello, CopiedChange, Kind
from .....wire.frames import HEADER_BYTES, pack_frame
from ...calls.frames import (
    Fields,
    OpenFrame,
    frame_of,
    integer_in,
    is_part_of_answer,
    request_frame,
    values_of,
    with_handle,
    with_mapped_handles,
)
from ...copies.pending import PendingChange, call_after
from ...link import ContentKind
from ...routing.choice import node_unreachable
from ...routing.prompts import PromptTable
from ..nodes.nodes import Nodes
from ..nodes.own_turns import OwnTurns
from ..placing.homes import FleetUser, NodeTable, RecentKey, SessionKey
from ..several_nodes.name_locks import NameLocks
from .contexts import ClientContexts, FleetGraph, OpenContext, SuspendedContext
from .incarnations import Incarnations, daemon_handle
from .upstream import Upstream, lost_error

_change = msgspec.msgpack.Decoder(CopiedChange)
UNREAD_PAUSE_BYTES = 1 << 20
"""Bytes that a client has not read; above this, nothing is read from its nodes."""


class ClientSocket(Protocol):
    """The client's side of its connection."""

    @property
    def unsent_bytes(self) -> int:
        """The bytes that the client has not read."""

    def add_frame(self, frame: bytes) -> None:
        """Add a frame; `flush` sends it."""

    def flush(self) -> None:
        """Send as much as the client reads now."""

    def pause(self, reason: object) -> None:
        """Read nothing from the client, for a *reason*."""

    def resume(self, reason: object) -> None:
        """Read from the client again, unless there are other reasons not to."""


def without_shutdown(error: InferdError) -> InferdError:
    """Convert a node's error for a client: `ShuttingDown` of one node becomes `Busy`, because to a
    client it means the whole fleet.
    """
    if isinstance(error, ShuttingDown):
        return Busy(error.message, data={"cause": "node", **error.data})
    return error


class SettledSessions(Protocol):
    """The moves of sessions between nodes, as requests wait for them."""

    async def wait_settled(self, key: SessionKey) -> None:
        """Wait until a session does not move.

        :raises Busy: it still moves, or its node is not known.
        """

    def is_moving(self, key: SessionKey) -> bool:
        """Return whether a session moves."""

    def moving(self, key: SessionKey) -> AbstractContextManager[None]:
        """Make requests that open a session wait until the end of the block."""


class SessionCopies(Protocol):
    """The copies of sessions on second nodes."""

    @property
    def are_wanted(self) -> bool:
        """Whether clients' sessions are copied."""

    @property
    def are_awaited(self) -> bool:
        """Whether answers wait until the copies have their changes."""

    def accept_change(
        self, owner: FleetUser, home: str, change: CopiedChange
    ) -> PendingChange | None:
        """Take a change of a session on the node *home*; None if there can be no copy."""

    async def home_of(self, key: SessionKey, known: str | None = None) -> str | None:
        """Return the node of a session that runs from its copy, now that its own node is lost.

        :raises Busy: the session is moving, or cannot continue from its copy yet.
        """


class ReadMetrics(Protocol):
    """The metrics of the fleet."""

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's text format.

        :raises BackendError: the program that writes them has failed.
        """


class EntryState(Protocol):
    """The state that the clients of an entry share."""

    @property
    def moves(self) -> SettledSessions:
        """The moves of sessions between nodes."""

    async def drain_node(
        self, client: FleetClient, request: ClientRequest, params: Fields
    ) -> Fields:
        """Move the sessions of a node to other nodes."""

    async def move_open(
        self, client: FleetClient, suspended: SuspendedContext, target: str
    ) -> None:
        """Move the session of a suspended context to the node *target*."""

    @property
    def copies(self) -> SessionCopies:
        """The copies of sessions on second nodes."""

    @property
    def metrics(self) -> ReadMetrics:
        """The metrics of the fleet."""

    stopping: anyio.Event
    """Set once the entry accepts no new requests, and exits when those under way have ended."""

    swaps: NameLocks
    """The locks of swaps by model, so that swaps of one name reach all nodes in the same order."""
    model_copies: NameLocks
    """The locks of copies of models by node and model, so that a file is copied once."""
    nodes: Nodes
    incarnations: Incarnations
    homes: NodeTable[SessionKey]
    recent: NodeTable[RecentKey]
    prompts: PromptTable


class RequestWithdrawal(Protocol):
    """The withdrawal of a request from its node, to be sent to another one."""

    held: list[OpenFrame]

    def hold(self, message: OpenFrame) -> None:
        """Hold back an event or the answer."""


class ClientRequest:
    """A request of a client under way, on one node or as a task of the entry."""

    def __init__(self, number: int, call: str, row: Call):
        self.number, self.call, self.row = number, call, row
        self.upstream: Upstream | None = None
        self.scope = anyio.CancelScope()
        self.turns: OwnTurns | None = None
        """The turns of its node, among which the request counts."""
        self.context: int | None = None
        """The client's handle of the context to whose node it was sent."""
        self.session_id = ""
        """The id of the session of this context."""
        self.changes: list[PendingChange] = []
        """The changes of sessions that its answer acknowledges."""
        self.on_result: Callable[[Fields], object] | None = None
        """Called with its result, whose handles are the client's."""
        self.has_tokens = False
        """Whether an event with tokens was passed to the client."""
        self.is_cancelled = False
        """Whether the client has cancelled it."""
        self.credit = 0
        """The credit that the client has granted before the first token."""
        self.withdrawal: RequestWithdrawal | None = None
        """Set while it is withdrawn from its node."""


class FleetClient:
    """The state of a client's connection. Lives on the entry's event loop; *group* runs its
    tasks, and those of its connections to nodes.
    """

    def __init__(
        self,
        fleet: EntryState,
        socket: ClientSocket,
        owner: FleetUser,
        hello: ClientHello,
        group: anyio.abc.TaskGroup,
    ):
        self.fleet, self.owner, self.group = fleet, owner, group
        self.graphs: dict[int, FleetGraph] = {}
        self.requests: dict[int, ClientRequest] = {}
        self.prelude: list[tuple[str, Fields]] = []
        """Calls that are repeated on each new connection to a node."""
        self.upstreams: dict[str, Upstream] = {}
        self.on_idle: Callable[[], object] = lambda: None
        """Called when a request has ended."""
        self._socket, self._hello = socket, hello
        self.contexts = ClientContexts(fleet.nodes, fleet.incarnations)
        self._changes: dict[str, PendingChange] = {}
        """The last change of each session whose copy lacks it yet, by the session's id."""
        self.has_left = False
        """Whether the client has closed its connection."""
        self._lost = Counter[str]()
        """Contexts lost with connections, by node, until the loss of the node is reported."""

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
        if not self.fleet.nodes.is_reachable(node):
            raise node_unreachable(node)
        link = self.fleet.nodes.links[node]
        upstream = Upstream(link, self, self._hello, tuple(self.prelude))
        self.upstreams[node] = upstream
        self.group.start_soon(upstream.connect, self.fleet.nodes.data_context)
        return upstream

    def note_context(
        self, handle: int, context: OpenContext, opened_by: ClientRequest | None = None
    ) -> None:
        """Note an open context. If *opened_by* has opened it, the context counts as an expected
        turn from now on, instead of that request.
        """
        self.contexts.note_open(handle, context)
        self.fleet.nodes.counters_of(context.node).contexts_opened += 1
        turns = self.fleet.nodes.turns_of(context.node)
        if opened_by is not None:
            turns.drop_opened(opened_by)
            turns.note_opened((self, handle), context.kind, time.monotonic())

    def suspend_context(self, handle: int, context: OpenContext) -> SuspendedContext:
        """Suspend an open context, so that new requests on it wait, and return it.

        :raises SessionBusy: requests on it are under way, or it moves.
        :raises InvalidArgument: its graph was unloaded.
        """
        if handle in self.contexts.suspended:
            raise SessionBusy("the session's context moves to another node")
        if any(request.context == handle for request in self.requests.values()):
            raise SessionBusy("a request on the session's context is under way")
        if context.graph not in self.graphs.values():
            raise InvalidArgument("the graph of the session's context was unloaded")
        return self.contexts.suspend(handle, context)

    def uses_lease(self, graph: FleetGraph, node: str) -> bool:
        """Return whether the lease of *graph* on *node* is used, by a request or a context."""
        return graph.used[node] > 0 or self.contexts.are_on(graph, node)

    def drop_all(self) -> None:
        """Forget all graphs and contexts, which the nodes have closed."""
        self.graphs.clear()
        self.contexts.drop_all()

    def graph_of(self, params: Fields) -> FleetGraph:
        """Return the graph in *params*.

        :raises InvalidArgument: there is no such graph.
        """
        handle = integer_in(params, "graph")
        if handle not in self.graphs:
            raise InvalidArgument(f"there is no graph {handle} on this connection")
        return self.graphs[handle]

    def forward_to_context(
        self, request: ClientRequest, params: Fields, *, has_contents: bool = False
    ) -> None:
        """Send a request to the node of its context, with the contents that were sent there.

        :raises InferdError: there is no such context, or its node cannot be reached.
        """
        incarnation, handle = self.contexts.incarnation_of(params)
        fields = with_handle(params, "context", daemon_handle(incarnation, handle))
        self.forward(request, incarnation.node, fields, has_contents=has_contents)
        request.context = handle = integer_in(params, "context")
        context = self.contexts.find(params)
        request.session_id = "" if context is None else context.session_id
        if request.row.starts_on_context and context is not None:
            request.turns = self.fleet.nodes.turns_of(context.node)
            request.turns.drop_opened((self, handle))
            request.turns.begin_turn(request, context.kind, time.monotonic())

    def forward(
        self, request: ClientRequest, node: str, params: Fields, *, has_contents: bool = False
    ) -> None:
        """Send a request to *node*, and pass its events and its answer to the client.

        :raises InferdError: the node cannot be reached.
        """
        upstream = self.upstream(node)
        frame = request_frame(request.number, request.call, params)
        if has_contents:
            frame = pack_frame([ContentKind.REQUEST, frame[HEADER_BYTES:]])
        upstream.send_request(request.number, frame, partial(self._pass_on, request, upstream))
        request.upstream = upstream
        if request.credit:
            self._send_credit(request, upstream, request.credit)

    def grant_credit(self, request: ClientRequest, credit: int) -> None:
        """Pass on a grant of credit. A grant before the first token holds on each node to which the
        request is sent.
        """
        if not request.has_tokens:
            request.credit = min(request.credit + credit, CREDIT_MAX)
        if request.upstream is not None:
            self._send_credit(request, request.upstream, credit)

    def _send_credit(self, request: ClientRequest, upstream: Upstream, credit: int) -> None:
        upstream.send_frame(pack_frame([int(Kind.CREDIT), request.number, credit]))

    def note_cancelled(self, handle: int) -> None:
        """Note that the client cancels the turn of a context."""
        for request in self.requests.values():
            if request.context == handle:
                request.is_cancelled = True

    def note_withdrawn(self, request: ClientRequest) -> None:
        """Note that a request was withdrawn from its node."""
        if request.turns is not None:
            request.turns.end_turn(request, time.monotonic())
        request.upstream = request.turns = request.withdrawal = None

    def pass_held(self, request: ClientRequest) -> None:
        """Pass on the messages held back for a request that was not withdrawn after all."""
        assert request.withdrawal is not None and request.upstream is not None
        held, request.withdrawal = request.withdrawal.held, None
        for message in held:
            self._pass_on(request, request.upstream, message)
        self._socket.flush()

    def _pass_on(self, request: ClientRequest, upstream: Upstream, message: OpenFrame) -> None:
        if request.withdrawal is not None:
            request.withdrawal.hold(message)
            return
        if message.kind == Kind.EVENT:
            self.pass_event(request, upstream, message)
            return
        if request.turns is not None:
            request.turns.end_turn(request, time.monotonic())
        changes = self._unacknowledged(request)
        answer = partial(self._pass_answer, request, upstream, message, changes)
        if not call_after(changes, partial(self._pass_later, answer)):
            answer()

    def _pass_later(self, answer: Callable[[], object]) -> None:
        answer()
        self._socket.flush()

    def _unacknowledged(self, request: ClientRequest) -> list[PendingChange]:
        """Return the changes for whose copies the answer to a request waits."""
        if not self.fleet.copies.are_awaited:
            return []
        last = self._changes.get(request.session_id)
        return request.changes if last is None else [*request.changes, last]

    def _pass_answer(
        self,
        request: ClientRequest,
        upstream: Upstream,
        message: OpenFrame,
        changes: Iterable[PendingChange],
    ) -> None:
        self.requests.pop(request.number, None)
        if upstream.lost is not None and any(change.is_missed for change in changes):
            # The acknowledged change may be on no copy, nor on the lost node when it returns.
            self.fail(request.number, lost_error(upstream.node, upstream.lost.message))
        elif message.kind == Kind.ERROR:
            error = error_from_wire(values_of(message.items[2]))
            self.fail(request.number, without_shutdown(error))
        elif request.row.handles_in_result or request.on_result is not None:
            result = self.mapped(upstream, message.items[2], request.row.handles_in_result)
            self.reply(request, result)
        else:
            self._socket.add_frame(frame_of(message.body))
            self.on_idle()

    def accept_change(self, upstream: Upstream, message: OpenFrame) -> None:
        """Take the change of a session, for its copy."""
        change = _change.decode(message.items[2])
        pending = self.fleet.copies.accept_change(self.owner, upstream.node, change)
        if pending is None:
            return
        request = self.requests.get(message.number)
        if request is not None:
            request.changes = [other for other in request.changes if not other.is_done]
            request.changes.append(pending)
        session_id = change.session_id
        self._changes[session_id] = pending

        def note_done() -> None:
            if self._changes.get(session_id) is pending:
                del self._changes[session_id]

        pending.call_when_done(note_done)

    async def wait_copied(self, request: ClientRequest) -> None:
        """Wait until the copies have the changes that a request has made."""
        done = anyio.Event()
        if call_after(self._unacknowledged(request), done.set):
            await done.wait()

    def pass_event(self, request: ClientRequest, upstream: Upstream, message: OpenFrame) -> None:
        """Pass an event to the client."""
        request.has_tokens = request.has_tokens or is_part_of_answer(message)
        if request.row.handles_in_events:
            event = self.mapped(upstream, message.items[2], request.row.handles_in_events)
            self._socket.add_frame(pack_frame([int(Kind.EVENT), request.number, event]))
        else:
            self._socket.add_frame(frame_of(message.body))

    def mapped(self, upstream: Upstream, raw: msgspec.Raw, names: frozenset[str]) -> Fields:
        """Return a result or an event of a node with the client's handles."""
        return with_mapped_handles(raw, names, partial(self.contexts.client_handle, upstream))

    def reply(self, request: ClientRequest, result: Mapping[str, Any]) -> None:
        """Send the result of a request."""
        self.requests.pop(request.number, None)
        if request.on_result is not None:
            request.on_result(dict(result))
        self._socket.add_frame(pack_frame([int(Kind.REPLY), request.number, result]))
        self._socket.flush()
        self.on_idle()

    def fail(self, number: int, error: InferdError) -> None:
        """Send the error of a request."""
        self.requests.pop(number, None)
        self._socket.add_frame(pack_frame([int(Kind.ERROR), number, error.to_wire()]))
        self._socket.flush()
        self.on_idle()

    def upstream_read(self) -> None:
        """Send what the nodes have sent; read no more from them while the client does not read."""
        self._socket.flush()
        if self._socket.unsent_bytes > UNREAD_PAUSE_BYTES:
            self.read_upstreams(reading=False)

    def read_upstreams(self, *, reading: bool) -> None:
        """Read from the nodes, or pause reading from them."""
        for upstream in self.upstreams.values():
            upstream.set_reading(reading)

    def pause_client(self, upstream: Upstream) -> None:
        """Read nothing from the client while a node does not read."""
        self._socket.pause(upstream)

    def resume_client(self, upstream: Upstream) -> None:
        """Read from the client again."""
        self._socket.resume(upstream)

    def upstream_lost(self, upstream: Upstream) -> None:
        """Forget the leases and contexts on a node whose connection has ended."""
        self._socket.resume(upstream)
        if self.upstreams.get(upstream.node) is upstream:
            del self.upstreams[upstream.node]
        for graph in self.graphs.values():
            graph.leases.pop(upstream.node, None)
        self._lost[upstream.node] += self.contexts.lose_node(upstream.node)

    def lose_node(self, node: str, cause: str) -> int:
        """Fail the requests on a node that was lost; return how many contexts were lost."""
        upstream = self.upstreams.get(node)
        if upstream is not None:
            upstream.end(lost_error(node, cause))
        return self._lost.pop(node, 0)

    def close(self) -> None:
        """End the connections to nodes, which end the client's requests and contexts."""
        self.has_left = True
        for upstream in tuple(self.upstreams.values()):
            upstream.end(BackendError("the client has closed its connection"))
