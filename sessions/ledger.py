"""Counts over all models: how many turns wait, whose they are, how long turns take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import count

from ..backends.errors import Busy
from .table import State

__all__ = ("Ledger",)

SMOOTHING = 0.1
TURN_S_DEFAULT = 5.0


class Ledger:
    """Bounds the turns that wait, in all and per owner; hands out task ids.

    Owned by the daemon's event loop. `turn_s` is the running mean of how long a slot was held.
    """

    def __init__(
        self,
        waiting_max: int,
        waiting_owner_max: int,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self.seconds = seconds
        self.waiting_max, self.waiting_owner_max = waiting_max, waiting_owner_max
        self.waiting: Counter[int] = Counter()
        self.refused = 0
        self.turn_s = TURN_S_DEFAULT
        self._ids = count(1)

    def task_id(self) -> int:
        """Return a number that no task has had."""
        return next(self._ids)

    def moved(self, owner: int, before: State, after: State) -> None:
        """Note that a session of *owner* went from one state to another."""
        if before is not after:
            self.waiting[owner] += (after is State.WAITING) - (before is State.WAITING)
            if not self.waiting[owner]:
                del self.waiting[owner]

    def took(self, seconds: float) -> None:
        """Note how long a turn held its slot."""
        self.turn_s += SMOOTHING * (seconds - self.turn_s)

    def admit(self, owner: int, slots: int) -> None:
        """Refuse one more waiting turn where a bound is reached.

        :raises Busy: with the queue's length and an estimate of when there is room.
        """
        total, own = self.waiting.total(), self.waiting[owner]
        if total < self.waiting_max and own < self.waiting_owner_max:
            return
        self.refused += 1
        retry_after_s = round(max(0.1, self.turn_s / slots), 3)
        whose, bound = ("yours", self.waiting_owner_max)
        if own < self.waiting_owner_max:
            whose, bound = ("in all", self.waiting_max)
        raise Busy(
            f"{own if whose == 'yours' else total} tasks wait ({whose}); the limit is {bound}",
            hint=f"try again in {retry_after_s:g} s, or raise the limit in the configuration",
            data={"queue_length": total, "position": total, "retry_after_s": retry_after_s},
        )
