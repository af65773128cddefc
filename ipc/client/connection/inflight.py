"""A call under way at the client's end."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import anyio

from ....backends.errors import InferdError, error_from_wire
from ..results import Metadata


class RequestOwner(Protocol):
    """The connection over which a request was sent."""

    def grant_credit(self, request: InFlight, events: int) -> None:
        """Allow the daemon *events* more events of *request*."""

    def abandon_request(self, request: InFlight) -> None:
        """Cancel *request* on the daemon; its events are dropped."""

    def run_soon(self, action: Callable[[], object]) -> None:
        """Run *action* soon on the connection's loop; `__del__` may call this."""


class InFlight:
    """A request, its events and its result. Its connection writes them, its caller reads them.

    `done`: the request has a result or an error for the caller. `answered`: the daemon has finished
    it too, which for a request that was timed out or abandoned happens after `done`. `begun`: an
    event has arrived, read or not. `lost`: the connection was lost before the answer. `metadata` is
    that of a turn in the answer: in the result, or in the data of `Cancelled`.
    """

    __slots__ = (
        "_wake", "abandoned", "answered", "begun", "call", "connection", "deadline", "done",
        "error", "events", "id", "lost", "metadata", "result",
    )  # fmt: skip

    def __init__(self, call: str, deadline: float):
        self.id = 0
        self.connection: RequestOwner
        self.call = call
        self.deadline = deadline
        self.events: deque[dict[str, Any]] = deque()
        self.result: dict[str, Any] = {}
        self.error: InferdError | None = None
        self.metadata: Metadata = {}
        self.done = self.answered = self.abandoned = self.begun = self.lost = False
        self._wake: asyncio.Event | anyio.Event | None = None

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def add_event(self, event: dict[str, Any]) -> None:
        """Add an event that the connection received."""
        self.begun = True
        self.events.append(event)
        self._notify()

    def finish(self, result: dict[str, Any] | None, error: InferdError | None) -> None:
        """Set the result or the error; only the first call counts."""
        if not self.done:
            self.result, self.error, self.done = result or {}, error, True
        self._notify()

    def outcome(self) -> dict[str, Any]:
        """Return the result of a request that is done.

        :raises InferdError: it failed; each caller gets a separate exception.
        """
        if self.error is not None:
            raise error_from_wire(self.error.to_wire())
        return self.result

    async def wait(self) -> None:
        """Wait until there is an event to read, or the request is done."""
        while not self.done and not self.events:
            await self._wait_for_change()

    async def wait_begun(self) -> None:
        """Wait until the first event has arrived, or the request is done."""
        while not self.done and not self.begun:
            await self._wait_for_change()

    async def wait_answered(self) -> None:
        """Wait until the daemon has answered, or the connection was lost."""
        while not self.answered:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        if self._wake is None:
            self._wake = _new_event()
        await self._wake.wait()

    def _notify(self) -> None:
        wake = self._wake
        if wake is None:
            return
        wake.set()
        if isinstance(wake, asyncio.Event):
            wake.clear()  # waiting tasks wake all the same; a new event per token costs 30 us
        else:
            self._wake = None


def _new_event() -> asyncio.Event | anyio.Event:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.Event()
    return asyncio.Event()


class InFlightThread(InFlight):
    """A request whose events another thread reads from `pieces`, which ends with None.

    The reader task fills the queue itself: a token needs neither a task nor a call to the loop.
    """

    __slots__ = ("pieces",)

    def __init__(self, call: str, deadline: float):
        super().__init__(call, deadline)
        self.pieces: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def add_event(self, event: dict[str, Any]) -> None:
        """Add an event for the reading thread."""
        self.begun = True
        self.pieces.put(event)
        self._notify()

    def finish(self, result: dict[str, Any] | None, error: InferdError | None) -> None:
        """Set the result or the error; only the first call counts."""
        first = not self.done
        super().finish(result, error)
        if first:
            self.pieces.put(None)


InFlightT = TypeVar("InFlightT", bound=InFlight)
