"""One call under way, as the client sees it."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import anyio

from ....backends.errors import InferdError, error_from_wire


class RequestOwner(Protocol):
    """The connection that a request was sent on."""

    def grant_credit(self, request: InFlight, events: int) -> None:
        """Allow the daemon *events* more events of *request*."""

    def abandon_request(self, request: InFlight) -> None:
        """Cancel *request* on the daemon; its events are dropped."""

    def run_soon(self, action: Callable[[], object]) -> None:
        """Run *action* on the connection's loop, soon; callable from `__del__`."""


class InFlight:
    """A request, its events and its result. Its connection writes it, its caller reads it.

    `done`: the caller's side is over, with a result or an error. `answered`: the daemon's side is
    over too; a request that was timed out or abandoned is done before it is answered. `begun`: an
    event has arrived, read or not. `lost`: the connection was lost before the answer arrived.
    `connection`: where it was sent.
    """

    __slots__ = (
        "_wake", "abandoned", "answered", "begun", "call", "connection", "deadline", "done",
        "error", "events", "id", "lost", "result",
    )  # fmt: skip

    def __init__(self, call: str, deadline: float):
        self.id = 0
        self.connection: RequestOwner
        self.call = call
        self.deadline = deadline
        self.events: deque[dict[str, Any]] = deque()
        self.result: dict[str, Any] = {}
        self.error: InferdError | None = None
        self.done = self.answered = self.abandoned = self.begun = self.lost = False
        self._wake: asyncio.Event | anyio.Event | None = None

    @property
    def left_s(self) -> float:
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

        :raises InferdError: it failed; every caller gets an exception of its own.
        """
        if self.error is not None:
            raise error_from_wire(self.error.to_wire())
        return self.result

    async def wait(self) -> None:
        """Return when an event waits to be read, or the end is there."""
        while not self.done and not self.events:
            await self._changed()

    async def wait_begun(self) -> None:
        """Return when the first event has come, or the end."""
        while not self.done and not self.begun:
            await self._changed()

    async def wait_answered(self) -> None:
        """Return when the daemon has answered, or the connection is gone."""
        while not self.answered:
            await self._changed()

    async def _changed(self) -> None:
        if self._wake is None:
            self._wake = _new_event()
        await self._wake.wait()

    def _notify(self) -> None:
        wake = self._wake
        if wake is None:
            return
        wake.set()
        if isinstance(wake, asyncio.Event):
            wake.clear()  # those who wait go on all the same; a new one per token costs 30 us
        else:
            self._wake = None


def _new_event() -> asyncio.Event | anyio.Event:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return anyio.Event()
    return asyncio.Event()


class InFlightThread(InFlight):
    """A request whose events another thread reads from `pieces`; None stands for the end.

    The reader task puts events there itself: no task and no call into the loop per token.
    """

    __slots__ = ("pieces",)

    def __init__(self, call: str, deadline: float):
        super().__init__(call, deadline)
        self.pieces: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def add_event(self, event: dict[str, Any]) -> None:
        """Add an event that the connection received."""
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
