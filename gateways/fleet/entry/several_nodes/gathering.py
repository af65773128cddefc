"""Calls that several nodes answer at once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import anyio

from .....backends.errors import Busy, InferdError, TooLarge
from .....ipc.messages import ContextUse, Merge
from .....wire.frames import REPLY_BYTES_MAX
from ...calls.frames import Fields, number_in, raw_of, text_in, values_of
from ...calls.merging import merge_results
from ...routing.choice import RETRY_HINT, RETRY_S
from ..clients.client import ClientRequest, FleetClient
from ..placing.homes import SessionKey
from ..placing.leases import end_unused_lease

TEXT_BYTES_MAX = REPLY_BYTES_MAX - (1 << 10)
"""Bytes of a text that fits into a reply."""
Results = dict[str, dict[str, Any]]


async def gather(
    client: FleetClient, call: str, params: Fields, nodes: Iterable[str]
) -> tuple[Results, dict[str, InferdError]]:
    """Make a call on *nodes* at once; return the results and the errors by node."""
    results: Results = {}
    errors: dict[str, InferdError] = {}

    async def call_node(node: str) -> None:
        try:
            results[node] = values_of(await client.upstream(node).call(call, params))
        except InferdError as exc:
            errors[node] = exc

    names = list(nodes)
    async with anyio.create_task_group() as group:
        for node in names:
            group.start_soon(call_node, node)
    # In the order of the configuration, not of the answers.
    return {node: results[node] for node in names if node in results}, errors


def _first(errors: dict[str, InferdError]) -> InferdError:
    """Return the error to report: one of a node that answered, rather than of one that is lost."""
    return min(errors.values(), key=_is_loss)


def _is_loss(error: InferdError) -> bool:
    """Return whether *error* means that a node was lost."""
    return bool(error.data.get("cause") == "node")


async def call_all(client: FleetClient, request: ClientRequest, params: Fields) -> dict[str, Any]:
    """Make a call on all nodes that can be reached, and return the merged result.

    :raises InferdError: it failed on all of them.
    """
    nodes = client.fleet.nodes
    results, errors = await gather(client, request.call, params, nodes.reachable())
    if not results:
        raise _first(errors)
    merged = merge_results(request.call, results, client.contexts.map_listed)
    if request.row.merge is Merge.STATISTICS:
        counts = merged["stats"]["nodes"]
        merged["stats"] |= {
            "nodes": {name: counts.get(name, {}) | one for name, one in nodes.describe().items()},
            "pid": os.getpid(),
            "instance": client.fleet.incarnations.starts,
        }
    missing = [*nodes.unreachable(), *errors]
    return merged | {"unreachable": sorted(set(missing))} if missing else merged


async def read_metrics(
    client: FleetClient, request: ClientRequest, params: Fields
) -> dict[str, Any]:
    """Return the metrics of the entry and of all nodes that answer in time.

    :raises TooLarge: they exceed a reply.
    :raises BackendError: the program that writes them has failed.
    """
    text = await client.fleet.metrics.text()
    if len(text) > TEXT_BYTES_MAX:
        raise TooLarge(
            f"the metrics of the fleet have {len(text)} bytes",
            hint="scrape the entry over HTTP (`metrics` in fleet.toml), or the nodes",
        )
    return {"text": text.decode()}


async def call_for_session(
    client: FleetClient, request: ClientRequest, params: Fields
) -> dict[str, Any]:
    """Read, change or delete a session by its id: call all reachable nodes, one of which has it.

    :raises Busy: no node has it, and it may be on one that cannot be reached.
    """
    nodes = client.fleet.nodes
    key = SessionKey(client.owner, text_in(params, "session_id"))
    await client.fleet.moves.wait_settled(key)
    await client.fleet.copies.home_of(key, client.fleet.homes.find(key))
    results, errors = await gather(client, request.call, params, nodes.reachable())
    found = {node: result for node, result in results.items() if result.get("deleted", True)}
    missing = sorted({*nodes.unreachable(), *(n for n, exc in errors.items() if _is_loss(exc))})
    if missing and not found:
        raise Busy(
            f"the session may be on a node that cannot be reached: {', '.join(missing)}",
            hint=RETRY_HINT,
            data={"cause": "node", "nodes": missing, "retry_after_s": RETRY_S},
        )
    if not results:
        raise _first(errors)
    if request.row.context is ContextUse.END:
        session_id = text_in(params, "session_id")
        if not number_in(params, "undo_s"):  # else its node can restore it
            client.fleet.homes.drop(SessionKey(client.owner, session_id))
        for context in client.contexts.drop_session(session_id):
            end_unused_lease(client, context.graph, context.node)
    return merge_results(request.call, found or results, client.contexts.map_listed)


async def configure_backend(
    client: FleetClient, request: ClientRequest, params: Fields
) -> dict[str, Any]:
    """Configure the backend on all nodes to which the client is connected, also later.

    :raises InferdError: a node has refused the configuration.
    """
    result, refusals = await _call_connected(client, request, params)
    if refusals:
        raise _first(refusals)
    client.prelude[:] = [(request.call, params)]
    return result


async def end_backend(
    client: FleetClient, request: ClientRequest, params: Fields
) -> dict[str, Any]:
    """End the backend on all nodes to which the client is connected.

    :raises InferdError: no node has ended it.
    """
    result, _ = await _call_connected(client, request, params)
    client.prelude.clear()
    client.drop_all()
    return result


async def _call_connected(
    client: FleetClient, request: ClientRequest, params: Fields
) -> tuple[dict[str, Any], dict[str, InferdError]]:
    """Return one result, and the errors of nodes that have refused the call.

    :raises InferdError: it failed on all nodes.
    """
    nodes = list(client.upstreams) or client.fleet.nodes.reachable()[:1]
    results, errors = await gather(client, request.call, params, nodes)
    refusals = {node: exc for node, exc in errors.items() if not _is_loss(exc)}
    if not results:
        raise _first(refusals or errors)
    return next(iter(results.values())), refusals


async def unload_graph(
    client: FleetClient, request: ClientRequest, params: Fields
) -> dict[str, Any]:
    """End a graph's leases on all nodes.

    :raises InferdError: a node has refused it.
    """
    graph = client.graph_of(params)
    client.graphs = {h: g for h, g in client.graphs.items() if g is not graph}
    async with graph.lock:  # a lease that is under way ends here, too
        for node, handle in tuple(graph.leases.items()):
            fields = {**params, "graph": raw_of(handle)}
            _, errors = await gather(client, request.call, fields, (node,))
            if errors and not _is_loss(_first(errors)):
                raise _first(errors)
    return {}
