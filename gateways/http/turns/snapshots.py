"""The daemon's state for streams of events, fetched once for all readers of a user."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import anyio

from ....backends.errors import ConnectionLost, InferdError
from ....ipc.client import ModelInfo, TaskInfo
from ..callers import Caller, DaemonUser
from .pool import ConnectionPool

PAUSE_S = 0.5
"""The age up to which a snapshot serves further readers, and the pause between two events."""
FETCH_S_MAX = 5.0
"""The time after which a daemon that does not answer counts as away."""


class Snapshot(NamedTuple):
    """The models, turns and statistics of a user at a time, and the machine's memory. If the daemon
    is away, *error* is set, and the rest is that of the previous snapshot.
    """

    number: int
    at_s: float
    models: list[ModelInfo]
    tasks: list[TaskInfo]
    statistics: dict[str, Any]
    memory: dict[str, Any]
    error: InferdError | None = None


_NONE = Snapshot(0, 0.0, [], [], {}, {})


class Snapshots:
    """The latest snapshot of each user. Lives on the event loop."""

    def __init__(self, pool: ConnectionPool):
        self._pool = pool
        self._latest: dict[DaemonUser, Snapshot] = {}
        self._locks: dict[DaemonUser, anyio.Lock] = {}
        self._readers: dict[DaemonUser, int] = {}

    def add_reader(self, user: DaemonUser) -> None:
        """Note a reader, until `remove_reader`."""
        self._readers[user] = self._readers.get(user, 0) + 1
        self._locks.setdefault(user, anyio.Lock())

    def remove_reader(self, user: DaemonUser) -> None:
        """Remove a reader, and with the last one the user's snapshot."""
        self._readers[user] -= 1
        if not self._readers[user]:
            del self._readers[user], self._locks[user]
            self._latest.pop(user, None)

    async def snapshot(self, caller: Caller) -> Snapshot:
        """Return the latest snapshot of a reader's user, or a new one if that is older than
        `PAUSE_S`.
        """
        user = caller.user
        async with self._locks[user]:
            latest = self._latest.get(user, _NONE)
            if time.monotonic() - latest.at_s > PAUSE_S:
                self._latest[user] = latest = await self._fetch(caller, latest)
            return latest

    async def _fetch(self, caller: Caller, latest: Snapshot) -> Snapshot:
        number, timeout = latest.number + 1, FETCH_S_MAX
        try:
            async with self._pool.lease(caller) as client:
                with anyio.fail_after(FETCH_S_MAX):
                    models = await client.models(timeout=timeout)
                    tasks = await client.queue(timeout=timeout)
                    stats = await client.stats(timeout=timeout)
        except TimeoutError:
            return latest._replace(number=number, at_s=time.monotonic(), error=_away())
        except InferdError as exc:
            return latest._replace(number=number, at_s=time.monotonic(), error=exc)
        at_s, memory = time.monotonic(), stats.get("memory", {})
        return Snapshot(number, at_s, models, tasks, stats["models"], memory)


def _away() -> InferdError:
    return ConnectionLost(
        f"the daemon has not answered for {FETCH_S_MAX:g} s", hint="it may be restarting"
    )
