"""The connections of clients: places, handshakes, and the end of those that do not read."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskStatus

from ...ipc.peer import peer_of
from .client_places import ClientPlaces
from .limits import Limits

STALLED_S = 1.0
"""The time after which a client that has not read counts as one that does not read. Every client is
slower than the gateway for a moment.
"""
READ_BYTES_MIN = 64 << 10
"""The bytes that a client must read within the time; else it could keep an answer forever."""
UNREAD_MAX = 16
"""Connections of one group at once whose client does not read. Each keeps a turn in the daemon."""
UNREAD_BYTES_MAX = 128 << 20
"""Bytes that all these connections keep. One group has at most as many as are free."""
C = TypeVar("C")


@dataclass(slots=True)
class _Unread:
    group: str
    size: int
    since: float


class UnreadClients(Generic[C]):
    """The connections whose write buffer is full. All methods are synchronous.

    A group is a caller, or an address. So one caller's clients that do not read take neither turns
    nor memory from others.
    """

    def __init__(self, seconds_max: float):
        self._seconds_max = seconds_max
        self._found: dict[C, _Unread] = {}

    def add(self, client: C, group: str, size: int, now: float) -> None:
        """Add a connection whose buffer has become full."""
        self._found[client] = _Unread(group, size, now)

    def remove(self, client: C) -> None:
        """Remove a connection whose client has read, or that has ended."""
        self._found.pop(client, None)

    def overdue(self, now: float, size_of: Callable[[C], int]) -> Mapping[C, str]:
        """Return the connections to cut off, each with the reason."""
        stalled: dict[str, list[tuple[float, int, C]]] = defaultdict(list)
        for client, unread in self._found.items():
            size = size_of(client)
            if size <= unread.size - READ_BYTES_MIN:
                unread.size, unread.since = size, now
            if now - unread.since >= STALLED_S:
                stalled[unread.group].append((unread.since, size, client))
        cut: dict[C, str] = {}
        for clients in stalled.values():
            clients.sort(key=lambda each: each[0])
            for number, (since, _, client) in enumerate(clients):
                if now - since >= self._seconds_max:
                    cut[client] = "time"
                elif len(clients) - number > UNREAD_MAX:
                    cut[client] = "connections"
        self._cut_bytes(stalled, cut)
        return cut

    def _cut_bytes(
        self, stalled: Mapping[str, list[tuple[float, int, C]]], cut: dict[C, str]
    ) -> None:
        """Cut off the connections of the largest group, until no group has more than are free."""
        kept = {
            group: [each for each in clients if each[2] not in cut]
            for group, clients in stalled.items()
        }
        sizes = {group: sum(size for _, size, _ in clients) for group, clients in kept.items()}
        while sizes:
            group = max(sizes, key=lambda each: sizes[each])
            if sizes[group] <= max(UNREAD_BYTES_MAX - sum(sizes.values()), 0):
                return
            _, size, client = kept[group].pop(0)
            sizes[group] -= size
            cut[client] = "bytes"
            if not kept[group]:
                del sizes[group]


log = logging.getLogger(__name__)
_WATCH_PAUSE_S = 1.0
_IPV6_PREFIX = 64
"""The bits that the addresses of one IPv6 client have in common; the others it may choose."""


Handshake = Callable[[], Coroutine[Any, Any, None]]


class ClientConnection(Protocol):
    """A connection, as this module closes it."""

    @property
    def unread_bytes(self) -> int:
        """The bytes that the client has not read."""

    def abort(self) -> None:
        """Cut the connection off."""


class Clients:
    """All connections of clients. They belong to the event loop."""

    def __init__(self, limits: Limits):
        self._places: ClientPlaces[ClientConnection] = ClientPlaces(limits.clients_max)
        self._unread: UnreadClients[ClientConnection] = UnreadClients(limits.receive_s_max)
        self._handshakes: deque[Handshake] = deque()
        """The handshakes that have not begun. Each belongs to a connection that is counted."""
        self._waiting: anyio.Event | None = None
        """Set when there is a handshake to begin."""

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run the handshakes, and cut off the connections whose client does not read, until
        cancelled.
        """
        self._waiting = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(self._cut_unread)
            task_status.started()
            while True:
                await self._waiting.wait()
                self._waiting = anyio.Event()
                while self._handshakes:
                    group.start_soon(self._handshakes.popleft())

    async def _cut_unread(self) -> None:
        while True:
            await anyio.sleep(_WATCH_PAUSE_S)
            overdue = self._unread.overdue(time.monotonic(), lambda each: each.unread_bytes)
            for client, bound in overdue.items():
                group = self._places.group_of(client)
                log.warning("client.unread bound=%s group=%s", bound, group)
                client.abort()

    def start_handshake(self, handshake: Handshake) -> None:
        """Run the handshake of a new connection. This may be called outside of tasks."""
        assert self._waiting is not None, "`run` begins before the server listens"
        self._handshakes.append(handshake)
        self._waiting.set()

    def add(self, client: ClientConnection, address: str) -> None:
        """Add a new connection; an older one may be closed for it."""
        self._close(self._places.add_arriving(client, address))

    def take_place(self, client: ClientConnection, group: str) -> None:
        """Give a connection a place unless it has one; another one may be closed for it.

        :raises Busy: no place is free, and no connection may be closed.
        """
        self._close(self._places.take_place(client, group))

    def withdraw_place(self, client: ClientConnection, address: str) -> None:
        """Take the place of a connection whose key is no longer known."""
        self._places.withdraw_place(client, address)

    def note_busy(self, client: ClientConnection) -> None:
        """Note that a connection has a request."""
        self._places.note_busy(client)

    def note_idle(self, client: ClientConnection) -> None:
        """Note that a connection has no request."""
        self._places.note_idle(client)

    def note_unread(self, client: ClientConnection) -> None:
        """Note that the write buffer of a connection is full."""
        if client in self._places:
            group = self._places.group_of(client)
            self._unread.add(client, group, client.unread_bytes, time.monotonic())

    def note_read(self, client: ClientConnection) -> None:
        """Note that the client of a connection has read most of its data."""
        self._unread.remove(client)

    def remove(self, client: ClientConnection) -> None:
        """Remove a connection that has ended."""
        self._places.remove(client)
        self._unread.remove(client)

    def _close(self, client: ClientConnection | None) -> None:
        if client is not None:
            log.debug("client.closed cause=place")
            self._unread.remove(client)
            client.abort()


def address_of(transport: Any) -> str:
    """Return the address of a connection's client, without its port: for TCP that of its network,
    for a Unix socket its user.
    """
    sock: socket.socket = transport.get_extra_info("socket")
    if sock.family == socket.AF_UNIX:
        return f"uid {peer_of(sock).uid}"
    return _network_of(transport.get_extra_info("peername")[0])


def _network_of(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    return host
