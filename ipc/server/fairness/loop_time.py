"""The event loop's time that requests take by user, and the pauses that bound it.

The loop and the models share the machine's cores: a user who keeps the loop busy slows the turns of
all others. While requests of other users are in flight, a user's requests may therefore take a
tenth of a core; more of them wait.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")
LOOP_SHARE = 0.1
"""Part of a core that a user's requests may take."""
READING_SHARE = 0.05
"""The part of it that reading requests may take. Reading does not wait for other requests of its
user, because otherwise a request that cancels them could not arrive.
"""
BURST_S = 0.05
"""Time that may be taken at once by a user who took none before."""
LONGEST_PAUSE_S = 2.0
"""A user waits no longer than this for time that was taken while no other user had requests."""
CHECK_S = 0.05
"""Time after which waiting requests check again whether other users' requests have ended."""
REMEMBERED_USERS = 1000
"""Users whose time is remembered; with more of them, those who have repaid it are forgotten."""
BEGIN_S, LONG_STEP_S = 0.005, 0.001
"""A request's first milliseconds count, then only its long steps. The short ones pass on the output
of a turn, which must not delay other requests of the user.
"""


class TimeShares:
    """The time that each user may take: *share* of all time, and up to *burst_s* at once."""

    def __init__(
        self,
        share: float,
        burst_s: float,
        longest_pause_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._share, self._burst_s, self._longest_pause_s = share, burst_s, longest_pause_s
        self._clock = clock
        self._repaid_at_s: dict[int, float] = {}
        """By user, the moment at which the user's share will have covered the time taken."""

    def charge(self, uid: int, seconds: float) -> None:
        """Charge a user for time that was taken."""
        now_s = self._clock()
        repaid_at_s = max(self._repaid_at_s.get(uid, 0.0), now_s - self._burst_s / self._share)
        repaid_at_s += seconds / self._share
        self._repaid_at_s[uid] = min(repaid_at_s, now_s + self._longest_pause_s)
        if len(self._repaid_at_s) > REMEMBERED_USERS:
            self._repaid_at_s = {u: at_s for u, at_s in self._repaid_at_s.items() if at_s > now_s}

    def pause_s(self, uid: int) -> float:
        """Return how long a user has to wait for more time."""
        return max(0.0, self._repaid_at_s.get(uid, 0.0) - self._clock())


class LoopTime:
    """Counts the time of each user, and the requests in flight. Owned by the daemon's loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._shares = TimeShares(LOOP_SHARE, BURST_S, LONGEST_PAUSE_S, clock)
        self._reading = TimeShares(READING_SHARE, BURST_S, LONGEST_PAUSE_S, clock)
        self._in_flight: Counter[int] = Counter()

    def add_requests(self, uid: int, count: int) -> None:
        """Count requests of *uid* that began, or with a negative *count* ended."""
        self._in_flight[uid] += count
        if not self._in_flight[uid]:
            del self._in_flight[uid]

    def charge(self, uid: int, seconds: float) -> None:
        """Charge *uid* for the time of a request."""
        self._shares.charge(uid, seconds)

    def charge_reading(self, uid: int, seconds: float) -> None:
        """Charge *uid* for the time of reading requests."""
        self._shares.charge(uid, seconds)
        self._reading.charge(uid, seconds)

    def pause_s(self, uid: int) -> float:
        """Return how long requests of *uid* have to wait; 0 while no other user has requests."""
        return self._shares.pause_s(uid) if self._serves_others(uid) else 0.0

    def reading_pause_s(self, uid: int) -> float:
        """Return how long reading requests of *uid* has to wait."""
        return self._reading.pause_s(uid) if self._serves_others(uid) else 0.0

    def _serves_others(self, uid: int) -> bool:
        return len(self._in_flight) > (uid in self._in_flight)

    @coroutine
    def run_counted(self, uid: int, steps: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Await *steps*, and charge *uid* for the time that they take."""
        resume, value, counted_s = steps.send, None, 0.0
        while True:
            begin_s = time.thread_time()
            try:
                awaited = resume(value)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                seconds = time.thread_time() - begin_s
                if seconds >= LONG_STEP_S or counted_s < BEGIN_S:
                    counted_s += seconds
                    self.charge(uid, seconds)
            try:
                value = yield awaited
                resume = steps.send
            except BaseException as exc:  # a cancellation, too, belongs to the steps
                resume, value = steps.throw, exc
