"""The queue of worker starts: few models are loaded at once, and users take turns.

A load has a place from its worker's start until the model is loaded or waits for memory. Without
the queue, one user's loads of many small files would take all cores.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import count
from typing import NamedTuple

import anyio

from ...scheduler import Priority

LOADS_MAX = 3
"""Loads with a place."""
LOADS_USER_MAX = 2
"""Loads of one user with a place: one is left for another user, even if a file is read slowly."""


class QueuedLoad(NamedTuple):
    """A load that waits for a place; *owner* is the user who needs it, None: the daemon."""

    priority: Priority
    owner: int | None
    number: int


def next_load(
    waiting: Iterable[QueuedLoad], loading: Iterable[int | None], served: dict[int | None, int]
) -> QueuedLoad | None:
    """Return the next load to get a place, or None. *loading* are the owners of the loads that have
    one. *served* numbers the users' latest loads: within a priority class, the user whose latest
    load began first is next.
    """
    places = list(loading)
    if len(places) >= LOADS_MAX:
        return None
    found = [load for load in waiting if places.count(load.owner) < LOADS_USER_MAX]
    return min(
        found,
        key=lambda load: (-load.priority, served.get(load.owner, -1), load.number),
        default=None,
    )


class LoadQueue:
    """Lives on the daemon's event loop. A *key* stands for a load, such as its worker."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[QueuedLoad, anyio.Event]] = {}
        self._loading: dict[Hashable, int | None] = {}
        self._served: dict[int | None, int] = {}
        self._numbers = count()

    async def wait_for_place(self, key: Hashable, priority: Priority, owner: int | None) -> None:
        """Wait until a load may begin; `leave` gives up its place, or its wait."""
        load, granted = QueuedLoad(priority, owner, next(self._numbers)), anyio.Event()
        self._waiting[key] = load, granted
        self._grant_places()
        try:
            await granted.wait()
        except BaseException:
            self.leave(key)
            raise

    def end_wait(self, key: Hashable) -> None:
        """End a load's wait for a place without a place."""
        _, granted = self._waiting.pop(key, (None, None))
        if granted is not None:
            granted.set()

    def leave(self, key: Hashable) -> None:
        """Give up a load's place, or end its wait for one."""
        self.end_wait(key)
        if self._loading.pop(key, self) is not self:
            self._grant_places()

    def _grant_places(self) -> None:
        loads = {load: key for key, (load, _) in self._waiting.items()}
        while (chosen := next_load(loads, self._loading.values(), self._served)) is not None:
            key = loads.pop(chosen)
            _, granted = self._waiting.pop(key)
            self._loading[key], self._served[chosen.owner] = chosen.owner, next(self._numbers)
            granted.set()
        users = {load.owner for load in loads} | set(self._loading.values())
        self._served = {owner: at for owner, at in self._served.items() if owner in users}
