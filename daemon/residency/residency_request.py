"""A request for a model: its place in the order, and its wait until it is admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

import anyio

from ...backends.errors import InferdError
from ...scheduler import PRIORITY_MAX, Priority
from ...sessions.admission.wait_limit import WaitLimit

AGEING_S_MIN = 10.0
"""The shortest wait after which a request rises by one priority class."""

_numbers = count()


class WaitListener(Protocol):
    """The receiver of a waiting request's events."""

    def wait_begins(self) -> None:
        """Record that the request has to wait.

        :raises InferdError: the request may not wait.
        """

    def wait_continues(self) -> None:
        """Record that the request is still waiting."""


class ResidencyRequest:
    """A client's need for a model, from its request until it has finished.

    *is_absent* returns whether the model's output has no reader at present; such a request does not
    keep the model in memory. *user* is the client's. *subject*, such as a session, identifies
    the request for `ResidencyGate.refuse_requests`. With *is_turn*, it is for a turn of a session.
    """

    def __init__(
        self,
        priority: Priority,
        since: float,
        is_absent: Callable[[], bool] = lambda: False,
        *,
        user: int | None = None,
        subject: Any = None,
        is_turn: bool = False,
        queue_timeout_s: float = 0.0,
        timeout_s: float = 0.0,
        listener: WaitListener | None = None,
    ) -> None:
        self.priority, self.since, self.is_absent = priority, since, is_absent
        self.user, self.subject = user, subject
        self.is_turn, self.listener = is_turn, listener
        self._limit = WaitLimit.of(timeout_s, queue_timeout_s)
        self.number = next(_numbers)
        self.continues_program = False
        """Whether another model was used within `JUST_USED_S` before it, so that it is likely a
        program's next step.
        """
        self.has_waited = False
        self.admitted_at: float | None = None
        self._error: InferdError | None = None
        self._scope: anyio.CancelScope | None = None
        self._woken: anyio.Event | None = None

    def effective_priority(self, now: float, residency_s: float) -> Priority:
        """Return the priority class, raised by the time of the wait."""
        rises = int(max(0.0, now - self.since) / max(residency_s, AGEING_S_MIN))
        return Priority(min(PRIORITY_MAX, self.priority + rises))

    def order_key(self, now: float, residency_s: float) -> tuple[int, int]:
        """Return the sort key among requests, first served first: (aged class, arrival)."""
        return -self.effective_priority(now, residency_s), self.number

    def refuse(self, error: InferdError) -> None:
        """End the wait with *error*; do nothing once it has ended."""
        self._error = error
        if self._scope is not None:
            self._scope.cancel()

    @contextmanager
    def limit_wait(self) -> Iterator[None]:
        """Limit the wait in the `with` block by the request's timeouts.

        :raises InferdError: the request was refused.
        :raises Timeout: a timeout has passed.
        """
        with anyio.move_on_after(self._limit.seconds) as self._scope:
            yield
        if self._scope.cancelled_caught:
            raise self._error or self._limit.error("the model was not in memory")

    async def wait_woken(self) -> None:
        """Wait for `wake`; return at once if it was called since the last wait."""
        self._woken = self._woken or anyio.Event()
        await self._woken.wait()
        self._woken = None

    def wake(self) -> None:
        """Make the request check again whether it is admitted."""
        self._woken = self._woken or anyio.Event()
        self._woken.set()
