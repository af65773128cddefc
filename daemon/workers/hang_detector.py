"""Finds a worker that hangs: it has something to do and does not go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ...scheduler.recording.recorder import Doing, Recorder

__all__ = ("HangDetector",)

LOOKS = 4
"""A worker is looked at so often within the time that it may be silent, while somebody waits."""
KILLED_S = 10.0
"""So long a kill may take until the process is gone, and its work with it."""


class HangDetector:
    """Calls *kill* once *is_awaited* and the worker was silent for *hang_s*. Lives on the daemon's
    event loop; without anybody who waits there is no timer.
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
        """Note that the worker was sent something that it has to take."""
        if self._recorder.read().at >= self._sent_at:
            self._sent_at = self._seconds()  # else it owes an earlier one: that counts
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def overdue(self) -> bool:
        """Tell whether it was to be killed by now, and is still there with its work."""
        last_look_s = self._hang_s * (1 + 1 / LOOKS)
        return self._is_awaited() and self._silent_s() > last_look_s + KILLED_S

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._hang_s / LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._is_awaited():
            return
        if self._silent_s() > self._hang_s:
            self._kill()
        else:
            self._arm()

    def _silent_s(self) -> float:
        """Return how long it is stuck in what it does, or does not take what it was sent."""
        act, now = self._recorder.read(), self._seconds()
        if act.doing is Doing.REST:
            return now - self._sent_at if act.at < self._sent_at else 0.0
        return now - act.at
