"""Detection of a worker that hangs: it has work and makes no progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...scheduler.recording.recorder import Doing, Recorder

CHECKS = 4
"""Checks of a worker within the time that it may be silent, while it has work."""
KILLED_S = 10.0
"""The time that a kill may take until the process has exited, and its work has moved on."""


class HangDetector:
    """Calls *kill* once *is_awaited* and the worker was silent for *hang_s*. Lives on the daemon's
    event loop; while the worker has no work, no timer runs.
    """

    def __init__(
        self,
        recorder: Recorder,
        hang_s: float,
        is_awaited: Callable[[], bool],
        kill: Callable[[], None],
        seconds: Callable[[], float] = time.monotonic,
    ):
        self._recorder, self._hang_s = recorder, hang_s
        self._is_awaited, self._kill = is_awaited, kill
        self._seconds = seconds
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def note_sent(self) -> None:
        """Note that the worker was sent a command, which it has to read."""
        if self._recorder.read_activity().at >= self._sent_at:
            self._sent_at = self._seconds()  # else an earlier command is not read yet: that counts
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def overdue(self) -> bool:
        """Whether it should have been killed by now, and still has its work."""
        last_check_s = self._hang_s * (1 + 1 / CHECKS)
        return self._is_awaited() and self._silent_s() > last_check_s + KILLED_S

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._hang_s / CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_awaited():
            return
        if self._silent_s() > self._hang_s:
            self._kill()
        else:
            self._arm()

    def _silent_s(self) -> float:
        """Return how long its activity has not changed, or a command has not been read."""
        act, now = self._recorder.read_activity(), self._seconds()
        if act.doing is Doing.REST:
            return now - self._sent_at if act.at < self._sent_at else 0.0
        return now - act.at
