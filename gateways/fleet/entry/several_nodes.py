"""Calls that several nodes answer, at once or one after the other.

A swap that fails on a node is undone on the nodes before it, so that the name stands for the same
model everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ....backends.errors import Busy, InferdError
from ....ipc.messages import ContextUse, Merge
from ..frames import Fields, number_in, raw_of, text_in, values_of
from ..routing.calls import merge_results
from ..routing.choice import RETRY_HINT, RETRY_S
from ..routing.homes import SessionKey
from .client import ClientRequest, FleetClient
from .opening import end_unused_lease


def _first(errors: dict[str, InferdError]) -> InferdError:
    """Return the error to report: one of a node that answered, rather than of one that is lost."""
    return min(errors.values(), key=_is_loss)


def _is_loss(error: InferdError) -> bool:
    return bool(error.data.get("cause") == "node")


async def call_all(client: FleetClient, request: ClientRequest, params: Fields) -> dict[str, Any]:
    """Make a call on all nodes that can be reached, and return the merged result.

    :raises InferdError: it failed on all of them.
    """
    nodes = client.fleet.nodes
    results, errors = await client.gather(request.call, params, nodes.reachable())
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


async def call_for_session(
    client: FleetClient, request: ClientRequest, params: Fields
) -> dict[str, Any]:
    """Read, change or delete a session by its id: call all reachable nodes, one of which has it.

    :raises Busy: no node has it, and it may be on one that cannot be reached.
    """
    nodes = client.fleet.nodes
    key = SessionKey(client.owner, text_in(params, "session_id"))
    await client.fleet.moves.wait_settled(key)
    await client.fleet.continued.home_of(key, client.fleet.homes.find(key))
    results, errors = await client.gather(request.call, params, nodes.reachable())
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
    client.fleet.buffers.close_connection(client.connection)
    return result


async def _call_connected(
    client: FleetClient, request: ClientRequest, params: Fields
) -> tuple[dict[str, Any], dict[str, InferdError]]:
    """Return one result, and the errors of nodes that have refused the call.

    :raises InferdError: it failed on all nodes.
    """
    nodes = list(client.upstreams) or client.fleet.nodes.reachable()[:1]
    results, errors = await client.gather(request.call, params, nodes)
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
            _, errors = await client.gather(request.call, fields, (node,))
            if errors and not _is_loss(_first(errors)):
                raise _first(errors)
    return {}


async def call_for_model(
    client: FleetClient, request: ClientRequest, params: Fields
) -> dict[str, Any]:
    """Make a call on all nodes that have the model, one after the other; return the last result.

    :raises InferdError: a node has failed; `data` names it, and the nodes that have succeeded.
    """
    nodes = client.fleet.nodes
    model = nodes.model_name(text_in(params, "name"))
    result: dict[str, Any] = {}
    done: list[str] = []
    for node in nodes.with_model(model) or nodes.reachable()[:1]:
        try:
            result = await _call(client, node, request.call, params)
        except InferdError as exc:
            exc.data |= {"node": node, "nodes_done": done}
            raise
        done.append(node)
    return result


async def swap_model(client: FleetClient, request: ClientRequest, params: Fields) -> dict[str, Any]:
    """Swap a model on all nodes that have it, or on none.

    :raises InferdError: a node has failed; `data` names it, and the nodes that have succeeded.
    """
    model = client.fleet.nodes.model_name(text_in(params, "name"))
    async with client.fleet.swaps.holding(model):
        return await _swap(client, model, request.call, params)


async def _swap(client: FleetClient, model: str, call: str, params: Fields) -> dict[str, Any]:
    nodes = client.fleet.nodes
    result: dict[str, Any] = {}
    before: dict[str, str] = {}
    for node in nodes.with_model(model) or nodes.reachable()[:1]:
        try:
            target = await _target(client, node, model)
            with nodes.swapping(node, model):
                result = await _call(client, node, call, params)
        except InferdError as exc:
            undone = await _undo_swaps(client, model, call, params, before)
            done = [node for node in before if node not in undone]
            exc.data |= {"node": node, "nodes_done": done, "nodes_undone": undone}
            raise
        before[node] = target
    return result | {"nodes": list(before), "unreachable": nodes.unreachable()}


async def _target(client: FleetClient, node: str, model: str) -> str:
    """Return the model for which a name stands on a node: its own name, or the target of a swap."""
    listed = (await _call(client, node, "models", {}))["models"]
    return next((m["swapped_to"] for m in listed if m["name"] == model), "") or model


async def _undo_swaps(
    client: FleetClient, model: str, call: str, params: Fields, before: Mapping[str, str]
) -> list[str]:
    """Swap back the nodes on which the name stood for another model; return those that succeed.

    A model whose own file has changed cannot be swapped back.
    """
    undone: list[str] = []
    for node, target in before.items():
        if target == text_in(params, "to"):
            continue
        fields = {**params, "to": raw_of(target), "force": raw_of(True)}
        try:
            with client.fleet.nodes.swapping(node, model):
                await _call(client, node, call, fields)
        except InferdError:
            continue  # the error of the swap names this node as one that is done
        undone.append(node)
    return undone


async def _call(client: FleetClient, node: str, call: str, params: Fields) -> dict[str, Any]:
    return values_of(await client.upstream(node).call(call, params))
