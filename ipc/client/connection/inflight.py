"""A call under way at the client's end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

from ....backends.errors import InferdError, error_from_wire
from ..results import Metadata

_READ_EVENTS_MAX = 8
"""Events that are kept after they were read; the removal of all of them at once costs less."""


class RequestOwner(Protocol):
    """The connection over which a request was sent."""

    def grant_credit(self, request: InFlight, events: int) -> None:
        """Allow the daemon to send *events* more events of *request*."""

    def abandon_request(self, request: InFlight) -> None:
        """Cancel *request* in the daemon; its events are dropped."""

    def run_soon(self, action: Callable[[], object]) -> None:
        """Run *action* soon where the connection may be used; `__del__` may call this."""

    async def wait_for(
        self, request: InFlight, ready: Callable[[], bool], until: float = math.inf
    ) -> None:
        """Wait until *request* has changed so that *ready* returns true, or until *until*."""


def no_metadata() -> Metadata:
    """Return the metadata of a turn that has not ended."""
    return cast("Metadata", {})


class InFlight:
    """A request, its events and its result. Its connection writes them, its caller reads them.

    `done` means that the request has a result or an error for the caller. `answered` means that the
    daemon has finished it too; a request that was timed out or abandoned is done before. `begun`
    means that an event has arrived, read or not. `lost` means that the connection was lost before
    the answer. `metadata` is that of a turn, from the result or from the data of `Cancelled`.
    `waiters` belongs to the connection.
    """

    __slots__ = (
        "_events", "_events_read", "abandoned", "answered", "begun", "call", "connection",
        "deadline", "done", "error", "id", "lost", "metadata", "result", "waiters",
    )  # fmt: skip

    def __init__(self, call: str, deadline: float):
        self.id = 0
        self.connection: RequestOwner
        self.call = call
        self.deadline = deadline
        self.result: dict[str, Any] = {}
        self.error: InferdError | None = None
        self.metadata = no_metadata()
        self.done = self.answered = self.abandoned = self.begun = self.lost = False
        self.waiters: list[Any] = []
        self._events: list[dict[str, Any]] = []
        self._events_read = 0

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def add_event(self, event: dict[str, Any]) -> None:
        """Add an event that the connection received; adding the last one again changes nothing."""
        if not self._events or self._events[-1] is not event:
            self._events.append(event)
        self.begun = True

    def has_events(self) -> bool:
        """Return whether there is an event to read."""
        return self._events_read < len(self._events)

    def next_event(self) -> dict[str, Any]:
        """Return the next event."""
        event = self._events[self._events_read]
        self._events_read += 1
        if self._events_read > _READ_EVENTS_MAX:
            del self._events[:_READ_EVENTS_MAX]  # not the last: `add_event` compares it
            self._events_read -= _READ_EVENTS_MAX
        return event

    def finish(self, result: dict[str, Any] | None, error: InferdError | None) -> None:
        """Set the result or the error; only the first call counts."""
        if not self.done:
            self.result, self.error, self.done = result or {}, error, True

    def outcome(self) -> dict[str, Any]:
        """Return the result of a request that is done.

        :raises InferdError: the request failed; each caller gets a separate exception.
        """
        if self.error is not None:
            raise error_from_wire(self.error.to_wire())
        return self.result

    def has_news(self) -> bool:
        """Return whether there is an event to read, or the request is done."""
        return self.done or self._events_read < len(self._events)

    def has_begun(self) -> bool:
        """Return whether the first event has arrived, or the request is done."""
        return self.done or self.begun

    def is_answered(self) -> bool:
        """Return whether the daemon has answered, or the connection was lost."""
        return self.answered

    async def wait(self) -> None:
        """Wait until there is an event to read, or the request is done."""
        if not self.has_news():
            await self.connection.wait_for(self, self.has_news)

    async def wait_begun(self) -> None:
        """Wait until the first event has arrived, or the request is done."""
        if not self.has_begun():
            await self.connection.wait_for(self, self.has_begun)

    async def wait_answered(self, s_max: float) -> None:
        """Wait until the daemon has answered, or the connection was lost, for at most *s_max*."""
        if not self.answered:
            await self.connection.wait_for(self, self.is_answered, time.monotonic() + s_max)
