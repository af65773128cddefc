"""The process of an entry: its clients, its nodes, its signals."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection
from importlib.metadata import version
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from ....backends.errors import (
    BackendError,
    InferdError,
    ProtocolError,
    SessionBusy,
    VersionMismatch,
)
from ....ipc.messages import PROTOCOL_VERSION, ClientHello, Kind
from ....ipc.names import check_label, check_user_name
from ....ipc.peer import peer_of
from ....ipc.server.acceptor import Acceptor
from ....ipc.server.connection_places import Places
from ....ipc.server.descriptors import ClientDescriptors
from ....ipc.server.fairness import LoopTime, SharedLimit
from ....ipc.server.listener import UnixListener
from ....ipc.server.outbox import OUTBOXES_BYTES_MAX
from ....wire.frames import pack_frame
from ..calls.frames import Fields, open_message
from ..copies.copies import Copies
from ..draining.draining import drain_node, move_open
from ..draining.moves import Moves
from ..fair_share.exchange import FairShare
from ..metrics.scrape import FleetMetrics, MetricsListener
from ..routing.prompts import PromptTable
from .clients.client import ClientRequest, FleetClient
from .clients.connection import ClientConnection
from .clients.contexts import SuspendedContext
from .clients.incarnations import Incarnations
from .clients.passed_descriptors import SENT_BYTES_MAX
from .config import EntryConfig
from .dispatcher import Dispatcher
from .nodes.discovery import discovery_of
from .nodes.node_link import NodeLink
from .nodes.nodes import Nodes
from .placing.homes import HOMES_MAX, RECENT_MAX, FleetUser, NodeTable, RecentKey, SessionKey
from .placing.new_contexts import OPEN_S_MAX
from .several_nodes.copying import COPIES_MAX
from .several_nodes.name_locks import NameLocks
from .users import UserRules, is_operator, name_of, user_on_nodes

HELLO_S_MAX = 10.0
STOP_S_MAX = 30.0
"""Time that requests have to end after `inferd stop`, as on a daemon."""
SOFTWARE_CHARACTERS = 200
_hello = msgspec.msgpack.Decoder(ClientHello)


class Entry:
    """The entry of a fleet. *note* prints what an operator should know."""

    def __init__(self, config: EntryConfig, note: Callable[[str], object]):
        settings = config.settings
        self.nodes = Nodes(config, self._note_found, self._note_lost)
        self._discovery = discovery_of(config, self.nodes, note)
        self.incarnations = Incarnations(config.state_dir)
        self.homes = NodeTable[SessionKey](HOMES_MAX)
        self.recent = NodeTable[RecentKey](RECENT_MAX)
        self.prompts = PromptTable()
        self.swaps, self.model_copies = NameLocks(), NameLocks(COPIES_MAX)
        self.stopping = anyio.Event()
        self._idle = anyio.Event()
        """Set once an entry that stops has no requests."""
        self._config, self._note = config, note
        self.copies = Copies(self, settings.copies, settings.follower_after, config.state_dir, note)
        self.moves = Moves(self, note, self.copies.reconcile)
        self.moves.on_moved = self.copies.check_soon
        self.metrics = FleetMetrics(self)
        self._fair_share = FairShare(self, note)
        self._rules = UserRules(settings.users, settings.operators, settings.delegates)
        self._places = Places[ClientConnection](settings.connections_max)
        self._descriptors = ClientDescriptors()
        self._outboxes = SharedLimit(OUTBOXES_BYTES_MAX)
        self._contents = SharedLimit(SENT_BYTES_MAX)
        self._clients: set[FleetClient] = set()
        self._software = f"inferd/{version('inferd')} fleet"

    async def run(self, on_ready: Callable[[str], object]) -> signal.Signals | None:
        """Serve clients until SIGTERM or SIGINT, and return that signal, or None if an operator has
        stopped the entry.

        :raises InvalidArgument: the state directory or the socket cannot be used.
        :raises Busy: another program listens on the socket.
        """
        self.incarnations.open()
        self.nodes.drained.open()
        self.copies.continued.promotions.open()
        if self._discovery is not None:
            self._discovery.open()
        listener = UnixListener(str(self._config.socket), self._config.socket_mode, gateway=True)
        try:
            listener.bind()
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async with anyio.create_task_group() as group:
                    await group.start(self.nodes.run)
                    await group.start(self.copies.run)
                    await group.start(self.moves.run)
                    await group.start(self.metrics.run)
                    group.start_soon(self._fair_share.run)
                    if self._discovery is not None:
                        await group.start(self._discovery.run)
                    group.start_soon(self._accept, listener.socket, group)
                    on_ready(listener.path)
                    if not self._config.metrics.is_off:
                        address = self._config.metrics
                        pages = MetricsListener(self, self.metrics, address, self._note)
                        group.start_soon(pages.run)
                    ended_by = await self._until_stopped(signals)
                    group.cancel_scope.cancel()
        finally:
            self._descriptors.end_lingering()
            listener.close()
        return ended_by

    async def _until_stopped(self, signals: AsyncIterator[signal.Signals]) -> signal.Signals | None:
        """Wait for a signal and return it, or until an operator has stopped the entry and its
        requests have ended.
        """
        ended_by = None
        async with anyio.create_task_group() as waiting:

            async def wait_for_requests() -> None:
                await self.stopping.wait()
                self._check_idle()
                with anyio.move_on_after(STOP_S_MAX):
                    await self._idle.wait()
                waiting.cancel_scope.cancel()

            waiting.start_soon(wait_for_requests)
            ended_by = await anext(signals)
            waiting.cancel_scope.cancel()
        return ended_by

    def _check_idle(self) -> None:
        """Note the end of the last request of an entry that stops."""
        if self.stopping.is_set() and not any(client.requests for client in self._clients):
            self._idle.set()

    async def _accept(self, listener: socket.socket, group: anyio.abc.TaskGroup) -> None:
        listener.setblocking(False)

        def note_failure(exc: OSError) -> None:
            self._note(f"cannot accept clients: {exc}")

        acceptor = Acceptor(self._descriptors, LoopTime(), note_failure)
        await acceptor.accept_connections(
            listener, lambda sock: group.start_soon(self._serve, sock)
        )

    async def _serve(self, sock: socket.socket) -> None:
        peer = peer_of(sock)
        user = self._descriptors.of_user(peer.uid)
        hello = self.nodes.hello(self._software, self.incarnations.starts)
        connection = ClientConnection(
            sock, peer, user, self._outboxes, self._contents, hello.limits.frame_bytes_max
        )
        try:
            connection.add_frame(pack_frame([int(Kind.HELLO), hello]))
            connection.flush()
            name = await self._admit(connection)
            async with anyio.create_task_group() as group:
                await self._exchange(connection, name, hello.limits.requests_max, group)
                group.cancel_scope.cancel()
        except InferdError as exc:
            connection.send_goodbye(exc)
        except ExceptionGroup as exc_group:
            connection.send_goodbye(_refusal(exc_group))
        finally:
            self._places.release_place(connection)
            connection.close()

    async def _admit(self, connection: ClientConnection) -> str:
        """Give a client a place, and return the name of its user.

        :raises Busy: no place is free.
        """
        name = await anyio.to_thread.run_sync(name_of, connection.uid)
        connection.is_operator = is_operator(connection.uid, name, self._rules)
        closed = self._places.take_place(connection)
        if closed is not None:
            closed.end(self._places.closed_for_another(closed))
        return name

    async def _exchange(
        self,
        connection: ClientConnection,
        name: str,
        requests_max: int,
        group: anyio.abc.TaskGroup,
    ) -> None:
        client: FleetClient | None = None
        dispatch: Callable[[bytes], None] | None = None

        def handle_frame(body: bytes) -> None:
            nonlocal client, dispatch
            if dispatch is not None:
                dispatch(body)
                return
            timer.cancel()
            client = self._greet(connection, name, body, group)
            dispatch = Dispatcher(client, connection, requests_max).handle_frame

        timer = _EndLater(connection)
        try:
            await connection.receive(handle_frame)
        finally:
            timer.cancel()
            if client is not None:
                self._clients.discard(client)
                client.close()
                self._check_idle()

    def _greet(
        self,
        connection: ClientConnection,
        name: str,
        body: bytes,
        group: anyio.abc.TaskGroup,
    ) -> FleetClient:
        """Return the state of a client that has sent its hello.

        :raises InferdError: the hello cannot be read, or the user may not act as it says.
        """
        hello = read_hello(body)
        user = user_on_nodes(connection.uid, name, hello.on_behalf_of, self._rules)
        own = msgspec.structs.replace(
            hello,
            on_behalf_of=user,
            software=hello.software[:SOFTWARE_CHARACTERS],
            copies=self.copies.are_wanted,
        )
        client = FleetClient(self, connection, FleetUser(user, hello.label), own, group)
        connection.is_idle = lambda: not client.requests
        connection.on_emptied = lambda: client.read_upstreams(reading=True)

        def note_end() -> None:
            connection.request_ended()
            self._check_idle()

        client.on_idle = note_end
        self._clients.add(client)
        return client

    @property
    def clients(self) -> Collection[FleetClient]:
        """The clients that are connected."""
        return self._clients

    @property
    def operator(self) -> FleetClient:
        """The client that acts on the nodes as the relay's user."""
        return self.moves.operator

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._places.holders)

    @property
    def connections_max(self) -> int:
        """The maximum number of connections."""
        return self._config.settings.connections_max

    @property
    def is_stopping(self) -> bool:
        """Whether the entry accepts no new requests."""
        return self.stopping.is_set()

    @property
    def ray_answers(self) -> bool | None:
        """Whether Ray answers; None where Ray publishes no nodes."""
        return None if self._discovery is None else self._discovery.answers

    async def drain_node(
        self, client: FleetClient, request: ClientRequest, params: Fields
    ) -> Fields:
        """Move the sessions of a node to other nodes, or use the node again."""
        return await drain_node(self, client, params)

    async def move_open(
        self, client: FleetClient, suspended: SuspendedContext, target: str
    ) -> None:
        """Move the session of a suspended context to the node *target*, if that takes no longer
        than OPEN_S_MAX.
        """
        key = SessionKey(client.owner, suspended.context.session_id)
        if not self.moves.is_settled(key):
            raise SessionBusy("the session moves already")
        await move_open(self.moves, client, suspended, target, OPEN_S_MAX)

    def _note_found(self, link: NodeLink) -> None:
        assert link.load is not None
        self.moves.note_found()
        self._note(f"node {link.name} serves at {link.address}: {len(link.load.models)} models")

    def _note_lost(self, link: NodeLink) -> None:
        """Fail the requests on a node that cannot be reached, and report its sessions."""
        contexts = sum(client.lose_node(link.name, link.cause) for client in tuple(self._clients))
        link.counters.contexts_lost += contexts
        self.copies.note_lost()
        self.prompts.forget_node(link.name)
        sessions = self.homes.count_on(link.name)
        state = "is lost" if link.counters.losses else "cannot be reached yet"
        place = "" if link.address is None else f" at {link.address}"
        self._note(
            f"node {link.name} {state}{place}: {link.cause}; {contexts} open"
            f" contexts were lost, and {sessions} sessions with an id wait for it"
        )


class _EndLater:
    """Ends a connection whose client sends no hello."""

    def __init__(self, connection: ClientConnection):
        error = ProtocolError(f"no hello within {HELLO_S_MAX:g} s")
        loop = connection.loop
        self._handle = loop.call_later(HELLO_S_MAX, connection.end, error)

    def cancel(self) -> None:
        """Note that the hello has arrived, or that the connection has ended."""
        self._handle.cancel()


def read_hello(body: bytes) -> ClientHello:
    """Return a client's hello.

    :raises InferdError: it cannot be read, or is of another version.
    """
    message = open_message(body)
    if message.kind != Kind.HELLO:
        raise ProtocolError("the first frame is not a hello")
    try:
        hello = _hello.decode(message.items[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"the hello cannot be read: {exc}") from None
    if hello.protocol[0] != PROTOCOL_VERSION[0]:
        raise VersionMismatch(
            f"the client speaks version {hello.protocol[0]} of the protocol, this fleet version"
            f" {PROTOCOL_VERSION[0]}",
            data={"protocol": list(PROTOCOL_VERSION)},
        )
    check_label(hello.label)
    check_user_name(hello.on_behalf_of)
    return hello


def _refusal(group: ExceptionGroup[Any]) -> InferdError:
    """Return the error that ended a connection; any other exception is a bug of the entry."""
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, InferdError):
        return first
    return BackendError(f"the connection failed inside the entry: {first!r}")


def run_entry(
    config: EntryConfig, *, on_ready: Callable[[str], object], note: Callable[[str], object]
) -> signal.Signals | None:
    """Serve a fleet until SIGTERM or SIGINT; see `Entry.run`."""
    entry = Entry(config, note)
    return anyio.run(entry.run, on_ready)
