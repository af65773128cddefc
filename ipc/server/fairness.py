"""Limits that users share, so that no user can take everything: amounts, and the loop's time.

The loop and the models share the machine's cores: a user who keeps the loop busy slows the turns of
all others. While requests of other users are in flight, a user's requests may therefore take a
tenth of a core; more of them wait. Requests start in the order of users in turn, a few in each
iteration of the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar


class SharedLimit:
    """A limit on an amount that users share: places, or bytes.

    A user may hold at most *factor* times as much as is free (the dynamic thresholds of Choudhury
    and Hahne, 1998). One user alone reaches `factor / (factor + 1)` of the limit, each further
    user less, and something is always left for a user who has nothing yet.
    """

    def __init__(self, total_max: int, factor: int = 1):
        self.total_max, self.total = total_max, 0
        self._factor = factor
        self._held: Counter[int] = Counter()

    def fits(self, uid: int, amount: int) -> bool:
        """Return whether a user may take *amount* more."""
        free = self.total_max - self.total
        return amount <= free and self._held[uid] + amount <= self._factor * free

    def held_by(self, uid: int) -> int:
        """Return the amount that a user holds."""
        return self._held[uid]

    @property
    def largest(self) -> int:
        """The amount that the user with the most holds."""
        return max(self._held.values(), default=0)

    def take_amount(self, uid: int, amount: int) -> None:
        """Add to a user's amount; a negative *amount* is given back."""
        self._held[uid] += amount
        self.total += amount
        if not self._held[uid]:
            del self._held[uid]


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
        self._in_flight: defaultdict[int, int] = defaultdict(int)

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


STARTS_MAX = 4
"""Requests that start in one iteration of the loop. A cheap call takes 0.3 ms; a client may send
256 of them at once, and others would wait for all of these.
"""
WITHOUT_TASK = 0.25
"""A request that begins without a task counts as this part of one that starts."""


class FairStarts:
    """Lets requests start. Owned by the daemon's event loop."""

    def __init__(self, loop_time: LoopTime) -> None:
        self._loop_time = loop_time
        self._waiting: dict[int, deque[Callable[[], float]]] = {}
        """The waiting requests by user; the first user is next. A call starts one, and returns as
        what part of a start it counts.
        """
        self._started = 0.0
        """Requests that started in this iteration of the loop."""
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def try_start(self, uid: int) -> bool:
        """Start a request of *uid* if it need not wait; return whether it may start."""
        if not self.may_start(uid):
            return False
        self.count_start(1.0)
        return True

    def count_start(self, part: float) -> None:
        """Count a request that has started as *part* of one."""
        self._started += part
        if not self._is_scheduled:
            self._schedule()

    def may_start(self, uid: int) -> bool:
        """Return whether a request of *uid* need not wait."""
        return (
            uid not in self._waiting
            and self._started < STARTS_MAX
            and not self._loop_time.pause_s(uid)
        )

    async def wait_start(self, uid: int, *, is_first: bool = False) -> None:
        """Wait until a request of *uid* may start; mostly it may at once. If it *is_first*, it
        precedes the user's other waiting requests.
        """
        if self.try_start(uid):
            return
        self._schedule()
        turn = asyncio.get_running_loop().create_future()

        def start() -> float:
            if turn.done():  # its request was cancelled
                return 0.0
            turn.set_result(None)
            return 1.0

        turns = self._waiting.setdefault(uid, deque())
        turns.appendleft(start) if is_first else turns.append(start)
        await turn

    def start_later(self, uid: int, start: Callable[[], float]) -> None:
        """Call *start* once a request of *uid* may start, after the user's other waiting ones. It
        returns as what part of a start it counts.
        """
        self._schedule()
        self._waiting.setdefault(uid, deque()).append(start)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_some)

    def _start_some(self) -> None:
        """Begin an iteration: start requests of the waiting users in turn."""
        self._is_scheduled, self._started = False, 0.0
        ready = deque(uid for uid in self._waiting if not self._loop_time.pause_s(uid))
        while ready and self._started < STARTS_MAX:
            uid = ready.popleft()
            turns = self._waiting.pop(uid)
            start = turns.popleft()
            if turns:
                self._waiting[uid] = turns  # last in the order
                ready.append(uid)
            self._started += start()
        if ready:
            self._schedule()
        elif self._waiting:
            self._check_pauses_later()

    def _check_pauses_later(self) -> None:
        """Start paused users' requests at the end of a pause; check before, as it may end early."""
        if self._timer is not None:
            self._timer.cancel()
        pause_s = min(CHECK_S, *map(self._loop_time.pause_s, self._waiting))
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._schedule)
