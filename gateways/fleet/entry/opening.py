"""Calls that need the choice of a node: loading models, opening contexts, work on a graph.

A lease of a graph on a node keeps the model there from being unloaded when it is idle. A graph
keeps one, as on one machine; leases on further nodes end once they are not used. The model of a
descriptor is loaded only on the node of the entry's machine.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from itertools import zip_longest
from typing import Any

import anyio
import msgspec

from ....backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    LoadFailed,
    ModelNotFound,
    OutOfMemory,
    SessionExpired,
    ShuttingDown,
    WorkerCrashed,
)
from ....wire.frames import pack_frame
from ..frames import (
    Fields,
    integers_in,
    model_refused,
    raw_of,
    text_in,
    with_handle,
)
from ..link import HANDSHAKE_S_MAX, RECEIVED, TOKEN_BYTES, ContentKind
from ..nodes.upstream import lost_error
from ..routing.calls import session_homes
from ..routing.choice import RETRY_HINT, RETRY_S, RouteRequest
from ..routing.homes import RecentKey, SessionKey
from ..routing.loads import CLASSES, TurnKind
from .client import ClientRequest, FleetClient
from .contexts import FleetGraph, NewContext, OpenContext, SuspendedContext
from .passed_descriptors import PassedDescriptors

LEASE_IDLE_S = 1.0
"""Time without use after which a lease ends, unless it is the graph's only one."""


_LOWEST = 0
"""The class in which a warm-up load counts as an expected turn: it delays no higher class."""


class GraphHandle(msgspec.Struct):
    """The part of a load's result that is a graph."""

    graph: int
    model: str = ""


@asynccontextmanager
async def leased(client: FleetClient, graph: FleetGraph, node: str) -> AsyncIterator[int]:
    """Yield the handle of *graph* on *node*, which loads the model for it if it has none yet. The
    lease lasts at least as long as the `with` block, and as contexts of the graph there.

    :raises InferdError: the node cannot load it.
    """
    graph.used[node] += 1
    graph.uses[node] += 1
    try:
        yield await _lease(client, graph, node)
    finally:
        graph.used[node] -= 1
        end_unused_lease(client, graph, node)


async def _lease(client: FleetClient, graph: FleetGraph, node: str) -> int:
    async with graph.lock:
        if node not in graph.leases and graph.node:
            raise lost_error(graph.node, "the model of a descriptor was lost with its connection")
        if node not in graph.leases:
            upstream = client.upstream(node)
            raw = await upstream.call(graph.call, graph.params)
            if upstream.lost is None:
                graph.leases[node] = msgspec.msgpack.decode(raw, type=GraphHandle).graph
        if node not in graph.leases:
            raise Busy(f"the node {node} was lost", data={"cause": "node", "retry_after_s": 0.1})
        return graph.leases[node]


def close_context(client: FleetClient, handle: int) -> None:
    """Note that a context was closed; the lease of its graph may end."""
    context = client.contexts.drop(handle)
    if context is not None:
        end_unused_lease(client, context.graph, context.node)


def end_unused_lease(client: FleetClient, graph: FleetGraph, node: str) -> None:
    """End the lease on *node* once it has not been used for a while, if it is not the only one."""
    if len(graph.leases) > 1 and not client.uses_lease(graph, node) and node not in graph.ending:
        graph.ending.add(node)
        client.group.start_soon(_end_idle_lease, client, graph, node)


async def _end_idle_lease(client: FleetClient, graph: FleetGraph, node: str) -> None:
    try:
        seen = -1
        while seen != graph.uses[node]:
            seen = graph.uses[node]
            await anyio.sleep(LEASE_IDLE_S)
        async with graph.lock:  # a later use waits, and takes a new lease
            if len(graph.leases) < 2 or node not in graph.leases or client.uses_lease(graph, node):
                return
            fields = {"graph": raw_of(graph.leases.pop(node)), "keep": raw_of(True)}
            with suppress(InferdError):  # the lease ends with the connection at the latest
                await client.upstream(node).call("unload", fields)
    finally:
        graph.ending.discard(node)


def warm_up_another(client: FleetClient, graph: FleetGraph, node: str) -> None:
    """Load the model on another node if most slots of *node*, where a context was opened, are
    taken. Later contexts then find it loaded there.
    """
    target = client.fleet.nodes.to_warm_up(graph.model, node)
    if target is not None:
        turns, kind = client.fleet.nodes.turns_of(target), TurnKind(graph.model, _LOWEST)
        turns.note_opening((client, graph), kind)  # so that other clients begin no second load
        client.group.start_soon(_warm_up, client, graph, target)


async def _warm_up(client: FleetClient, graph: FleetGraph, node: str) -> None:
    try:
        with suppress(InferdError):  # the node's next report shows the failure
            upstream = client.upstream(node)
            raw = await upstream.call(graph.call, graph.params)
            handle = msgspec.msgpack.decode(raw, type=GraphHandle).graph
            await upstream.call("unload", {"graph": raw_of(handle), "keep": raw_of(True)})
    finally:
        client.fleet.nodes.turns_of(node).drop_opened((client, graph))


_NORMAL = CLASSES.index("normal")
_LOAD_ELSEWHERE = (ModelNotFound, LoadFailed, OutOfMemory)
"""Errors of a load on one node that may not occur on another."""
GRAPHS_MAX = 1000
"""Graphs of one connection, as on a daemon."""


def class_of(params: Fields) -> int:
    """Return the priority class in params, or `normal` for a name that the node will refuse."""
    name = text_in(params, "priority")
    return CLASSES.index(name) if name in CLASSES else _NORMAL


def may_succeed_elsewhere(error: InferdError) -> bool:
    """Return whether another node may do what one has refused."""
    if isinstance(error, WorkerCrashed):
        return error.data.get("cause") == "node"
    return type(error) in (Busy, ShuttingDown) or isinstance(error, _LOAD_ELSEWHERE)


async def on_best_node(
    client: FleetClient,
    route: RouteRequest,
    attempt: Callable[[str], Awaitable[Fields]],
    key: Hashable | None = None,
) -> Fields:
    """Return the result of *attempt* on the best node, or on the next one if that refuses it. With
    a *key*, the attempt counts there as a turn that is about to begin.

    :raises InferdError: all nodes have refused it; the error is that with the earliest retry.
    """
    excluded: set[str] = set()
    refusals: list[InferdError] = []
    while True:
        try:
            node = client.fleet.nodes.choose(
                RouteRequest(route.model, route.priority, route.home, route.recent, excluded),
                key,
            )
        except Busy:
            if not refusals:
                raise
            raise min(refusals, key=_retry_s) from None
        try:
            return await attempt(node)
        except InferdError as exc:
            if not may_succeed_elsewhere(exc):
                raise
            client.fleet.nodes.counters_of(node).contexts_refused += 1
            if route.home is not None:
                raise
            refusals.append(exc)
            excluded.add(node)
        finally:
            client.fleet.nodes.turns_of(node).drop_opened(key)


def _retry_s(error: InferdError) -> float:
    return error.retry_after_s if isinstance(error, Busy) else float("inf")


def check_graphs(client: FleetClient) -> None:
    """Check that a client may have another graph.

    :raises InvalidArgument: the client has the maximum already.
    """
    if len(client.graphs) >= GRAPHS_MAX:
        raise InvalidArgument(
            f"a connection has at most {GRAPHS_MAX} graphs",
            hint="unload those that are not needed",
            data={"graphs_max": GRAPHS_MAX},
        )


async def load_graph(client: FleetClient, request: ClientRequest, params: Fields) -> Fields:
    """Load a model on one node; contexts of the graph may later be on others.

    :raises InferdError: no node can load it.
    """
    check_graphs(client)
    nodes = client.fleet.nodes
    model = nodes.model_name(model_of(params))
    graph = FleetGraph(request.call, params, model)
    recent = client.fleet.recent.find(RecentKey(client.owner, model))

    async def attempt(node: str) -> Fields:
        upstream, raw = await client.exchange(request, node, params)
        result = msgspec.msgpack.decode(raw, type=GraphHandle)
        graph.leases[node], graph.model = result.graph, result.model or graph.model
        client.graphs[client.contexts.client_handle(upstream, result.graph)] = graph
        return client.mapped(upstream, raw, request.row.handles_in_result)

    if not nodes.with_model(model) and not nodes.unreachable():
        return await attempt(nodes.reachable()[0])  # which refuses it with the right error
    if nodes.only_drained(model):  # for contexts of the sessions that stay there
        return await attempt(nodes.only_drained(model)[0])
    route = RouteRequest(model, recent=recent)
    return await on_best_node(client, route, attempt)


class _Opened(msgspec.Struct):
    context: int
    attached: bool = False


def model_of(params: Fields) -> str:
    """Return the name of the model in the params of a load."""
    if "builders" in params:
        builders = msgspec.msgpack.decode(params["builders"], type=list[bytes])
        return builders[0].decode(errors="replace") if builders else ""
    return text_in(params, "name")


async def open_context(client: FleetClient, request: ClientRequest, params: Fields) -> Fields:
    """Open a context on the node of its session or state, or else on the best one.

    :raises InferdError: no node can open it.
    """
    graph, fleet = client.graph_of(params), client.fleet
    session = SessionKey(client.owner, text_in(params, "session_id"))
    recent = RecentKey(client.owner, graph.model)
    if session.session_id:
        await fleet.moves.wait_settled(session)
    home = await _home_of(client, session, text_in(params, "from_state"))
    if graph.node:
        if home not in (None, graph.node):
            raise InvalidArgument(
                f"the session or state is on the node {home}, and the model on {graph.node}",
                hint="the model of a descriptor is only on the node of the entry's machine",
            )
        home = graph.node

    async def attempt(node: str) -> Fields:
        if session.session_id:
            fleet.homes.put(session, node)  # before any `await`, so that a second opener follows
        try:
            async with leased(client, graph, node) as handle:
                fields = with_handle(params, "graph", handle)
                upstream, raw = await client.exchange(request, node, fields)
                found = msgspec.msgpack.decode(raw, type=_Opened)
                kind = TurnKind(graph.model, class_of(params))
                is_new = home is None and not found.attached
                new = NewContext(request.call, params)
                movable = new if is_new and not new.is_too_large else None
                context = OpenContext(node, session.session_id, kind, graph, movable)
                own = client.contexts.client_handle(upstream, found.context)
                client.note_context(own, context, opened_by=request)
        except BaseException:
            if home is None or graph.node:
                fleet.homes.drop(session)
            raise
        fleet.recent.put(recent, node)
        if not graph.node:
            warm_up_another(client, graph, node)
        return client.mapped(upstream, raw, request.row.handles_in_result)

    route = RouteRequest(graph.model, class_of(params), home, fleet.recent.find(recent))
    return await on_best_node(client, route, attempt, request)


async def _home_of(client: FleetClient, session: SessionKey, state: str) -> str | None:
    """Return the node that has a session, or else a state; None for a new session.

    :raises Busy: no node has it, and it may be on one that cannot be reached.
    """
    homes, nodes = client.fleet.homes, client.fleet.nodes
    known = homes.find(session) if session.session_id else None
    promoted = await client.fleet.continued.home_of(session, known) if session.session_id else None
    if promoted is not None:
        return promoted
    if known is not None and known in nodes.links:
        return known
    home = None
    if session.session_id:
        home = await _search_session(client, session.session_id)
        home = homes.find(session) or home  # another client may have opened it meanwhile
    if home is None and state:
        home = await _search_state(client, state)
    return home


async def _search_session(client: FleetClient, session_id: str) -> str | None:
    """Return the node that lists a session of the client's label."""
    params: Fields = {"dormant": msgspec.Raw(b"\xc3")}
    results, errors = await client.gather("sessions", params, client.fleet.nodes.reachable())
    return _node_of(client, session_id, session_homes(results), errors)


async def _search_state(client: FleetClient, name: str) -> str | None:
    """Return the node that lists a state of the client's label, or one that is shared with it."""
    results, errors = await client.gather("list_states", {}, client.fleet.nodes.reachable())
    entries = (
        (_label_of(client, state), state["name"], node)
        for node, result in results.items()
        for state in result["states"]
    )
    return _node_of(client, name, entries, errors)


def _node_of(
    client: FleetClient,
    name: str,
    entries: Iterable[tuple[str, str, str]],
    errors: Mapping[str, InferdError],
) -> str | None:
    """Return the node with *name* among entries with a label, a name and a node.

    :raises Busy: no node has it, and it may be on one that cannot be reached.
    """
    for label, found, node in entries:
        if found == name and label == client.owner.label:
            return node
    missing = sorted({*client.fleet.nodes.unreachable(), *errors})
    if missing:
        raise Busy(
            f"{name!r} may be on a node that cannot be reached: {', '.join(missing)}",
            hint=RETRY_HINT + "; a node that never returns is removed from the configuration",
            data={"cause": "node", "nodes": missing, "retry_after_s": RETRY_S},
        )
    return None


def _label_of(client: FleetClient, state: dict[str, Any]) -> str:
    """Return the label of a state; that of the client if another user shares it."""
    return client.owner.label if state.get("shared_by") is not None else str(state["label"])


async def work_on_graph(client: FleetClient, request: ClientRequest, params: Fields) -> Fields:
    """Make a call on a graph: embeddings on the best node, others where the model is leased.

    :raises InferdError: no node can do it.
    """
    graph = client.graph_of(params)

    async def attempt(node: str) -> Fields:
        async with leased(client, graph, node) as handle:
            fields = with_handle(params, "graph", handle)
            upstream, raw = await client.exchange(request, node, fields)
        return client.mapped(upstream, raw, request.row.handles_in_result)

    known = next((node for node in graph.leases if client.fleet.nodes.is_reachable(node)), None)
    if graph.node:
        return await attempt(graph.node)
    if known is not None and request.row.starts is None:
        return await attempt(known)
    return await on_best_node(client, RouteRequest(graph.model, class_of(params)), attempt, request)


def note_branches(client: FleetClient, params: Fields, source: OpenContext, result: Fields) -> None:
    """Note the contexts of `fork_session` of *source*, and the homes of those with an id."""
    handles, ids = integers_in(result, "contexts"), []
    if "session_ids" in params:
        ids = msgspec.msgpack.decode(params["session_ids"], type=list[str])
    for handle, session_id in zip_longest(handles, ids, fillvalue=""):
        branch = source._replace(session_id=str(session_id))
        client.note_context(int(handle), branch)
        if session_id:
            client.fleet.homes.put(SessionKey(client.owner, branch.session_id), branch.node)


async def reopen_context(client: FleetClient, handle: int) -> None:
    """Open the session of a suspended context again, where it is now, for the client's handle.

    :raises InferdError: that is not possible now.
    :raises SessionExpired: the session no longer exists.
    """
    suspended = client.contexts.suspended.get(handle)
    if suspended is None:
        return
    await suspended.settled.wait()
    async with suspended.lock:
        if client.contexts.suspended.get(handle) is suspended:
            await open_again(client, suspended)


async def open_again(client: FleetClient, suspended: SuspendedContext) -> None:
    """Open the closed session of a context again, see `reopen_context`.

    :raises InferdError: that is not possible now.
    :raises SessionExpired: the session no longer exists.
    """
    handle, context = suspended.handle, suspended.context
    session = SessionKey(client.owner, context.session_id)
    await client.fleet.moves.wait_settled(session)
    node = await _home_of(client, session, "")
    params: Fields = {"session_id": raw_of(context.session_id)}
    if node is not None:
        async with leased(client, context.graph, node) as own:
            params["graph"] = raw_of(own)
            upstream = client.upstream(node)
            raw = await upstream.call("init_execution_context_with_session_id", params)
            found = msgspec.msgpack.decode(raw, type=_Opened)
            opened = client.contexts.client_handle(upstream, found.context)
            if found.attached and client.contexts.note_reopened(handle, opened, node):
                return
            own_context = {"context": raw_of(found.context)}
            await upstream.call("finalize_execution_context", own_context)
    client.contexts.expire(handle)
    raise SessionExpired(
        f"the session {context.session_id!r} was deleted while it moved to another node"
    )


async def load_passed(
    passed: PassedDescriptors,
    descriptors: Sequence[int],
    client: FleetClient,
    request: ClientRequest,
    params: Fields,
) -> Fields:
    """Load a model from a claimed descriptor, and close the descriptor.

    :raises UnsupportedOperation: no node runs on the entry's machine.
    :raises InferdError: that node cannot load it.
    """
    try:
        own = client.fleet.nodes.own
        if own is None:
            raise model_refused()
        check_graphs(client)
        token = secrets.token_bytes(TOKEN_BYTES)
        upstream = client.upstream(own.name)
        await pass_file(own.descriptors, token, descriptors[0])
        async with upstream.contents_lock:
            upstream.check_connected()
        # No `await` until the request is sent, as the content belongs to the next request sent.
        upstream.send_frame(pack_frame([ContentKind.PASSED, token]))
        upstream, raw = await client.exchange(request, own.name, params, has_contents=True)
        graph = FleetGraph(request.call, params, "", own.name)
        graph.leases[own.name] = msgspec.msgpack.decode(raw, type=GraphHandle).graph
        client.graphs[client.contexts.client_handle(upstream, graph.leases[own.name])] = graph
        return client.mapped(upstream, raw, request.row.handles_in_result)
    finally:
        passed.close_claimed(descriptors)


async def pass_file(path: str, token: bytes, descriptor: int) -> None:
    """Pass a descriptor to the relay at *path*.

    :raises Busy: the relay cannot be reached there, or has too many files.
    """
    loop = asyncio.get_running_loop()
    answer = b""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock,
        suppress(OSError),
        anyio.move_on_after(HANDSHAKE_S_MAX),
    ):
        sock.setblocking(False)
        await loop.sock_connect(sock, path)
        socket.send_fds(sock, [token], [descriptor])
        answer = await loop.sock_recv(sock, 1)
    if answer != RECEIVED:
        raise Busy(
            f"the relay at {path} does not take the file of the model now",
            hint="check that `inferd fleet node` has --descriptors with this path, and runs",
            data={"cause": "node", "retry_after_s": 1.0},
        )
