"""The caller with its rights, its turns in the queue, the statistics of models, and
`/v1/inferd/events`: models, queue and statistics as a stream of events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import anyio

from ....backends.texts import seconds_of_span
from ....ipc.client.operations import UsageColumn
from ..callers import STREAMS_MAX, Caller
from ..exchange import Exchange
from ..exchange.exchange import status_of
from ..exchange.streaming import EVENT_STREAM, STREAM_HEADERS
from ..fields import field_error
from ..turns.pool import PAUSE_S, Snapshot
from .fields import EVENTS, USAGE
from .models import event, models_of


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
            **{name: limit or None for name, limit in caller.user.key_limits._asdict().items()},
            "streams_max": STREAMS_MAX,
        },
    }


def is_own(caller: Caller, entry: Mapping[str, Any]) -> bool:
    """Return whether a turn or session that the daemon lists for the caller is the caller's own.

    To a caller without a label, the daemon also lists those of all labels of its user, which belong
    to other callers.
    """
    return bool(entry["label"] == caller.user.label)


async def answer_usage(exchange: Exchange) -> None:
    """Answer with the usage of the caller's key, or that of all users for an operator."""
    query = USAGE.read_query(exchange.query)
    caller = exchange.caller.as_operator() if query.all else exchange.caller
    try:
        since = seconds_of_span(query.since)
    except ValueError as exc:
        raise field_error("since", str(exc)) from None
    by = cast("list[UsageColumn]", [name for name in query.by.split(",") if name])
    async with exchange.turns.pool.lease(caller) as client:
        found = await client.usage_and_limits(by, since=since, all_users=query.all)
    data = [{"object": "usage", **row} for row in found.usage]
    await exchange.send_json(
        {"object": "list", "since": found.since, "data": data, "limits": found.limits}
    )


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
        count = shown[field] = engine.get(counter, 0)  # a graph has no tokens
        rate = None
        # A model that was loaded again counts from 0.
        if before is not None and seconds > 0 and count >= before.get(counter, 0):
            rate = round((count - before.get(counter, 0)) / seconds, 1)
        shown[field.replace("_tokens", "_per_second")] = rate
    return shown | {n: engine.get(n, engine.get(f"computations_{n}", 0)) for n in _TURNS}


KINDS = ("models", "queue", "statistics")
COMMENT_PAUSE_S = 15.0
"""The time after which a stream without events has a comment, so that a proxy keeps it open."""


async def answer_events(exchange: Exchange) -> None:
    """Stream events until the client disconnects or the gateway stops."""
    query = EVENTS.read_query(exchange.query)
    states = _States(exchange, _kinds(query.include))
    snapshots, caller = exchange.turns.snapshots, exchange.caller
    snapshots.add_reader(caller.user)
    try:
        await exchange.start(200, EVENT_STREAM, STREAM_HEADERS)
        written_at_s = time.monotonic()
        while not exchange.turns.stopping:
            now = time.monotonic()
            data = b"".join(states.events_of(await snapshots.snapshot(caller)))
            if not data and now - written_at_s > COMMENT_PAUSE_S:
                data = b": no change\n\n"
            if data:
                written_at_s = now
                await exchange.write(data)
            await anyio.sleep(PAUSE_S)
        await exchange.write(b"", more=False)
    finally:
        snapshots.remove_reader(caller.user)


def _kinds(include: str | None) -> frozenset[str]:
    """Return the kinds of events that a request names.

    :raises InvalidArgument: a kind does not exist.
    """
    if include is None:
        return frozenset(KINDS)
    kinds = frozenset(include.split(","))
    if not kinds <= set(KINDS):
        raise field_error("include", f"the kinds of events are {', '.join(KINDS)}")
    return kinds


class _States:
    """The states that one reader of events was sent; later ones are compared with them."""

    def __init__(self, exchange: Exchange, kinds: frozenset[str]):
        self._caller, self._kinds, self._test_models = exchange.caller, kinds, exchange.test_models
        self._error_body = exchange.api.error_body
        self._written: dict[str, Any] = {}
        self._last: Snapshot | None = None

    def events_of(self, snapshot: Snapshot) -> Iterator[bytes]:
        """Yield the events of the states that differ from those of the last call."""
        error, last = snapshot.error, self._last
        available: dict[str, Any] = {"available": error is None}
        if error is not None:
            available |= self._error_body(error, status_of(error))
        yield from self._changed("daemon", available)
        if error is not None or (last is not None and last.number == snapshot.number):
            return
        self._last = snapshot
        if "models" in self._kinds:
            models = models_of(
                self._caller, snapshot.models, snapshot.memory, test_models=self._test_models
            )
            # The free memory changes all the time, and with it the preferred model.
            yield from self._changed("models", models, models["data"])
        if "queue" in self._kinds:
            yield from self._changed("queue", queue_of(self._caller, snapshot.tasks))
        if "statistics" in self._kinds:
            yield from self._statistics(snapshot, last)

    def _changed(self, kind: str, state: Any, compared: Any = None) -> Iterator[bytes]:
        compared = state if compared is None else compared
        if self._written.get(kind) != compared:
            self._written[kind] = compared
            yield event(kind, state)

    def _statistics(self, snapshot: Snapshot, last: Snapshot | None) -> Iterator[bytes]:
        before = None if last is None else last.statistics
        seconds = 0.0 if last is None else snapshot.at_s - last.at_s
        state = statistics_of(self._caller, snapshot.statistics, before, seconds)
        yield from self._changed("statistics", state, state["data"])
