"""Requests for models, and residencies of models in memory, each with the requests that wait for it
or are admitted to it.

The decisions need neither a loop nor a clock; the loader carries them out. Four words describe how
far a model is needed; each includes the previous one:

- A model *is in use* if an admitted request has a reader.
- It *is engaged* if it is in use, or if requests wait and none was served since it was loaded. An
  engaged model is not evicted yet.
- It *is wanted* if it is in use or if requests wait.
- It is *busy* if it is wanted, is leased, or has tasks, with readers or without. A busy model is
  not unloaded for being idle, but may be evicted if it is not engaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

import anyio

from ...backends.errors import InferdError
from ...scheduler import PRIORITY_MAX, Priority
from ...sessions.admission.bounds import WaitLimit

AGEING_S_MIN = 10.0
"""The shortest wait after which a request rises by one priority class."""

_numbers = count()


class ResidencyRequest:
    """A client's need for a model, from its request until it has finished.

    *is_absent* returns whether the model's output has no reader at present; such a request does not
    keep the model in memory. *user* is the client's. *subject*, such as a session, identifies
    the request for `Loader.refuse_requests`. With *is_turn*, it is for a turn of a session.
    *on_wait_begins* is called if the request has to wait; it raises an `InferdError` if the request
    may not. *on_wait_continues* is called now and then while the request waits.
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
        on_wait_begins: Callable[[], object] = lambda: None,
        on_wait_continues: Callable[[], object] = lambda: None,
    ) -> None:
        self.priority, self.since, self.is_absent = priority, since, is_absent
        self.user, self.subject = user, subject
        self.is_turn = is_turn
        self.on_wait_begins, self.on_wait_continues = on_wait_begins, on_wait_continues
        self._timeouts_s = timeout_s, queue_timeout_s
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
        limit = WaitLimit.of(*self._timeouts_s)
        with anyio.move_on_after(limit.seconds) as self._scope:
            yield
        if self._scope.cancelled_caught:
            raise self._error or limit.error("the model was not in memory")

    async def wait_woken(self) -> None:
        """Wait for `wake`; return at once if it was called since the last wait."""
        self._woken = self._woken or anyio.Event()
        await self._woken.wait()
        self._woken = None

    def wake(self) -> None:
        """Make the request check again whether it is admitted."""
        self._woken = self._woken or anyio.Event()
        self._woken.set()


JUST_USED_S = 0.2
"""The time after a request's end in which its model is not evicted, because the same program's next
step often follows (`compute` after `set_input`).
"""


class Rank(NamedTuple):
    """The sort key among models; the least is loaded first. See `Residency.rank`."""

    negated_class: int = 0
    """The effective class of the first request, negated."""
    may_be_overtaken: bool = True
    """Whether the first request has waited for less than `residency_s`."""
    negated_waiting: int = 0
    """The number of waiting requests, negated."""
    no_program_continues: bool = True
    number: float = math.inf
    """The number of the first request, or, negated, that of the latest one that continues a
    program.
    """


class Residency:
    """One model's waiting and admitted requests. *residency_s* bounds how long requests of other
    models are delayed by later requests of this model.
    """

    def __init__(self, residency_s: float):
        self.residency_s = residency_s
        self.waiting: list[ResidencyRequest] = []
        self.admitted: list[ResidencyRequest] = []
        self.slots = 1
        self.loaded_at = 0.0
        self.has_served = False
        """Whether a request was admitted since the model was loaded."""
        self.used_at = float("-inf")
        """The time at which the last admitted request ended."""

    def begin_residency(self, now: float, slots: int) -> None:
        """Begin a residency: the model has memory from now on."""
        self.loaded_at, self.slots, self.has_served = now, slots, False

    @property
    def is_wanted(self) -> bool:
        """Whether the model is in use, or a request waits for it."""
        return bool(self.waiting) or self.is_in_use

    @property
    def is_in_use(self) -> bool:
        """Whether an admitted request has a reader that is not absent."""
        return any(not request.is_absent() for request in self.admitted)

    @property
    def is_engaged(self) -> bool:
        """Whether the model is in use, or requests wait and none was served since it was loaded."""
        return self.is_in_use or (bool(self.waiting) and not self.has_served)

    def first_request(self, now: float) -> ResidencyRequest | None:
        """Return the first waiting request, or else the first admitted one."""
        return self._first(self.waiting or self.admitted, now)

    def _first(self, requests: Sequence[ResidencyRequest], now: float) -> ResidencyRequest | None:
        return min(requests, key=lambda r: r.order_key(now, self.residency_s), default=None)

    def rank(self, now: float) -> Rank:
        """Return the sort key among models; models without requests come last.

        Within a priority class, the model with most waiting requests comes first, then the one that
        a program has continued with last. Programs that alternate between models thus catch up with
        those that wait for the next model, and share its loads from then on. Once the first request
        has waited for `residency_s`, only its arrival counts.
        """
        first = self._first((*self.waiting, *self.admitted), now)
        if first is None:
            return Rank()
        negated_class, number = first.order_key(now, self.residency_s)
        if now >= first.since + self.residency_s:
            return Rank(negated_class, may_be_overtaken=False, number=number)
        waiting = -len(self.waiting)
        latest = max((r.number for r in self.waiting if r.continues_program), default=None)
        if latest is None:
            return Rank(negated_class, negated_waiting=waiting, number=number)
        return Rank(
            negated_class, negated_waiting=waiting, no_program_continues=False, number=-latest
        )

    def queue_request(self, request: ResidencyRequest, residencies: Iterable[Residency]) -> None:
        """Add a request that waits. It continues a program if another model was in use just before;
        *residencies* are those of all models.
        """
        others = (other for other in residencies if other is not self)
        request.continues_program = any(
            request.since < other.used_at + JUST_USED_S for other in others
        )
        self.waiting.append(request)

    def admit_waiting(self, blocked: ResidencyRequest | None, now: float) -> list[ResidencyRequest]:
        """Admit and return all admissible requests; *blocked* waits for the model's memory.

        A request that precedes *blocked* is admitted. A later one is admitted if its class is not
        lower, a slot is free, and `closes_at` has not passed. So *blocked* is delayed by at most
        `residency_s` and the turns that have slots by then. The first request after a load is
        always admitted; otherwise models could be loaded and unloaded without serving a request.
        """
        found = []
        for request in sorted(self.waiting, key=lambda r: r.order_key(now, self.residency_s)):
            if blocked is None or not self.has_served or self._may_admit(request, blocked, now):
                self.admit_request(request)
                found.append(request)
        return found

    def admit_request(self, request: ResidencyRequest) -> None:
        """Admit *request*, whether it has waited or not."""
        if request in self.waiting:
            self.waiting.remove(request)
        self.admitted.append(request)
        self.has_served = True

    def end_request(self, request: ResidencyRequest, now: float) -> None:
        """End a request, whether it was admitted or not."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.admitted:
            self.admitted.remove(request)
            self.used_at = now

    def _may_admit(self, request: ResidencyRequest, blocked: ResidencyRequest, now: float) -> bool:
        if request.order_key(now, self.residency_s) < blocked.order_key(now, self.residency_s):
            return True
        has_slot = sum(not r.is_absent() for r in self.admitted) < self.slots
        return has_slot and request.priority >= blocked.priority and now < self.closes_at(blocked)

    def closes_at(self, blocked: ResidencyRequest) -> float:
        """Return the time from which requests later than *blocked* are not admitted."""
        return max(self.loaded_at, blocked.since) + self.residency_s

    def may_be_evicted(self, blocked: ResidencyRequest | None, now: float) -> bool:
        """Return whether the model may be evicted for *blocked*; call `admit_waiting` first."""
        if self.is_engaged:
            return False
        if blocked is None:
            return True
        return now >= min(self.used_at + JUST_USED_S, self.closes_at(blocked))
