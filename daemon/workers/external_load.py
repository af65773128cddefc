"""What other programs take of the machine's cores: figures of /proc in, whole cores out.

llama.cpp's threads wait for each other many times a step, so one foreign process on a core that a
thread counts on stalls them all. (Measured beside one busy process on two cores: 53 tokens/s with
two threads, 115 with one.)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ("ForeignLoad", "busy_s", "own_s")

TAKEN_AT = 0.5
"""A core counts as taken from this share of it on: a program beside two threads on two cores gets
two thirds of one.
"""
FREE_AT = 0.3
"""And as free again below this: the programs that read our answers take less."""
SAMPLES = 2
"""So many samples in a row must say the same: a program that starts is no reason yet."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """How many cores others keep busy. Fed with seconds of CPU time since the start."""

    def __init__(self) -> None:
        self.taken = 0
        self._last: tuple[float, float, dict[int, float]] | None = None
        self._says, self._times = 0, 0

    def sample(self, now: float, busy: float, own: dict[int, float]) -> bool:
        """Take what all programs have used, and our processes by their pids; tell whether `taken`
        has changed.
        """
        last, self._last = self._last, (now, busy, own)
        if last is None or last[2].keys() != own.keys() or now <= last[0]:
            self._times = 0
            return False
        used = busy - last[1] - sum(own.values()) + sum(last[2].values())
        return self._take(max(0.0, used / (now - last[0])))

    def rest(self) -> None:
        """Begin anew: for a while nobody has looked."""
        self._last = None

    def _take(self, cores: float) -> bool:
        high, low = int(cores + 1 - TAKEN_AT), int(cores + 1 - FREE_AT)
        says = high if high > self.taken else low if low < self.taken else self.taken
        self._times = self._times + 1 if says == self._says else 1
        self._says = says
        if says == self.taken or self._times < SAMPLES:
            return False
        self.taken = says
        return True


def busy_s(proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds that all programs have used."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
        int, (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) * _TICK_S


def own_s(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[int, float]:
    """Return the CPU seconds that each of our processes has used; those that are gone are left
    out.
    """
    found = {}
    for pid in pids:
        try:
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[pid] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return found
