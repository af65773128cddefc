"""Calls on a model by its name: on all nodes that have it, one after the other.

A swap that fails on a node is undone on the nodes before it, so that the name stands for the same
model everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .....backends.errors import InferdError
from ...calls.frames import Fields, raw_of, text_in, values_of
from ..clients.client import ClientRequest, FleetClient


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
