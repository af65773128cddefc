"""The queue of worker starts: few models are loaded at once, and users take turns.

A load has a place from its worker's start until the model is loaded. It gives the place up while it
waits for memory, and gets the memory only together with another place. Without the queue, one
user's loads of many small files would take all cores. While models compute for other users, a user
who has just loaded models waits before the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable
from itertools import count
from typing import NamedTuple

import anyio

from ...ipc.server.fairness import TimeShares
from ...scheduler import Priority

LOADS_MAX = 3
"""Maximum number of loads with a place."""
LOADS_USER_MAX = 2
"""The same for one user, so that one is left for another user even if files are read slowly."""
LOAD_SHARE, LOAD_BURST_S, LOAD_PAUSE_S = 0.1, 2.0, 5.0
"""The part of the time that one user's loads take while models compute for others, the time that
they may take at once, and the longest wait for the next load.
"""


class QueuedLoad(NamedTuple):
    """A load that waits for a place; *owner* is the user who needs it, or None for the daemon."""

    priority: Priority
    owner: int | None
    number: int


def next_load(
    waiting: Iterable[QueuedLoad],
    loading: Iterable[int | None],
    served: dict[int | None, int],
    stuck: Iterable[int | None] = (),
) -> QueuedLoad | None:
    """Return the next load to get a place, or None. *loading* are the owners of the loads that have
    one, *stuck* those of `LoadQueue.note_stuck`. *served* has the number of each user's latest
    load: within a priority class, the user whose latest load began first is next.
    """
    places = list(loading)
    if len(places) >= LOADS_MAX:
        return None
    places += stuck
    found = [load for load in waiting if places.count(load.owner) < LOADS_USER_MAX]
    return min(
        found,
        key=lambda load: (-load.priority, served.get(load.owner, -1), load.number),
        default=None,
    )


class LoadQueue:
    """Grants places to loads. A *key* stands for a load, such as its worker. Lives on the daemon's
    event loop.

    *serves_others* returns whether models compute for other users than the given one.
    """

    def __init__(self, serves_others: Callable[[int], bool], clock: Callable[[], float]):
        self._serves_others, self._clock = serves_others, clock
        self._shares = TimeShares(LOAD_SHARE, LOAD_BURST_S, LOAD_PAUSE_S, clock)
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Hashable, tuple[QueuedLoad, anyio.Event]] = {}
        self._loading: dict[Hashable, tuple[QueuedLoad, float]] = {}
        """The loads that have a place, and when each got it."""
        self._suspended: dict[Hashable, QueuedLoad] = {}
        """The loads that wait for memory."""
        self._stuck: dict[Hashable, int | None] = {}
        self._served: dict[int | None, int] = {}
        self._numbers = count()

    def request_place(self, key: Hashable, priority: Priority, owner: int | None) -> None:
        """Queue a load for a place, which it may get at once."""
        load = QueuedLoad(priority, owner, next(self._numbers))
        self._waiting[key] = load, anyio.Event()
        self.grant_places()

    async def wait_for_place(self, key: Hashable) -> None:
        """Wait until a queued load has a place or ends its wait; `leave` gives the place up."""
        _, granted = self._waiting.get(key, (None, None))
        if granted is None:
            return
        try:
            await granted.wait()
        except BaseException:
            self.leave(key)
            raise

    def has_place(self, key: Hashable) -> bool:
        """Return whether a load has a place."""
        return key in self._loading

    def suspend(self, key: Hashable) -> None:
        """Give up the place of a load, or its wait for one, while it waits for memory."""
        found = self._loading.get(key) or self._waiting.get(key)
        if found is not None:
            self.end_wait(key)
            self._suspended[key] = found[0]
            self._give_up_place(key)

    def claim_place(self, key: Hashable) -> bool:
        """Queue a load again if it was suspended; return whether it now has a place, granted in the
        order of all loads.
        """
        load = self._suspended.pop(key, None)
        if load is not None:
            self._waiting[key] = load, anyio.Event()
        if key in self._waiting:
            self.grant_places()
        return self.has_place(key)

    def is_paused(self, key: Hashable) -> bool:
        """Return whether a load without a place waits because its owner has just loaded models."""
        load, _ = self._waiting.get(key, (self._suspended.get(key), None))
        return load is not None and self._pause_s(load.owner) > 0

    def end_wait(self, key: Hashable) -> None:
        """End a load's wait for a place without granting it one."""
        _, granted = self._waiting.pop(key, (None, None))
        if granted is not None:
            granted.set()

    def note_stuck(self, key: Hashable) -> None:
        """Give the place of a load whose process does not end to another user. Its own user may
        have one load less until `leave`, so that such processes do not pile up.
        """
        if key in self._loading:
            self._stuck[key] = self._loading[key][0].owner
            self._give_up_place(key)

    def _give_up_place(self, key: Hashable) -> None:
        load, began_s = self._loading.pop(key, (None, 0.0))
        if load is not None and load.owner is not None:
            self._shares.charge(load.owner, self._clock() - began_s)
        self.grant_places()

    def leave(self, key: Hashable) -> None:
        """Give up a load's place, or end its wait for one."""
        self.end_wait(key)
        self._stuck.pop(key, None)
        self._suspended.pop(key, None)
        self._give_up_place(key)

    def grant_places(self) -> None:
        """Grant the free places, now and when the first of the waiting users may load again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loads = {load: key for key, (load, _) in self._waiting.items()}
        pauses_s = {load.owner: self._pause_s(load.owner) for load in loads}
        ready = {load: key for load, key in loads.items() if not pauses_s[load.owner]}
        while chosen := next_load(ready, self._owners(), self._served, self._stuck.values()):
            key = ready.pop(chosen)
            _, granted = self._waiting.pop(key)
            self._served[chosen.owner] = next(self._numbers)
            self._loading[key] = chosen, self._clock()
            granted.set()
        users = {load.owner for load, _ in self._waiting.values()} | set(self._owners())
        self._served = {owner: at for owner, at in self._served.items() if owner in users}
        if waits_s := [pause_s for pause_s in pauses_s.values() if pause_s]:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(min(waits_s), self.grant_places)

    def _owners(self) -> list[int | None]:
        return [load.owner for load, _ in self._loading.values()]

    def _pause_s(self, owner: int | None) -> float:
        if owner is None or not self._serves_others(owner):
            return 0.0
        return self._shares.pause_s(owner)
