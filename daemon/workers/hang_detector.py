"""Detection of a hung worker: one that has work, or loads its model, and makes no progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import anyio

from ...scheduler.recording.recorder import ActivityKind, Recorder
from .spawner import KILLED_S

CHECKS = 4
"""Number of checks within the time for which a worker with work may make no progress."""
BUSY_SHARE = 0.05
"""The least share of one core's time that a computation gets beside other programs."""


class HangDetector:
    """Calls *kill* if a worker with work (*is_awaited* returns True) has made no progress for
    *hang_s*. Lives on the daemon's event loop. No timer runs while the worker has no work.

    *cpu_s* returns the CPU time that the worker has used. A hung worker that uses none is stopped
    or waits for a file.
    """

    def __init__(
        self,
        recorder: Recorder,
        hang_s: float,
        is_awaited: Callable[[], bool],
        kill: Callable[[], None],
        seconds: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.process_time,
    ):
        self._recorder, self._hang_s = recorder, hang_s
        self._is_awaited, self._kill = is_awaited, kill
        self._seconds, self._cpu_s = seconds, cpu_s
        self.used_cpu = False
        """Whether the worker used CPU time between the last two checks."""
        self._cpu_before_s = 0.0
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def note_command(self) -> None:
        """Note that a command was sent, which the worker has to read."""
        if self._recorder.read_activity().at >= self._sent_at:
            self._sent_at = self._seconds()  # else an earlier unread command counts
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def overdue(self) -> bool:
        """Whether the worker should have been killed by now, and still has its work."""
        last_check_s = self._hang_s * (1 + 1 / CHECKS)
        return self._is_awaited() and self._silent_s() > last_check_s + KILLED_S

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._cpu_before_s = self._cpu_s()
        self._timer = loop.call_later(self._hang_s / CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_awaited():
            return
        if self._silent_s() > self._hang_s:
            used_s = self._cpu_s() - self._cpu_before_s
            self.used_cpu = used_s > BUSY_SHARE * self._hang_s / CHECKS
            self._kill()
        else:
            self._arm()

    def _silent_s(self) -> float:
        """Return the seconds for which its activity has not changed or a command was not read."""
        act, now = self._recorder.read_activity(), self._seconds()
        if act.kind is ActivityKind.IDLE:
            return now - self._sent_at if act.at < self._sent_at else 0.0
        return now - act.at


async def stands_still(
    ended: anyio.Event, hang_s: float, signs: Callable[[], object | None]
) -> bool:
    """Wait for *ended*, or until *signs* have stayed the same for *hang_s*; return whether they
    have. They are None while no progress is expected.
    """
    same = 0
    before: object | None = None
    # Checks are counted, not time, because the daemon may be frozen together with the worker.
    while same < CHECKS:
        with anyio.move_on_after(hang_s / CHECKS):
            await ended.wait()
            return False
        now = signs()
        same, before = same + 1 if before is not None and now == before else 0, now
    return True
