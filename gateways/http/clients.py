"""The connections of clients: which ones stay open, and which one is closed for another;
handshakes, and the end of those that do not read.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

import anyio
from anyio.abc import TaskStatus

from ...backends.errors import Busy, QuotaExceeded
from ...ipc.peer import peer_of
from .limits import Limits

SHARE = 8
"""The part of the connections that are never places, and the part of the places that one group does
not get: an eighth.
"""
RETRY_AFTER_S = 1.0
C = TypeVar("C")


@dataclass(slots=True, eq=False)
class _Group(Generic[C]):
    """The connections of a group, with the numbers of the changes by which they became idle or got
    a request; so the first one has been idle, or busy, for longest.
    """

    idle: dict[C, int] = field(default_factory=dict)
    busy: dict[C, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)


class _Part(Generic[C]):
    """Connections in groups."""

    def __init__(self) -> None:
        self.groups: dict[str, _Group[C]] = {}
        self.size = 0

    def held_by(self, group: str) -> int:
        return len(self.groups.get(group, ()))

    def add(self, client: C, group: str, number: int, *, busy: bool) -> None:
        found = self.groups.setdefault(group, _Group())
        (found.busy if busy else found.idle)[client] = number
        self.size += 1

    def remove(self, client: C, group: str) -> bool:
        """Remove a connection; return whether it had a request."""
        found = self.groups[group]
        busy = found.busy.pop(client, None) is not None
        found.idle.pop(client, None)
        if not found:
            del self.groups[group]
        self.size -= 1
        return busy

    def idle_longest(self, newcomer: str) -> C | None:
        """Return the connection that has been idle for longest, of the largest group that has idle
        ones. A connection of the *newcomer* counts already, so that two groups do not close each
        other's connections in turn.
        """
        candidates = (
            (-len(each) - (name == newcomer), next(iter(each.idle.items())))
            for name, each in self.groups.items()
            if each.idle
        )
        return _first(candidates)

    def busy_longest(self) -> C | None:
        """Return the connection with the oldest request, of the largest group."""
        candidates = (
            (-len(each), next(iter(each.busy.items())))
            for each in self.groups.values()
            if each.busy
        )
        return _first(candidates)


def _first(candidates: Iterator[tuple[int, tuple[C, int]]]) -> C | None:
    found = min(candidates, key=lambda each: (each[0], each[1][1]), default=None)
    return None if found is None else found[1][0]


class ClientPlaces(Generic[C]):
    """The open connections. All methods are synchronous.

    A connection *arrives* without a place. It gets one by its first request that is allowed, with
    keys one with a known key, and keeps it until it ends. Connections without a place share an
    eighth of the maximum and the places that are free. At the maximum, one of them is closed for a
    newcomer, of the address that has most of them. So they cannot crowd out connections with a
    place, and a burst of newcomers can be as large as the gateway has free places.

    A place belongs to a *group*: a caller, or without keys an address. One group has at most seven
    eighths of the places. When no place is free, a connection without a request is closed, of the
    group that has most. A connection with a place and a request is never closed.
    """

    def __init__(self, clients_max: int):
        self.clients_max = clients_max
        self.places_max = max(1, clients_max - max(1, clients_max // SHARE))
        self.group_max = max(1, self.places_max - self.places_max // SHARE)
        self._arriving, self._placed = _Part[C](), _Part[C]()
        self._groups: dict[C, tuple[_Part[C], str]] = {}
        self._changes = count()

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, client: C) -> bool:
        return client in self._groups

    def group_of(self, client: C) -> str:
        """Return the group of an open connection: its address until it has a place."""
        return self._groups[client][1]

    def has_place(self, client: C) -> bool:
        """Return whether a connection has a place."""
        return client in self._groups and self._groups[client][0] is self._placed

    def add_arriving(self, client: C, address: str) -> C | None:
        """Add a new connection; return the connection to close for it, if there is one."""
        closed = None
        if len(self) >= self.clients_max:
            closed = self._arriving.idle_longest(address)
            if closed is None:
                closed = self._arriving.busy_longest()
            if closed is not None:
                self.remove(closed)
        self._add(self._arriving, client, address, busy=False)
        return closed

    def _add(self, part: _Part[C], client: C, group: str, *, busy: bool) -> None:
        part.add(client, group, next(self._changes), busy=busy)
        self._groups[client] = part, group

    def take_place(self, client: C, group: str) -> C | None:
        """Give an open connection a place unless it has one; return the connection to close for it,
        if there is one.

        :raises Busy: no place is free, and no connection may be closed.
        """
        if client not in self._groups or self.has_place(client):
            return None
        closed = self._closable_for(group)
        if closed is not None:
            self.remove(closed)
        busy = self._arriving.remove(client, self.group_of(client))
        self._add(self._placed, client, group, busy=busy)
        return closed

    def _closable_for(self, group: str) -> C | None:
        """Return the connection to close for one of *group*, or None if a place is free."""
        held = self._placed.held_by(group)
        if held >= self.group_max:
            idle = self._placed.groups[group].idle
            if not idle:
                raise QuotaExceeded(
                    f"the caller has {held} connections with a request under way, its maximum",
                    hint="send requests when others have ended",
                    data=self._data(),
                )
            return next(iter(idle))
        if self._placed.size < self.places_max:
            return None
        closed = self._placed.idle_longest(group)
        if closed is None:
            raise Busy(
                f"the gateway has {self._placed.size} connections with a request under way, its"
                " maximum",
                hint="try again, or start the gateway with a larger --clients-max",
                data=self._data(),
            )
        return closed

    def _data(self) -> dict[str, float | str]:
        data = {"clients_max": self.clients_max, "retry_after_s": RETRY_AFTER_S}
        return {"bound": "clients-max", **data}

    def withdraw_place(self, client: C, address: str) -> None:
        """Take the place of a connection whose key is no longer known."""
        if self.has_place(client):
            busy = self._placed.remove(client, self.group_of(client))
            self._add(self._arriving, client, address, busy=busy)

    def note_busy(self, client: C) -> None:
        """Note that a connection has a request."""
        self._note(client, busy=True)

    def note_idle(self, client: C) -> None:
        """Note that a connection has no request."""
        self._note(client, busy=False)

    def _note(self, client: C, *, busy: bool) -> None:
        if client in self._groups:
            part, group = self._groups[client]
            found = part.groups[group]
            if client not in (found.busy if busy else found.idle):
                part.remove(client, group)
                part.add(client, group, next(self._changes), busy=busy)

    def remove(self, client: C) -> None:
        """Remove a connection, if it is one of these."""
        if client in self._groups:
            part, group = self._groups.pop(client)
            part.remove(client, group)


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
    uid = uid_of(transport)
    if uid is not None:
        return f"uid {uid}"
    return _network_of(transport.get_extra_info("peername")[0])


def uid_of(transport: Any) -> int | None:
    """Return the user of a Unix socket's peer, or None for other connections."""
    sock: socket.socket = transport.get_extra_info("socket")
    return peer_of(sock).uid if sock.family == socket.AF_UNIX else None


def _network_of(host: str) -> str:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
    return host
