"""The places of clients' connections: which connections stay open, and which one is closed for
another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from ...backends.errors import Busy, QuotaExceeded

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
