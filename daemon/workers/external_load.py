"""CPU load of other programs, in whole cores, from the counters of /proc.

llama.cpp's threads wait for each other many times a step, so one other process on a core that a
thread counts on stalls them all. (Measured beside one busy process on two cores: 53 tokens/s with
two threads, 115 with one.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TAKEN_AT = 0.5
"""A core counts as taken from this share of it on: a program beside two threads on two cores gets
two thirds of one.
"""
FREE_AT = 0.3
"""A core counts as free again below this share: programs that read our answers take less."""
SAMPLES = 2
"""Samples in a row that must agree: a program that starts is not a reason yet."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ExternalLoad:
    """The number of cores that other programs keep busy."""

    def __init__(self) -> None:
        self.taken = 0
        self._last: tuple[float, float, dict[int, float]] | None = None
        self._candidate, self._agreeing = 0, 0

    def add_sample(self, now: float, busy: float, own: dict[int, float]) -> bool:
        """Add the CPU seconds since boot of all programs and, by pid, of our own processes; return
        whether `taken` has changed.
        """
        last, self._last = self._last, (now, busy, own)
        if last is None or last[2].keys() != own.keys() or now <= last[0]:
            self._agreeing = 0
            return False
        used = busy - last[1] - sum(own.values()) + sum(last[2].values())
        return self._update_taken(max(0.0, used / (now - last[0])))

    def restart(self) -> None:
        """Forget the last sample, which is too old for a difference."""
        self._last = None

    def _update_taken(self, cores: float) -> bool:
        high, low = int(cores + 1 - TAKEN_AT), int(cores + 1 - FREE_AT)
        taken = high if high > self.taken else min(low, self.taken)
        self._agreeing = self._agreeing + 1 if taken == self._candidate else 1
        self._candidate = taken
        if taken == self.taken or self._agreeing < SAMPLES:
            return False
        self.taken = taken
        return True


def busy_s(proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds that all programs have used."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
        int, (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) * _TICK_S


def own_s(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[int, float]:
    """Return the CPU seconds of each of our processes, except those that have exited."""
    found = {}
    for pid in pids:
        try:
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[pid] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return found
