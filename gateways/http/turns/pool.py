"""Connections to the daemon, shared by requests, and its state for streams of events, fetched once
for all readers of a user.

A connection carries the requests of one user and label, which are sent when it is opened. It takes
`REQUESTS_PER_CONNECTION_MAX` requests; the next request gets another connection.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import anyio

from ....backends.errors import Busy, ConnectionLost, InferdError, InvalidArgument
from ....ipc.client import AsyncClient, Graph, ModelInfo, TaskInfo
from ..callers import Caller, DaemonUser
from ..limits import CLOSE_S_MAX, REQUESTS_PER_CONNECTION_MAX

Connect = Callable[[DaemonUser], AsyncClient]
SHARED_S = 1.0
"""The time for which further requests share a lease on a model. Afterwards a new lease has the
settings that the model then has.
"""


class _SharedGraph:
    """A lease on a model with the number of requests that use it."""

    def __init__(self, graph: Graph, client: AsyncClient):
        self.graph, self.users = graph, 0
        self._until, self._connection = time.monotonic() + SHARED_S, client.server

    def may_be_used(self, client: AsyncClient) -> bool:
        """Return whether a further request may use it: it ends with its connection."""
        is_connected = client.connected and client.server is self._connection
        return is_connected and time.monotonic() < self._until


class _Pooled:
    """A client with the number of requests that it carries."""

    def __init__(self, user: DaemonUser, client: AsyncClient):
        self.user, self.client, self.requests = user, client, 0
        self.graphs: dict[str, _SharedGraph] = {}
        """The latest lease on each model, while requests use it."""


class ConnectionPool:
    """The gateway's connections. All of its state belongs to the event loop.

    A connection without requests stays open until its place is needed, so that a caller's next
    request finds one. The client connects again if the daemon was restarted.
    """

    def __init__(self, connect: Connect, connections_max: int):
        self._connect, self._connections_max = connect, connections_max
        self._pooled: list[_Pooled] = []

    @asynccontextmanager
    async def lease(self, caller: Caller, requests: int = 1) -> AsyncIterator[AsyncClient]:
        """Yield a client with places for that many *requests*.

        :raises Busy: all connections are in use.
        :raises InvalidArgument: no connection carries that many requests.
        """
        async with self._lease(caller, requests) as pooled:
            yield pooled.client

    @asynccontextmanager
    async def _lease(self, caller: Caller, requests: int) -> AsyncIterator[_Pooled]:
        pooled, unused = self._take_places(caller.user, requests)
        if unused is not None:
            await _close(unused)
        try:
            yield pooled
        finally:
            pooled.requests -= requests

    @asynccontextmanager
    async def lease_graph(
        self, caller: Caller, model: str, *, timeout: float | None = None, requests: int = 1
    ) -> AsyncIterator[tuple[AsyncClient, Graph]]:
        """Load a model, and keep it loaded meanwhile. Yield its graph, with a client that has
        places for that many *requests*.

        Requests at the same time share a lease, as two calls for each would take the daemon a fifth
        of a short turn's time.

        :raises InferdError: `lease` fails, or the model cannot be loaded.
        """
        async with self._lease(caller, requests) as pooled:
            client = pooled.client
            shared = pooled.graphs.get(model)
            if shared is None or not shared.may_be_used(client):
                graph = await client.load_by_name(model, timeout=timeout)
                shared = pooled.graphs[model] = _SharedGraph(graph, client)
            shared.users += 1
            try:
                yield client, shared.graph
            finally:
                shared.users -= 1
                if not shared.users:
                    if pooled.graphs.get(model) is shared:
                        del pooled.graphs[model]
                    await _unload(client, shared.graph)

    def _take_places(self, user: DaemonUser, requests: int) -> tuple[_Pooled, AsyncClient | None]:
        """Return a connection, and a client to close, if any. Nothing is awaited between the choice
        of a connection and the count of its requests.
        """
        if requests > REQUESTS_PER_CONNECTION_MAX:
            raise InvalidArgument(
                f"{requests} answers; {REQUESTS_PER_CONNECTION_MAX} are allowed",
                hint="request fewer answers",
            )
        unused = None
        for pooled in self._pooled:
            if pooled.user == user and pooled.requests + requests <= REQUESTS_PER_CONNECTION_MAX:
                break
        else:
            if len(self._pooled) >= self._connections_max:
                unused = self._remove_idle()
            pooled = _Pooled(user, self._connect(user))
            self._pooled.append(pooled)
        pooled.requests += requests
        # The latest used one is last, so that the first idle one has been unused for longest.
        self._pooled.remove(pooled)
        self._pooled.append(pooled)
        return pooled, unused

    def _remove_idle(self) -> AsyncClient:
        for pooled in self._pooled:
            if not pooled.requests:
                self._pooled.remove(pooled)
                return pooled.client
        raise Busy(
            f"all {self._connections_max} connections of the gateway to the daemon are in use",
            hint="try again later, or start the gateway with a larger --connections-max",
            data={"bound": "connections-max", "connections_max": self._connections_max},
        )

    async def probe(self) -> None:
        """Open and close a connection beside the pooled ones.

        :raises InferdError: the daemon does not answer, or refuses the connection.
        """
        client = self._connect(DaemonUser())
        try:
            await client.open()
        finally:
            await _close(client)

    async def close(self) -> None:
        """Close all connections; the daemon then ends their turns."""
        while self._pooled:
            await _close(self._pooled.pop().client)


async def _unload(client: AsyncClient, graph: Graph) -> None:
    if client.connected:
        with anyio.move_on_after(CLOSE_S_MAX, shield=True), suppress(InferdError):
            await client.unload(graph, keep=True)


async def _close(client: AsyncClient) -> None:
    with anyio.move_on_after(CLOSE_S_MAX, shield=True), suppress(InferdError):
        await client.aclose()


CHECK_PAUSE_S = 1.0
"""The age up to which a check serves further requests, because they need no key."""
ANSWER_S_MAX = 2.0
"""The time after which a daemon that does not answer counts as away."""


class DaemonHealth:
    """Whether the daemon answers. Lives on the event loop.

    Each check opens a connection of its own, because a pooled one waits for a daemon that restarts.
    """

    def __init__(self, pool: ConnectionPool):
        self._pool = pool
        self._lock = anyio.Lock()
        self._checked_at_s: float | None = None
        self._answers = False

    async def check(self) -> None:
        """Check that the daemon answers.

        :raises ConnectionLost: it does not.
        """
        async with self._lock:
            now, at_s = time.monotonic(), self._checked_at_s
            if at_s is None or now > at_s + CHECK_PAUSE_S:
                self._answers = await self._daemon_answers()
                self._checked_at_s = time.monotonic()
        if not self._answers:
            raise ConnectionLost(
                "the daemon does not answer",
                hint="it may be restarting; `inferd status` on its machine shows more",
            )

    async def _daemon_answers(self) -> bool:
        try:
            with anyio.fail_after(ANSWER_S_MAX):
                await self._pool.probe()
        except Busy:  # an answer, too
            return True
        except (TimeoutError, InferdError):
            return False
        return True


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
