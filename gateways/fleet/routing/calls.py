"""The calls of the protocol as an entry handles them: their rows, and results of all nodes as one.

Entries of lists have the field `node`. A model that several nodes have is one entry, whose field
`nodes` has the entries of the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from ....ipc.messages import CALLS, Call, Map, Merge
from ....ipc.messages.calls import HANDLES, SESSION, derived_route


def row_of(call: str, params: Collection[str]) -> Call | None:
    """Return the row of a call; None for one that the entry can send nowhere.

    A call that is not in the protocol's table, of a newer client, is routed by its fields. Handles
    in its results are expected under the names of known ones.
    """
    known = CALLS.get(call)
    if known is not None:
        return known
    route = derived_route(params, ())
    if route is None:
        return None
    return Call(
        Map, Map, right=None, route=route, handles_in_result=HANDLES, handles_in_events=HANDLES
    )


Result: TypeAlias = dict[str, Any]
Results: TypeAlias = Mapping[str, Result]
"""Results by node."""
ContextMap: TypeAlias = Callable[[str, int], int]
"""Maps a node and its handle to the client's handle."""

STATES = ("ready", "loading", "unloading", "cold", "failed")
"""States of a model, the one that is most useful to a client first."""
SUMMED = (
    *("connections", "sessions", "sessions_max", "sessions_yielded", "sessions_waiting"),
    *("sessions_dormant", "sessions_expired", "waiting", "running", "parked", "refused"),
    *("recovered", "cores"),
)
"""Statistics of a fleet that are the sums of its nodes'."""
OWN = (*SUMMED, "instance", "pid", "uptime_s")
"""Statistics that are also reported per node, under `nodes`."""


def merge_results(call: str, results: Results, map_context: ContextMap) -> Result:
    """Return one result for the *results* of a call, of which there is at least one."""
    row, (node, first) = CALLS[call], next(iter(results.items()))
    match row.merge:
        case Merge.MODELS:
            return _models(results)
        case Merge.STATISTICS:
            return _statistics(results)
        case Merge.USAGE:
            return _usage(results)
        case Merge.LISTS:
            return _lists(row, results, map_context)
        case Merge.ANY:
            return {key: any(result[key] for result in results.values()) for key in first}
    if SESSION in first:
        session = {**first[SESSION], "node": node}
        if session["context"] is not None:
            session["context"] = map_context(node, session["context"])
        return {**first, SESSION: session}
    return dict(first)


def _lists(row: Call, results: Results, map_context: ContextMap) -> Result:
    """Return the list of all nodes, and the sum of each further number, or the least time."""
    merged: Result = {}
    for field in msgspec.structs.fields(row.result):
        name = field.name
        values = [(node, result[name]) for node, result in results.items() if name in result]
        if field.type is int:
            merged[name] = sum(value for _, value in values)
        elif field.type is float:
            merged[name] = min((value for _, value in values), default=0.0)
        else:
            entries = [{**entry, "node": node} for node, value in values for entry in value]
            merged[name] = _sorted(name, entries)
            for entry in entries:
                if entry.get("context") is not None:
                    entry["context"] = map_context(entry["node"], entry["context"])
    return merged


USAGE_KEYS = ("start", "uid", "user", "label", "key", "model")
"""The fields of a group of usage; the others are its amounts."""


def _usage(results: Results) -> Result:
    """Return the usage of all nodes, in the order of the first node's groups. A user with a name
    has another number on each node, of which the first one is returned.
    """
    groups: dict[tuple[Any, ...], Result] = {}
    for result in results.values():
        for row in result["usage"]:
            found = {key: row[key] for key in USAGE_KEYS}
            if row["user"]:
                found["uid"] = None
            group = groups.setdefault(tuple(found.values()), {key: row[key] for key in USAGE_KEYS})
            for field, value in row.items():
                if field not in USAGE_KEYS:
                    group[field] = group.get(field, 0) + value
    rows = sorted(groups.values(), key=lambda row: row["start"] or 0.0)
    limits = [
        {**one, "node": node}
        for node, result in results.items()
        for one in result.get("limits", ())
    ]
    since = min(result["since"] for result in results.values())
    return {"usage": rows, "since": since, "limits": limits}


def _sorted(name: str, entries: list[Result]) -> list[Result]:
    if name == "tasks":
        return sorted(entries, key=lambda task: (task["model"], task["node"]))  # each node's order
    return sorted(entries, key=lambda note: -note["at"]) if name == "deletions" else entries


def _models(results: Results) -> Result:
    by_name: dict[str, list[Result]] = {}
    for node, result in results.items():
        for model in result["models"]:
            by_name.setdefault(model["name"], []).append({**model, "node": node})
    files = [
        {**file, "node": node}
        for node, result in results.items()
        for file in result.get("not_offered", ())
    ]
    models = [_one_model(entries) for entries in by_name.values()]
    return {"models": models} | ({"not_offered": files} if files else {})


def _one_model(entries: list[Result]) -> Result:
    """Return the entry of a model, which is that of the node where it is most ready."""
    best = min(entries, key=lambda entry: STATES.index(entry["state"]))
    sums = {key: sum(entry[key] for entry in entries) for key in ("leases", "tasks")}
    return {**best, **sums, "node": best["node"], "nodes": entries}


def _statistics(results: Results) -> Result:
    by_node = {node: result["stats"] for node, result in results.items()}
    first = next(iter(by_node.values()))
    merged = dict(first)
    for key in SUMMED:
        merged[key] = sum(stats[key] for stats in by_node.values())
    merged["uptime_s"] = max(stats["uptime_s"] for stats in by_node.values())
    merged["draining"] = all(stats["draining"] for stats in by_node.values())
    merged["models"] = {
        f"{name}@{node}": counters
        for node, stats in by_node.items()
        for name, counters in stats["models"].items()
    }
    merged["components"] = _labelled(by_node, "components")
    merged["pending_restart"] = sorted({s for v in by_node.values() for s in v["pending_restart"]})
    merged["metrics"] = _metrics(by_node)
    merged["nodes"] = {n: {key: stats[key] for key in OWN} for n, stats in by_node.items()}
    return {"stats": merged}


def _labelled(by_node: Mapping[str, Result], key: str) -> list[Result]:
    return [{**entry, "node": node} for node, stats in by_node.items() for entry in stats[key]]


def _metrics(by_node: Mapping[str, Result]) -> dict[str, list[Result]]:
    """Return the samples of all nodes, with the label `node`."""
    families: dict[str, list[Result]] = {}
    for node, stats in by_node.items():
        for family, samples in stats["metrics"].items():
            families.setdefault(family, []).extend({**s, "node": node} for s in samples)
    return families


def session_homes(results: Results) -> Iterable[tuple[str, str, str]]:
    """Yield the label, id and node of each session with an id, from the results of `sessions`."""
    for node, result in results.items():
        for session in result["sessions"]:
            if session["session_id"] is not None:
                yield session["label"], session["session_id"], node
