"""The groups of users without a connection, as the system's database has them.

The database may be a server on the network that takes minutes. It is therefore read in a thread.
Until it answers, the previous answer counts, if there is one.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection

from ...ipc.peer import groups_of_user
from ...ipc.server.descriptors import BlockingThread

USERS_MAX = 4096
"""Users whose groups are remembered."""


class UserGroups:
    """The groups of users by uid. Lives on the daemon's event loop; no method waits."""

    def __init__(self, read_groups: Callable[[int], Collection[int]] = groups_of_user):
        self._read_groups = read_groups
        self._groups: dict[int, Collection[int]] = {}
        self._outdated: set[int] = set()
        self._reading: set[int] = set()
        self._results: queue.SimpleQueue[tuple[int, Collection[int]]] = queue.SimpleQueue()
        self._thread = BlockingThread("user-groups")

    def note_groups(self, uid: int, groups: Collection[int]) -> None:
        """Remember the groups of a user's last connection."""
        self._groups.pop(uid, None)
        self._groups[uid] = groups
        self._outdated.discard(uid)
        if len(self._groups) > USERS_MAX:
            first = next(iter(self._groups))
            del self._groups[first]
            self._outdated.discard(first)

    def groups_of(self, uid: int) -> Collection[int] | None:
        """Return the groups of a user, or None while the database has not answered."""
        while not self._results.empty():
            read, groups = self._results.get()
            self._reading.discard(read)
            self.note_groups(read, groups)
        if uid not in self._groups or uid in self._outdated:
            self._begin_reading(uid)
        return self._groups.get(uid)

    def _begin_reading(self, uid: int) -> None:
        if uid not in self._reading and len(self._reading) < USERS_MAX:
            self._reading.add(uid)
            self._thread.submit(lambda: self._results.put((uid, self._read_groups(uid))))

    def read_again(self) -> None:
        """Read the groups of all users again when they are needed."""
        self._outdated.update(self._groups)
