"""One client of the entry, with its requests under way, and the state that all clients share."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import anyio
import anyio.abc
import msgspec

from ....backends.errors import (
    Busy,
    Cancelled,
    InferdError,
    InvalidArgument,
    PermissionDenied,
    SessionBusy,
    ShuttingDown,
    error_from_wire,
)
from ....backends.fd_frames import frame_of
from ....ipc.messages import CREDIT_MAX, PROTOCOL_VERSION, Call, ClientHello, CopiedChange, Kind
from ....ipc.peer import Peer
from ....ipc.server.buffers import Buffers
from ....ipc.server.connection_places import Places
from ....ipc.server.descriptors import UserDescriptors
from ....ipc.server.fairness import LoopTime, SharedLimit
from ....ipc.server.holdings import HoldingLimits
from ....ipc.server.socket_connection import SocketConnection
from ....wire.frames import HEADER_BYTES, pack_frame
from ..config import EntryConfig
from ..copies.continued_sessions import ContinuedSessions
from ..copies.copies import Copies, PendingChange, call_after
from ..copies.repair import Repair
from ..frames import (
    Fields,
    OpenFrame,
    integer_in,
    is_part_of_answer,
    request_frame,
    values_of,
    with_handle,
    with_mapped_handles,
)
from ..link import ContentKind
from ..nodes.fair_share import FairShare
from ..nodes.moves import Moves
from ..nodes.nodes import NodeLink, Nodes
from ..nodes.upstream import NodeConnections, Upstream, lost_error, result_of
from ..ray_cluster.discovery import discovery_of
from ..routing.homes import (
    HOMES_MAX,
    RECENT_MAX,
    FleetUser,
    NodeTable,
    PromptTable,
    RecentKey,
    SessionKey,
)
from ..routing.loads import OwnTurns
from .contexts import (
    ClientContexts,
    FleetGraph,
    Incarnations,
    OpenContext,
    SuspendedContext,
    daemon_handle,
)
from .passed_descriptors import PassedDescriptors

MODEL_COPIES_MAX = 2
"""Copies of models' files at a time, each with at most two parts in the entry's memory."""
JOBS_MAX = 10_000
TRANSFERS_MAX = 8
"""Requests of a client with buffers at a time; further ones wait."""
_change = msgspec.msgpack.Decoder(CopiedChange)
UNREAD_PAUSE_BYTES = 1 << 20
"""Bytes that a client has not read; above this, nothing is read from its nodes."""


def without_shutdown(error: InferdError) -> InferdError:
    """Convert a node's error for a client: `ShuttingDown` of one node becomes `Busy`, because to a
    client it means the whole fleet.
    """
    if isinstance(error, ShuttingDown):
        return Busy(error.message, data={"cause": "node", **error.data})
    return error


class Withdrawal:
    """The withdrawal of a request from its node, whose messages are held back meanwhile."""

    def __init__(self) -> None:
        self.held: list[OpenFrame] = []
        self._ended = anyio.Event()

    def hold(self, message: OpenFrame) -> None:
        self.held.append(message)
        if message.kind != Kind.EVENT:
            self._ended.set()

    async def was_cancelled(self) -> bool:
        """Wait for the answer, and return whether the entry's own request cancelled the turn."""
        await self._ended.wait()
        answer = self.held[-1]
        if answer.kind != Kind.ERROR:
            return False
        error = error_from_wire(values_of(answer.items[2]))
        return isinstance(error, Cancelled) and "by" not in error.data


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
        self.withdrawal: Withdrawal | None = None
        """Set while it is withdrawn from its node."""


class NameLocks:
    """Locks by name, at most *places* of them held at a time. Owned by the entry's event loop."""

    def __init__(self, places: float = math.inf) -> None:
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._limiter = anyio.CapacityLimiter(places)

    @asynccontextmanager
    async def holding(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of *name* in the `with` block, and then a place."""
        async with self._locks.setdefault(name, anyio.Lock()), self._limiter:
            yield


class Fleet:
    """The state that the clients of an entry share. Lives on the entry's event loop; *group* runs
    its tasks, and *note* prints what an operator should know.

    :raises InvalidArgument: the certificate cannot be used.
    """

    def __init__(
        self, config: EntryConfig, note: Callable[[str], object], group: anyio.abc.TaskGroup
    ):
        settings = config.settings
        self._note, self._group = note, group
        self.nodes = Nodes(config, self._note_found, self._note_lost)
        self.discovery = discovery_of(config, self.nodes, note)
        """The nodes that a Ray cluster publishes, if the configuration names one."""
        self.incarnations = Incarnations(config.state_dir)
        self.homes = NodeTable[SessionKey](HOMES_MAX)
        self.recent = NodeTable[RecentKey](RECENT_MAX)
        self.prompts = PromptTable()
        hello = ClientHello(protocol=PROTOCOL_VERSION, software="inferd fleet")
        self.operator = NodeConnections(self.nodes, hello, group)
        """Acts on the nodes as the relay's user."""
        self.moves = Moves(self.nodes, self.homes, self.operator, note)
        # With connections of its own, as many changes may be on their way.
        storing = NodeConnections(self.nodes, hello, group)
        self.copies = Copies(self.nodes, storing, settings.copies, note, group)
        after_s = settings.follower_after
        self.continued = ContinuedSessions(
            self.copies, self.moves, self.homes, after_s, config.state_dir
        )
        self._repair = Repair(self.copies, self.continued, self.moves, after_s)
        self.places = Places[ClientConnection](settings.connections_max)
        self.job_places = NodeTable[tuple[str, str]](JOBS_MAX)
        """The nodes of jobs and of their files, by user and id."""
        self._last_buffer = 0
        self.buffers = Buffers(self._new_buffer_handle, lambda _: None)
        """The clients' buffers. Nodes have copies of parts, each for one request."""
        self.buffers.held.limits = HoldingLimits(
            user_max=settings.buffers_user_max,
            user_bytes_max=settings.buffer_bytes_user_max,
            bytes_max=settings.buffer_bytes_max,
        )
        self.clients: set[FleetClient] = set()
        self.swaps = NameLocks()
        """The locks of swaps by model: swaps of one name reach all nodes in the same order."""
        self.model_copies = NameLocks(MODEL_COPIES_MAX)
        """The locks of copies of models by node and model, so that a file is copied once."""
        self.metrics_lock = anyio.Lock()
        """Held while a text of metrics is written. A client that requests many of them then takes
        neither the threads, which new connections need, nor the time of the event loop.
        """
        self.stopping = anyio.Event()
        """Set once the entry accepts no new requests, and exits when those under way have ended."""
        self.idle = anyio.Event()
        """Set once an entry that stops has no requests."""

    def _new_buffer_handle(self) -> int:
        """Return a handle that no start of the entry has given before."""
        self._last_buffer += 1
        return self.incarnations.starts << 32 | self._last_buffer

    def open(self) -> None:
        """Read the state directory.

        :raises InvalidArgument: it cannot be used.
        """
        self.incarnations.open()
        self.nodes.drained.open()
        self.continued.promotions.open()
        if self.discovery is not None:
            self.discovery.open()

    async def start(self) -> None:
        """Start the tasks; return once the nodes are known and their interrupted moves ended."""
        await self._group.start(self.nodes.run)
        self._group.start_soon(self._repair.run)
        await self._group.start(self.moves.run, self._repair.reconcile)
        self._group.start_soon(FairShare(self.nodes, self.operator, self._note).run)
        if self.discovery is not None:
            await self._group.start(self.discovery.run)

    def check_idle(self) -> None:
        """Note the end of the last request of an entry that stops."""
        if self.stopping.is_set() and not any(client.requests for client in self.clients):
            self.idle.set()

    def _note_found(self, link: NodeLink) -> None:
        assert link.load is not None
        self.moves.note_found()
        self._note(f"node {link.name} serves at {link.address}: {len(link.load.models)} models")

    def _note_lost(self, link: NodeLink) -> None:
        """Fail the requests on a node that cannot be reached, and report its sessions."""
        contexts = sum(client.lose_node(link.name, link.cause) for client in tuple(self.clients))
        link.counters.contexts_lost += contexts
        self._group.start_soon(self._repair.check_after_loss)
        self.prompts.forget_node(link.name)
        sessions = self.homes.count_on(link.name)
        state = "is lost" if link.counters.losses else "cannot be reached yet"
        place = "" if link.address is None else f" at {link.address}"
        self._note(
            f"node {link.name} {state}{place}: {link.cause}; {contexts} open"
            f" contexts were lost, and {sessions} sessions with an id wait for it"
        )


class ClientConnection(SocketConnection):
    """The socket of a client. `descriptors` has those that the client has passed and no request has
    taken.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        user: UserDescriptors,
        outboxes: SharedLimit,
        loop_time: LoopTime,
        contents: SharedLimit,
    ):
        self.descriptors = PassedDescriptors(user, peer.uid, contents)
        super().__init__(sock, peer, user, self.descriptors, outboxes, loop_time)
        self.client: FleetClient | None = None
        """The client, from its hello on."""

    @property
    def has_requests(self) -> bool:
        return self.client is not None and bool(self.client.requests)

    def outbox_emptied(self) -> None:
        """Read from the client and from its nodes again."""
        if self.client is not None:
            self.client.read_upstreams(reading=True)
        super().outbox_emptied()


class FleetClient(NodeConnections):
    """The state of a client's connection. Lives on the entry's event loop; *group* runs its
    tasks, and those of its connections to nodes.
    """

    def __init__(
        self,
        fleet: Fleet,
        connection: ClientConnection,
        owner: FleetUser,
        hello: ClientHello,
        group: anyio.abc.TaskGroup,
    ):
        super().__init__(fleet.nodes, hello, group)
        self.fleet, self.owner, self.connection = fleet, owner, connection
        self.graphs: dict[int, FleetGraph] = {}
        self.requests: dict[int, ClientRequest] = {}
        self.contexts = ClientContexts(fleet.nodes, fleet.incarnations)
        self.transfers = anyio.CapacityLimiter(TRANSFERS_MAX)
        """The requests under way that have a buffer on a node."""
        self.part_lock = anyio.Lock()
        """Held while a part of a buffer is copied, so that a client has one in memory at a time."""
        self._changes: dict[str, PendingChange] = {}
        """The last change of each session whose copy lacks it yet, by the session's id."""
        self._lost = Counter[str]()
        """Contexts lost with connections, by node, until the loss of the node is reported."""

    def check_operator(self, action: str, right: str) -> None:
        """Check that the user manages the fleet.

        :raises PermissionDenied: the user may not do *action*.
        """
        if self.owner.user:
            raise PermissionDenied(
                f"this user may not {action}",
                hint="the fleet's operators may: root, the entry's user, `operators` in fleet.toml",
                data={"right": right},
            )

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
        self.note_turn(request, params)

    def note_turn(self, request: ClientRequest, params: Fields) -> None:
        """Note a request that was sent to the node of its context, as a turn there if it is one."""
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
        upstream = self._send_request(request, node, params, self._pass_on, has_contents)
        if request.credit:
            self._send_credit(request, upstream, request.credit)

    def _send_request(
        self,
        request: ClientRequest,
        node: str,
        params: Fields,
        handle: Callable[[ClientRequest, Upstream, OpenFrame], None],
        has_contents: bool,
    ) -> Upstream:
        """Send a request to *node* under the client's id; *handle* gets the messages about it."""
        upstream = self.upstream(node)
        frame = request_frame(request.number, request.call, params)
        if has_contents:
            frame = pack_frame([ContentKind.REQUEST, frame[HEADER_BYTES:]])
        upstream.send_request(request.number, frame, partial(handle, request, upstream))
        request.upstream = upstream
        return upstream

    async def exchange(
        self, request: ClientRequest, node: str, params: Fields, *, has_contents: bool = False
    ) -> tuple[Upstream, msgspec.Raw]:
        """Send a request to *node*, with the contents that were sent there; pass its events, and
        return its result.

        :raises InferdError: the request failed.
        """
        sent = self.begin_exchange(request, node, params, has_contents=has_contents)
        return sent[0], await self.end_exchange(request, sent[1])

    def begin_exchange(
        self, request: ClientRequest, node: str, params: Fields, *, has_contents: bool = False
    ) -> tuple[Upstream, asyncio.Future[OpenFrame]]:
        """Send a request to *node*, for `end_exchange`.

        :raises InferdError: the node cannot be reached.
        """
        answer: asyncio.Future[OpenFrame] = asyncio.get_running_loop().create_future()

        def handle(request: ClientRequest, upstream: Upstream, message: OpenFrame) -> None:
            if message.kind == Kind.EVENT:
                self.pass_event(request, upstream, message)
            elif not answer.done():
                answer.set_result(message)

        upstream = self._send_request(request, node, params, handle, has_contents)
        return upstream, answer

    async def end_exchange(
        self, request: ClientRequest, answer: asyncio.Future[OpenFrame]
    ) -> msgspec.Raw:
        """Return the result of a request that `begin_exchange` has sent.

        :raises InferdError: the request failed.
        """
        try:
            result = result_of(await answer)
            await self.wait_copied(request)
            return result
        finally:
            request.upstream = None

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
        if request.turns is not None:
            request.turns.end_turn(request, time.monotonic())
        request.upstream = request.turns = request.withdrawal = None

    def pass_held(self, request: ClientRequest) -> None:
        """Pass on the messages held back for a request that was not withdrawn after all."""
        assert request.withdrawal is not None and request.upstream is not None
        held, request.withdrawal = request.withdrawal.held, None
        for message in held:
            self._pass_on(request, request.upstream, message)
        self.connection.flush()

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
        self.connection.flush()

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
            self.connection.send_frame(frame_of(message.body), flush=False)
            self._note_answered()

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
        request.has_tokens = request.has_tokens or is_part_of_answer(message)
        if request.row.handles_in_events:
            event = self.mapped(upstream, message.items[2], request.row.handles_in_events)
            self.connection.send([int(Kind.EVENT), request.number, event], flush=False)
        else:
            self.connection.send_frame(frame_of(message.body), flush=False)

    def mapped(self, upstream: Upstream, raw: msgspec.Raw, names: frozenset[str]) -> Fields:
        """Return a result or an event of a node with the client's handles."""
        return with_mapped_handles(raw, names, partial(self.contexts.client_handle, upstream))

    def reply(self, request: ClientRequest, result: Mapping[str, Any]) -> None:
        self.requests.pop(request.number, None)
        if request.on_result is not None:
            request.on_result(dict(result))
        self.connection.send([int(Kind.REPLY), request.number, result])
        self._note_answered()

    def fail(self, number: int, error: InferdError) -> None:
        self.requests.pop(number, None)
        self.connection.send([int(Kind.ERROR), number, error.to_wire()])
        self._note_answered()

    def _note_answered(self) -> None:
        self.connection.note_request_ended()
        self.fleet.check_idle()

    # Of its connections to nodes.

    def upstream_read(self) -> None:
        """Send what the nodes have sent; read no more from them while the client does not read."""
        self.connection.flush()
        if self.connection.unsent_bytes > UNREAD_PAUSE_BYTES:
            self.read_upstreams(reading=False)

    def read_upstreams(self, *, reading: bool) -> None:
        for upstream in self.upstreams.values():
            upstream.set_reading(reading)

    def upstream_full(self, upstream: Upstream, *, is_full: bool) -> None:
        """Read nothing from the client while a node does not read."""
        if is_full:
            self.connection.pause_reading(upstream)
        else:
            self.connection.resume_reading(upstream)

    def upstream_lost(self, upstream: Upstream) -> None:
        """Forget the leases and contexts on a node whose connection has ended."""
        super().upstream_lost(upstream)
        self.connection.resume_reading(upstream)
        for graph in self.graphs.values():
            graph.leases.pop(upstream.node, None)
        self._lost[upstream.node] += self.contexts.lose_node(upstream.node)

    def lose_node(self, node: str, cause: str) -> int:
        """Fail the requests on a node that was lost; return how many contexts were lost."""
        upstream = self.upstreams.get(node)
        if upstream is not None:
            upstream.end(lost_error(node, cause))
        return self._lost.pop(node, 0)
