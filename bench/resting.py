"""What processes cost while nothing runs: CPU time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import psutil

IDLE_S = 6.0


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds that *processes* have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def idle_cpu_percent(processes: Sequence[psutil.Process]) -> float:
    """Return the share of one core that *processes* use while nobody asks for anything."""
    await asyncio.sleep(1)  # what the last request left to do is not idling
    before = cpu_s(processes)
    await asyncio.sleep(IDLE_S)
    return 100 * (cpu_s(processes) - before) / IDLE_S


def rss_mb(process: psutil.Process) -> float:
    """Return a process's resident memory in MB (10⁶ bytes)."""
    return float(process.memory_info().rss) / 1e6
