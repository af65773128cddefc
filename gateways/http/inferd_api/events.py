"""`/v1/inferd/events`: models, queue and statistics as a stream of events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anyio

from ..exchange import Exchange
from ..exchange.statuses import status_of
from ..exchange.streaming import EVENT_STREAM, STREAM_HEADERS
from ..fields import field_error
from ..turns.snapshots import PAUSE_S, Snapshot
from .fields import EVENTS
from .models import event, models_of
from .monitoring import queue_of, statistics_of

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
