"""Residencies: a model's time in memory while others wait for it, and who may still be admitted.

Decisions without a loop or a clock; `gate` asks for them and acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from ...scheduler import Priority

AGEING_S_MIN = 10.0
"""A request rises by a class each time it has waited for the longest residency, but not sooner."""
LINGER_S = 0.2
"""A model stays for so long after a request: the next step of the same program often follows
(`compute` after `set_input`).
"""

Rank = tuple[int, bool, int, bool, float]
"""The order of models: class with age, patience, number of waiting requests, whether programs
continue, arrival.
"""

_numbers = count()


def never_absent() -> bool:
    """Return False: the request has no reader that could be away."""
    return False


class ResidencyRequest:
    """A client's need for a model, from asking for it until the client is done with it.

    *is_absent* returns whether nobody reads the model's output: then the request does not keep the
    model in memory.
    """

    def __init__(
        self, priority: Priority, since: float, is_absent: Callable[[], bool] = never_absent
    ) -> None:
        self.priority, self.since, self.is_absent = priority, since, is_absent
        self.number = next(_numbers)
        self.continues_program = False
        """It came right after another model had answered: most likely a program's next step."""

    def effective_priority(self, now: float, delay_s_max: float) -> Priority:
        """Return the class with its age."""
        rises = int(max(0.0, now - self.since) / max(delay_s_max, AGEING_S_MIN))
        return Priority(min(Priority.URGENT, self.priority + rises))

    def order_key(self, now: float, delay_s_max: float) -> tuple[int, int]:
        """Return the place among requests, first served first: (class with age, arrival)."""
        return -self.effective_priority(now, delay_s_max), self.number


class Residency:
    """One model's requests: those that wait for it and those admitted. *delay_s_max* is how long
    requests of other models may be delayed by later ones of this model.
    """

    def __init__(self, delay_s_max: float):
        self.delay_s_max = delay_s_max
        self.waiting: list[ResidencyRequest] = []
        self.admitted: list[ResidencyRequest] = []
        self.slots = 1
        self.loaded_at = 0.0
        self.has_served = False
        """A request has been admitted since."""
        self.used_at = float("-inf")
        """When the last admitted request ended."""

    def begin_residency(self, now: float, slots: int) -> None:
        """Note that the model has memory from now on."""
        self.loaded_at, self.slots, self.has_served = now, slots, False

    @property
    def is_wanted(self) -> bool:
        """Whether any request needs the model."""
        return bool(self.waiting) or self.is_in_use

    @property
    def is_in_use(self) -> bool:
        """Whether a request is admitted whose reader is not away."""
        return any(not request.is_absent() for request in self.admitted)

    @property
    def is_engaged(self) -> bool:
        """Whether the model is in use, or has not served the request that it was loaded for."""
        return self.is_in_use or (bool(self.waiting) and not self.has_served)

    def first_request(self, now: float) -> ResidencyRequest | None:
        """Return the first of the waiting requests, or, without any, of the admitted ones."""
        return self._first(self.waiting or self.admitted, now)

    def _first(self, requests: Sequence[ResidencyRequest], now: float) -> ResidencyRequest | None:
        return min(requests, key=lambda r: r.order_key(now, self.delay_s_max), default=None)

    def rank(self, now: float) -> Rank:
        """Return the place among models by their requests; models without any come last.

        Of equal class, the model with most waiting requests comes first; of these the one that a
        program has continued to last. So programs that use several models in turns catch up with
        those that wait for the next one, and share the loads from then on. Once the first request
        has waited for `delay_s_max`, its arrival alone counts.
        """
        first = self._first((*self.waiting, *self.admitted), now)
        if first is None:
            return 0, True, 0, True, float("inf")
        effective, arrival = first.order_key(now, self.delay_s_max)
        if now >= first.since + self.delay_s_max:
            return effective, False, 0, True, arrival
        latest = max((r.number for r in self.waiting if r.continues_program), default=None)
        if latest is None:
            return effective, True, -len(self.waiting), True, arrival
        return effective, True, -len(self.waiting), False, -latest

    def queue_request(self, request: ResidencyRequest, residencies: Iterable[Residency]) -> None:
        """Let a request wait; *residencies* are all models'. If a request of another model ended
        just before, the new one continues a program.
        """
        others = (other for other in residencies if other is not self)
        request.continues_program = any(
            request.since < other.used_at + LINGER_S for other in others
        )
        self.waiting.append(request)

    def admit_waiting(self, rival: ResidencyRequest | None, now: float) -> list[ResidencyRequest]:
        """Admit the requests that may be, and return them; *rival* waits for the model's memory.

        A request that precedes *rival* is admitted. A later one is if its own class is not lower, a
        slot is free, and the residency may not end yet: so *rival* is delayed by no more than
        `delay_s_max` and the turns that have slots by then. The request that the model was loaded
        for is admitted in any case, or models would be loaded and unloaded without serving anybody.
        """
        found = []
        for request in sorted(self.waiting, key=lambda r: r.order_key(now, self.delay_s_max)):
            if rival is None or not self.has_served or self._may_admit(request, rival, now):
                self.admit_request(request)
                found.append(request)
        return found

    def admit_request(self, request: ResidencyRequest) -> None:
        """Admit a request."""
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

    def _may_admit(self, request: ResidencyRequest, rival: ResidencyRequest, now: float) -> bool:
        if request.order_key(now, self.delay_s_max) < rival.order_key(now, self.delay_s_max):
            return True
        has_slot = sum(not r.is_absent() for r in self.admitted) < self.slots
        return has_slot and request.priority >= rival.priority and now < self.closes_at(rival)

    def closes_at(self, rival: ResidencyRequest) -> float:
        """Return when no request later than *rival* is admitted any more."""
        return max(self.loaded_at, rival.since) + self.delay_s_max

    def may_end(self, rival: ResidencyRequest | None, now: float) -> bool:
        """Return whether the model may be evicted for *rival*, after `admit_waiting` has admitted
        no request.
        """
        if self.is_engaged:
            return False
        if rival is None:
            return True
        return now >= min(self.used_at + LINGER_S, self.closes_at(rival))
