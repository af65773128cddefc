"""Jobs of a fleet: the calls on each go to the node that has its files, and computes its requests.

A file's node is chosen when its first part arrives, by the model of its first request. A job and
its files never move. The entry remembers the nodes of the latest ones, and queries all nodes for
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from ....backends.errors import Busy, ModelNotFound, NotFound
from ..frames import Fields, raw_of, text_in, values_of
from ..routing.choice import RETRY_HINT, RETRY_S, RouteRequest
from ..routing.loads import CLASSES
from .client import ClientRequest, FleetClient

LINE_BYTES_MAX = 64 << 10
"""The longest beginning of a file in which its first request's model is read."""
IDS = ("file", "job")
"""The fields with an id that decides on the node; the first one that a call has counts."""
LISTS = {"file": "files", "job": "jobs"}
"""By these fields, the call that describes one thing or lists all, and the field of its result."""


class _Body(msgspec.Struct):
    model: str = ""


class _Line(msgspec.Struct):
    body: _Body = msgspec.field(default_factory=_Body)


async def call_on_jobs(
    client: FleetClient, request: ClientRequest, params: Fields
) -> Mapping[str, Any]:
    """Make a call on the node that has a job or file, or list those of all nodes.

    :raises Busy: no node has it, and it may be on one that cannot be reached.
    """
    fields = request.row.params.__struct_fields__
    field = next(name for name in IDS if name in fields)
    if name := text_in(params, field):
        node = await _node_of(client, field, name)
    elif (listed := LISTS[field]) in request.row.result.__struct_fields__:
        return await _list_all(client, request, params, listed)
    else:
        node = _choose_node(client, params)
    _, raw = await client.exchange(request, node, params)
    result = values_of(raw)
    for key in IDS:
        if key in result:
            result[key] = _on_node(result[key], node)
            _note_place(client, result[key]["id"], node)
    for key in LISTS.values():
        if key in result:
            result[key] = [_on_node(one, node) for one in result[key]]
    return result


def _note_place(client: FleetClient, name: str, node: str) -> None:
    # By user, since users choose the ids of their jobs.
    client.fleet.job_places.put((client.owner.user, name), node)


def _on_node(described: dict[str, Any], node: str) -> dict[str, Any]:
    return {**described, "node": node}


async def _node_of(client: FleetClient, field: str, name: str) -> str:
    """Return the node that has a job or file of this id; any one if none has it, which answers so.

    :raises Busy: no node has it, and it may be on one that cannot be reached.
    """
    nodes = client.fleet.nodes
    known = client.fleet.job_places.find((client.owner.user, name))
    if known is not None:
        return known
    query = {field: raw_of(name)}
    if field == "job" and not client.owner.user:
        query["all"] = raw_of(True)  # operators control the jobs of all users
    results, errors = await client.gather(LISTS[field], query, nodes.reachable())
    for node in results:
        _note_place(client, name, node)
        return node
    lost = [node for node, exc in errors.items() if exc.data.get("cause") == "node"]
    if missing := sorted({*nodes.unreachable(), *lost}):
        raise Busy(
            f"the {field} may be on a node that cannot be reached: {', '.join(missing)}",
            hint=RETRY_HINT,
            data={"cause": "node", "nodes": missing, "retry_after_s": RETRY_S},
        )
    others = [exc for exc in errors.values() if not isinstance(exc, NotFound)]
    if others:
        raise others[0]
    return next(iter(errors))


def _choose_node(client: FleetClient, params: Fields) -> str:
    """Return the node for a new file, or for a call without an id, which it refuses: one that
    has the model of the file's first request, if the fleet has it.

    :raises Busy: no node can be reached.
    """
    nodes = client.fleet.nodes
    model = nodes.model_name(_first_model(params))
    with suppress(ModelNotFound, Busy):  # a job may wait where no turn may
        return nodes.choose(RouteRequest(model, CLASSES.index("low")))
    names = nodes.with_model(model) or nodes.reachable()
    return next((name for name in names if name not in nodes.drained), names[0])


def _first_model(params: Fields) -> str:
    """Return the model of the first request in a part of a file; empty if it cannot be read. The
    node refuses the file then.
    """
    with suppress(KeyError, msgspec.DecodeError, UnicodeDecodeError):
        data = msgspec.msgpack.decode(params["data"], type=bytes)[:LINE_BYTES_MAX]
        return msgspec.json.decode(data.partition(b"\n")[0], type=_Line).body.model
    return ""


async def _list_all(
    client: FleetClient, request: ClientRequest, params: Fields, key: str
) -> Mapping[str, Any]:
    """Return the jobs or files of all nodes that can be reached, the latest first.

    :raises InferdError: the call has failed on all of them.
    """
    nodes = client.fleet.nodes
    results, errors = await client.gather(request.call, params, nodes.reachable())
    if not results:
        raise next(iter(errors.values()))
    found = [_on_node(one, node) for node, result in results.items() for one in result[key]]
    found.sort(key=lambda one: -one["created_at"])
    missing = sorted({*nodes.unreachable(), *errors})
    return {key: found} | ({"unreachable": missing} if missing else {})
