"""The connections whose client does not read, and the choice of those to cut off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

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
