"""The nodes that have clients' sessions and recent contexts, remembered within bounds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

HOMES_MAX = 100_000
RECENT_MAX = 10_000


class FleetUser(NamedTuple):
    """The owner of sessions: a user as nodes know it, and a label."""

    user: str
    label: str


class SessionKey(NamedTuple):
    """A session with an id."""

    owner: FleetUser
    session_id: str


class RecentKey(NamedTuple):
    """An owner's use of a model."""

    owner: FleetUser
    model: str


K = TypeVar("K")


class NodeTable(Generic[K]):
    """Nodes by key, of which the least recently used are forgotten. Owned by the entry's loop."""

    def __init__(self, size_max: int):
        self._size_max = size_max
        self._nodes: OrderedDict[K, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, key: K) -> str | None:
        node = self._nodes.get(key)
        if node is not None:
            self._nodes.move_to_end(key)
        return node

    def put(self, key: K, node: str) -> None:
        self._nodes[key] = node
        self._nodes.move_to_end(key)
        if len(self._nodes) > self._size_max:
            self._nodes.popitem(last=False)

    def drop(self, key: K) -> None:
        self._nodes.pop(key, None)

    def count_on(self, node: str) -> int:
        return sum(found == node for found in self._nodes.values())
