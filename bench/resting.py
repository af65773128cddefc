"""The cost of idle processes, and the CPU time that other programs take during a run."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import psutil

IDLE_S = 30.0
"""Twice the longest interval of a daemon's readings."""
CALM_SAMPLE_S = 1.0
CALM_WAIT_S_MAX = 60.0


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds that *processes* have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def idle_cpu_percent(processes: Sequence[psutil.Process]) -> float:
    """Return the share of one core that *processes* use while there are no requests."""
    await asyncio.sleep(1)  # work left by the last request is not idling
    before = cpu_s(processes)
    await asyncio.sleep(IDLE_S)
    return 100 * (cpu_s(processes) - before) / IDLE_S


def rss_mb(process: psutil.Process) -> float:
    """Return a process's resident memory in MB (10⁶ bytes)."""
    return float(process.memory_info().rss) / 1e6


class ExternalLoad:
    """The external CPU load: the CPU time that other processes take from its creation on.

    The machine has two cores, and a run keeps both busy. One external process stalls the barriers
    of llama.cpp's threads and makes the run meaningless.
    """

    def __init__(self) -> None:
        self._begin = (time.monotonic(), *self._now())

    def _now(self) -> tuple[float, float]:
        machine = psutil.cpu_times()
        idle = machine.idle + machine.iowait + machine.guest + machine.guest_nice
        return sum(machine) - idle, self._own()

    def _own(self) -> float:
        own = os.times()  # it includes child processes that have ended
        living = psutil.Process().children(recursive=True)
        return sum(own[:4]) + sum(sum(process.cpu_times()[:4]) for process in living)

    def cores(self) -> float:
        """Return the average number of cores that other processes kept busy."""
        seconds, busy, own = (
            now - begin
            for now, begin in zip((time.monotonic(), *self._now()), self._begin, strict=True)
        )
        return max(0.0, busy - own) / seconds


async def calm(cores_max: float) -> None:
    """Wait for at most `CALM_WAIT_S_MAX` until other programs keep at most *cores_max* busy. Each
    run measures the external load again.
    """
    for _ in range(round(CALM_WAIT_S_MAX / CALM_SAMPLE_S)):
        load = ExternalLoad()
        await asyncio.sleep(CALM_SAMPLE_S)
        if load.cores() <= cores_max:
            return
