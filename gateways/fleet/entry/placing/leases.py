"""A graph's leases on nodes: taken where they are needed, and ended where they no longer are.

A lease keeps a model from being unloaded when it is idle. A graph keeps one, as on one machine. Its
leases on further nodes end once they are not used, so that replicas of the model are unloaded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec

from .....backends.errors import Busy, InferdError
from ...calls.frames import raw_of
from ..clients.client import FleetClient
from ..clients.contexts import FleetGraph
from ..clients.upstream import lost_error
from ..nodes.own_turns import TurnKind

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
