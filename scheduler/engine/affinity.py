"""The cores on which the threads of this process run.

An engine may have a fixed number of threads. Confined to fewer cores, they do the same work on
these: two threads of ONNX Runtime on one core are 1 to 15 % slower than one (measured).
"""

from __future__ import annotations

import contextlib
import os


class Affinity:
    """Confines the threads of this process to some of the cores that it may use. It belongs to
    the thread that has the turn.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._used = self._cores

    def use_cores(self, count: int | None, first: int) -> None:
        """Run on *count* cores, from number *first* on; None: on all."""
        cores, size = self._cores, len(self._cores)
        count = size if count is None else min(count, size)
        used = sorted(cores[(first + number) % size] for number in range(count))
        if used != self._used:
            self._used = used
            for thread in os.listdir("/proc/self/task"):
                with contextlib.suppress(OSError):  # it has ended, or a filter forbids this
                    os.sched_setaffinity(int(thread), used)
