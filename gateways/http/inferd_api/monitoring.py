"""The caller with its rights, its turns in the queue, and the statistics of models."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..callers import Caller
from ..exchange import Exchange
from ..quotas import STREAMS_MAX


async def answer_caller(exchange: Exchange) -> None:
    """Answer with the caller and its rights, so that a program can hide all else from its user."""
    await exchange.send_json(caller_object(exchange.caller))


def caller_object(caller: Caller) -> dict[str, Any]:
    """Return a caller in the form of the API."""
    return {
        "object": "caller",
        "name": caller.name,
        "rights": ["use", "manage"] if caller.operator else ["use"],
        "priority_max": caller.priority_max,
        "models": None if caller.models is None else sorted(caller.models),
        "limits": {
            "requests_max": caller.requests_max or None,
            "tokens_per_minute": caller.tokens_per_minute or None,
            "streams_max": STREAMS_MAX,
        },
    }


def is_own(caller: Caller, entry: Mapping[str, Any]) -> bool:
    """Return whether a turn or session that the daemon lists for the caller is the caller's own.

    To a caller without a label, the daemon also lists those of all labels of its user, which belong
    to other callers.
    """
    return bool(entry["label"] == caller.user.label)


_SHOWN = (
    *("session_id", "model", "state", "priority", "effective_priority", "position", "starts_in_s"),
    *("prompt_tokens", "computed_tokens", "output_tokens", "age_s"),
)


async def answer_queue(exchange: Exchange) -> None:
    """Answer with the caller's own turns in the daemon, model by model in their order."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        tasks = await client.queue()
    await exchange.send_json(queue_of(exchange.caller, tasks))


def queue_of(caller: Caller, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the caller's own turns among those that the daemon lists for its user."""
    own = [task for task in tasks if is_own(caller, task) and caller.may_use(task["model"])]
    return {"object": "list", "data": [_turn(task) for task in own]}


def _turn(task: Mapping[str, Any]) -> dict[str, Any]:
    return {"object": "queue.turn", **{name: task.get(name) for name in _SHOWN}}


_COUNTERS = {
    "generated_tokens": "generated",
    "computed_tokens": "prompt",
    "cached_tokens": "cached",
}
"""The daemon's name of each counter."""
_TURNS = ("running", "waiting", "parked")

Engines = Mapping[str, Mapping[str, Any]]
"""The counters of each loaded model, by its name."""


async def answer_statistics(exchange: Exchange) -> None:
    """Answer with the statistics of the models that the caller may use."""
    async with exchange.turns.pool.lease(exchange.caller) as client:
        stats = await client.stats()
    await exchange.send_json(statistics_of(exchange.caller, stats["models"]))


def statistics_of(
    caller: Caller, engines: Engines, before: Engines | None = None, seconds: float = 0.0
) -> dict[str, Any]:
    """Return the statistics, with rates over the *seconds* since those of *before*."""
    data = [
        _statistics(name, engine, (before or {}).get(name), seconds)
        for name, engine in engines.items()
        if caller.may_use(name)
    ]
    return {"object": "statistics", "time": round(time.time(), 3), "data": data}


def _statistics(
    name: str, engine: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float
) -> dict[str, Any]:
    shown: dict[str, Any] = {"model": name}
    for field, counter in _COUNTERS.items():
        shown[field] = engine[counter]
        rate = None
        # A model that was loaded again counts from 0.
        if before is not None and seconds > 0 and engine[counter] >= before[counter]:
            rate = round((engine[counter] - before[counter]) / seconds, 1)
        shown[field.replace("_tokens", "_per_second")] = rate
    return shown | {turns: engine[turns] for turns in _TURNS}
