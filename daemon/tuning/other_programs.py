"""The load of other programs on the machine, which distorts a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

from ..workers.cores import busy_s, own_s

IDLE_CORES_MAX = 0.2
"""The load of other programs, in cores, that hardly distorts times."""
WINDOW_S = 0.5


class OtherPrograms:
    """Measures the cores that other programs keep busy. Owned by one thread."""

    def __init__(
        self,
        seconds: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        busy: Callable[[], float] = busy_s,
        own: Callable[[], float] | None = None,
    ):
        self._seconds, self._sleep, self._busy = seconds, sleep, busy
        self._own = own or _own_and_children_s
        self.restart()

    def restart(self) -> None:
        """Begin a period."""
        self._begin = self._seconds(), self._busy(), self._own()

    def cores(self) -> float:
        """Return the mean number of busy cores since the period's begin."""
        at, busy, own = self._begin
        passed = self._seconds() - at
        if passed <= 0:
            return 0.0
        return max(0.0, (self._busy() - busy) - (self._own() - own)) / passed

    def wait_until_idle(self, seconds_max: float, on_busy: Callable[[float], None]) -> float:
        """Wait until other programs are idle, but no longer than *seconds_max*; return their load
        in the end. *on_busy* is called once with their load before a wait.
        """
        deadline = self._seconds() + seconds_max
        is_first = True
        while True:
            self.restart()
            self._sleep(WINDOW_S)
            load = self.cores()
            if load <= IDLE_CORES_MAX or self._seconds() >= deadline:
                return load
            if is_first:
                on_busy(load)
                is_first = False


def _own_and_children_s() -> float:
    """Return the CPU seconds of this process and of those that it has started."""
    here = psutil.Process()
    pids = [os.getpid(), *(child.pid for child in here.children(recursive=True))]
    ended = here.cpu_times()
    return sum(own_s(pids).values()) + ended.children_user + ended.children_system
