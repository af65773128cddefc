"""Connections to the daemon, shared by requests, and its state for streams of events, fetched once
for all readers of a user.

A connection carries the requests of one user and label, which are sent when it is opened. It takes
`REQUESTS_PER_CONNECTION_MAX` requests; the next request gets another connection.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import anyio
import anyio.to_thread

from ....backends.errors import (
    Busy,
    ConnectionLost,
    InferdError,
    InvalidArgument,
    UnsupportedOperation,
)
from ....ipc.client import AsyncClient, Context, Graph, ModelInfo, TaskInfo
from ....ipc.client.large_tensors import LargeTensors
from ....ipc.names import Priority
from ..callers import Caller, DaemonUser
from ..limits import CLOSE_S_MAX, REQUESTS_PER_CONNECTION_MAX, RESTART_S_MAX

Connect = Callable[[DaemonUser], AsyncClient]
SHARED_S = 1.0
"""The time for which further requests share a lease on a model. Afterwards a new lease has the
settings that the model then has.
"""
IDLE_S = 0.25
"""The time for which a lease whose contexts have computed tensors is kept without a request."""
CONTEXTS_MAX = 16
"""The unused contexts of a lease, of each class."""


def new_client(
    user: DaemonUser, socket: str | os.PathLike[str] | None, *, timeout_s: float, software: str
) -> AsyncClient:
    """Return a client of the daemon at *socket* that acts for *user*, and waits for a daemon that
    restarts.
    """
    return AsyncClient(
        socket,
        timeout=timeout_s,
        reconnect=True,
        resume_timeout=RESTART_S_MAX,
        software=software,
        label=user.label,
        on_behalf_of=user.on_behalf_of,
        key=user.key,
        key_limits=user.key_limits.given(),
    )


class _SharedGraph:
    """A lease on a model with the number of requests that use it."""

    def __init__(self, graph: Graph, client: AsyncClient):
        self.graph, self.users = graph, 0
        self.large = LargeTensors(client.buffer, anyio.to_thread.run_sync)
        self.contexts: dict[Priority, list[Context]] = {}
        """Unused contexts, in which tensors were computed, by their class. It decides on the order
        of computations.
        """
        self.idle_since: float | None = None
        """The end of its last request, if it is kept without one."""
        self._until, self._connection = time.monotonic() + SHARED_S, client.server

    def may_be_used(self, client: AsyncClient) -> bool:
        """Return whether a further request may use it: it ends with its connection."""
        return self.is_connected(client) and time.monotonic() < self._until

    def is_connected(self, client: AsyncClient) -> bool:
        """Return whether its connection stands."""
        return client.connected and client.server is self._connection

    def may_stay(self, client: AsyncClient, now: float) -> bool:
        """Return whether it is kept without a request."""
        is_idle = self.idle_since is not None and now >= self.idle_since + IDLE_S
        return any(self.contexts.values()) and not is_idle and self.may_be_used(client)


class LeasedContext(NamedTuple):
    """A context of a graph for one computation, with the client of its connection, and the buffers
    for tensors that no frame takes.
    """

    client: AsyncClient
    context: Context
    large: LargeTensors


class _Pooled:
    """A client with the number of requests that it carries."""

    def __init__(self, user: DaemonUser, client: AsyncClient):
        self.user, self.client, self.requests = user, client, 0
        self.graphs: dict[str, _SharedGraph] = {}
        """The latest lease on each model, while requests use it or it is kept for the next one."""


class ConnectionPool:
    """The gateway's connections. All of its state belongs to the event loop.

    A connection without requests stays open until its place is needed, so that a caller's next
    request finds one. The client connects again if the daemon was restarted.
    """

    def __init__(self, connect: Connect, connections_max: int):
        self._connect, self._connections_max = connect, connections_max
        self._pooled: list[_Pooled] = []
        self._kept: dict[_SharedGraph, tuple[_Pooled, str]] = {}
        """The leases that are kept without a request, with their connections and models."""
        self._keeping = anyio.Event()
        """Set while there are some."""
        self._is_running = False

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
        async with self._lease_shared(caller, model, timeout, requests) as (client, shared):
            yield client, shared.graph

    @asynccontextmanager
    async def lease_context(
        self,
        caller: Caller,
        model: str,
        *,
        priority: Priority,
        queue_timeout: float,
        is_new: bool = False,
    ) -> AsyncIterator[LeasedContext]:
        """Yield a context of a graph, in which one computation is made. It is kept for further
        requests for `IDLE_S`, so that most of them take one call. With *is_new*, it was not kept.

        :raises UnsupportedOperation: the model is a language model.
        :raises InferdError: `lease_graph` fails, or the context cannot be opened.
        """
        async with self._lease_shared(caller, model, None, 1) as (client, shared):
            if not shared.graph.tensors:
                raise UnsupportedOperation(
                    f"{model[:100]!r} is a language model, which computes no tensors",
                    hint="use the paths for chats, completions and embeddings",
                )
            unused = shared.contexts.setdefault(priority, [])
            if unused and not is_new:
                context = unused.pop()
            else:
                context = await client.init_execution_context(
                    shared.graph, priority=priority, queue_timeout=queue_timeout
                )
            try:
                yield LeasedContext(client, context, shared.large)
            except BaseException:
                await _finalize(client, context)  # it may still compute
                raise
            if len(unused) < CONTEXTS_MAX and self._is_running:
                unused.append(context)
            else:
                await _finalize(client, context)

    @asynccontextmanager
    async def _lease_shared(
        self, caller: Caller, model: str, timeout: float | None, requests: int
    ) -> AsyncIterator[tuple[AsyncClient, _SharedGraph]]:
        async with self._lease(caller, requests) as pooled:
            client = pooled.client
            shared = pooled.graphs.get(model)
            if shared is None or not shared.may_be_used(client):
                graph = await client.load_by_name(model, timeout=timeout)
                shared = pooled.graphs[model] = _SharedGraph(graph, client)
            shared.users += 1
            shared.idle_since = None
            self._kept.pop(shared, None)
            try:
                yield client, shared
            finally:
                shared.users -= 1
                if not shared.users:
                    await self._end_use(pooled, model, shared)

    async def _end_use(self, pooled: _Pooled, model: str, shared: _SharedGraph) -> None:
        """Keep a lease whose last request has ended, or end it."""
        now, is_latest = time.monotonic(), pooled.graphs.get(model) is shared
        if is_latest and self._is_running and shared.may_stay(pooled.client, now):
            shared.idle_since = now
            self._kept[shared] = pooled, model
            self._keeping.set()
            return
        if is_latest:
            del pooled.graphs[model]
        await _unload(pooled.client, shared)

    async def run(self) -> None:
        """End the leases that are kept for too long, until cancelled. Without it none is kept."""
        self._is_running = True
        try:
            while True:
                await self._keeping.wait()
                while self._kept:
                    await anyio.sleep(IDLE_S)
                    await self._end_kept(self._is_outdated)
                self._keeping = anyio.Event()
        finally:
            self._is_running = False

    async def end_kept(self) -> None:
        """End the leases that are kept without a request, which would count as a use of models."""
        await self._end_kept(lambda _: True)

    def _is_outdated(self, shared: _SharedGraph) -> bool:
        return not shared.may_stay(self._kept[shared][0].client, time.monotonic())

    async def _end_kept(self, is_ended: Callable[[_SharedGraph], bool]) -> None:
        found = [(s, *place) for s, place in self._kept.items() if is_ended(s)]
        for shared, pooled, model in found:  # before the first wait: no request may use it
            del self._kept[shared]
            if pooled.graphs.get(model) is shared:
                del pooled.graphs[model]
        for shared, pooled, _ in found:
            await _unload(pooled.client, shared)

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


async def _unload(client: AsyncClient, shared: _SharedGraph) -> None:
    shared.large.clear()
    if shared.is_connected(client):
        with anyio.move_on_after(CLOSE_S_MAX, shield=True), suppress(InferdError):
            for context in chain.from_iterable(shared.contexts.values()):
                await client.finalize_execution_context(context)
            await client.unload(shared.graph, keep=True)


async def _finalize(client: AsyncClient, context: Context) -> None:
    if client.connected:
        with anyio.move_on_after(CLOSE_S_MAX, shield=True), suppress(InferdError):
            await client.finalize_execution_context(context)


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
