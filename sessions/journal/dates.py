"""Dates of stored values that a change of the system clock does not affect."""

from __future__ import annotations

import time
from collections.abc import Callable


def _boot_s() -> float:
    """Return seconds since boot, suspended time included: no user can set this clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Dates:
    """Seconds since 1970: the system clock at the start plus the time elapsed since. Setting the
    system clock makes no stored value older or younger.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _boot_s
    ):
        self._elapsed = elapsed
        self._zero = wall() - elapsed()
        self._ahead_s = 0.0

    def now(self) -> float:
        """Return the date to store."""
        return self._zero + self._ahead_s + self._elapsed()

    def not_before(self, at: float) -> None:
        """Store no date before *at*: without a battery, a machine's clock starts in the past."""
        self._ahead_s += max(0.0, at - self.now())

    def age_s(self, at: float) -> float:
        """Return the age of a date; a date in the future has age 0."""
        return max(0.0, self._zero + self._elapsed() - at)
