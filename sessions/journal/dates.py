"""Dates for what is written down, though the machine's clock may be set at any time."""

from __future__ import annotations

import time
from collections.abc import Callable


def _counted_s() -> float:
    """Return seconds that nobody sets, and that go on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Dates:
    """Seconds since 1970: what the clock said at the start, and what has passed since. Setting the
    clock makes nothing that was written down older or younger.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, counted: Callable[[], float] = _counted_s
    ):
        self._counted = counted
        self._zero = wall() - counted()
        self._ahead_s = 0.0

    def now(self) -> float:
        """Return the date to be written."""
        return self._zero + self._ahead_s + self._counted()

    def not_before(self, at: float) -> None:
        """Write no date before *at*: a machine without a battery starts with one of long ago."""
        self._ahead_s += max(0.0, at - self.now())

    def age_s(self, at: float) -> float:
        """Return how long ago a date was; one that is yet to come is now."""
        return max(0.0, self._zero + self._counted() - at)
