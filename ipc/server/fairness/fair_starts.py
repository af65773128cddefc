"""The order in which requests start: users in turn, a few requests in each loop iteration.

A user's requests wait while the user's share of the loop's time is used up.
"""

from __future__ import annotations

import asyncio
from collections import deque

from .loop_time import CHECK_S, LoopTime

STARTS_MAX = 4
"""Requests that start in one iteration of the loop. A cheap call takes 0.3 ms; a client may send
256 of them at once, and others would wait for all of these.
"""


class FairStarts:
    """Lets requests start. Owned by the daemon's event loop."""

    def __init__(self, loop_time: LoopTime) -> None:
        self._loop_time = loop_time
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}
        """The waiting requests by user; the first user is next."""
        self._started = 0
        """Requests that started in this iteration of the loop."""
        self._is_scheduled = False
        self._timer: asyncio.TimerHandle | None = None

    def try_start(self, uid: int) -> bool:
        """Start a request of *uid* if it need not wait; return whether it may start."""
        self._schedule()
        if uid in self._waiting or self._started >= STARTS_MAX or self._loop_time.pause_s(uid):
            return False
        self._started += 1
        return True

    async def wait_start(self, uid: int, *, is_first: bool = False) -> None:
        """Wait until a request of *uid* may start; mostly it may at once. If it *is_first*, it
        precedes the user's other waiting requests.
        """
        if self.try_start(uid):
            return
        turn = asyncio.get_running_loop().create_future()
        turns = self._waiting.setdefault(uid, deque())
        turns.appendleft(turn) if is_first else turns.append(turn)
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_some)

    def _start_some(self) -> None:
        """Begin an iteration: start requests of the waiting users in turn."""
        self._is_scheduled, self._started = False, 0
        ready = deque(uid for uid in self._waiting if not self._loop_time.pause_s(uid))
        while ready and self._started < STARTS_MAX:
            uid = ready.popleft()
            turns = self._waiting.pop(uid)
            turn = turns.popleft()
            if turns:
                self._waiting[uid] = turns  # last in the order
                ready.append(uid)
            if not turn.done():  # its request was not cancelled
                turn.set_result(None)
                self._started += 1
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
