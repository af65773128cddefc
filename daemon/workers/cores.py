"""Assignment of the machine's cores to the models that have work.

llama.cpp's threads wait for each other many times a step: with more of them than cores, two models
at once are slower than one after the other. (Measured on two cores: 103 tokens/s with two threads
each, 225 with one each, 195 for one model alone with two.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import anyio
import structlog

from .external_load import ExternalLoad, busy_s, own_s

LOADING = -1
"""The claim of a model that is being loaded: one core, after all that compute."""


class CoreUser(Protocol):
    """A worker that computes on some of the cores."""

    pid: int

    @property
    def claim(self) -> int | None:
        """The highest priority class of its tasks, `LOADING`, or None: it is idle."""

    @property
    def threads_max(self) -> int:
        """The most threads that are of use to it."""

    def set_threads(self, threads: int) -> None:
        """Use *threads* from the next step on."""


def assign_threads(claims: Sequence[tuple[int, int]], cores: int) -> list[int]:
    """Return the threads of each of *claims* (priority class, most threads). Each gets one; the
    first of the highest class gets as many of the rest as it can use, then the next.
    """
    threads = [1] * len(claims)
    left = cores - len(claims)
    for index in sorted(range(len(claims)), key=lambda i: -claims[i][0]):
        claim, most = claims[index]
        extra = max(0, min(left, most - 1)) if claim != LOADING else 0
        threads[index] += extra
        left -= extra
    return threads


EXTERNAL_LOAD_INTERVAL_S = 0.25
"""The interval between samples of the external load while a model computes."""

log = structlog.get_logger()


class Cores:
    """Assigns *count* of the *machine*'s cores to the *workers*, less those that other programs
    keep busy. Lives on the daemon's event loop.
    """

    def __init__(
        self,
        count: int,
        workers: Callable[[], Iterable[CoreUser]],
        machine: int | None = None,
    ):
        self.count = count
        self.external_load = ExternalLoad()
        self._machine = machine or os.cpu_count() or count
        self._workers = workers
        self._assigned: dict[CoreUser, int] = {}
        self._busy = anyio.Event()

    @property
    def left(self) -> int:
        """The cores that other programs leave to us: one at least."""
        return max(1, min(self.count, self._machine - self.external_load.taken))

    async def watch_external_load(self) -> None:
        """Follow the load of other programs, for ever; no polling while no model computes."""
        while True:
            await self._busy.wait()
            self._busy = anyio.Event()
            self.external_load.restart()
            while any(worker.claim is not None for worker in self._workers()):
                self._sample_external_load()
                await anyio.sleep(EXTERNAL_LOAD_INTERVAL_S)

    def _sample_external_load(self) -> None:
        own = own_s([os.getpid(), *(worker.pid for worker in self._workers() if worker.pid)])
        if self.external_load.add_sample(time.monotonic(), busy_s(), own):
            log.info("cores.left", cores=self.left, taken=self.external_load.taken)
            self.assign_cores()

    def assign_cores(self) -> None:
        """Assign the cores again: work has appeared or ended. Only a changed number is sent."""
        workers = list(self._workers())
        self._assigned = {w: n for w, n in self._assigned.items() if w in workers}
        busy = [(w, c) for w in workers if (c := w.claim) is not None]
        threads = assign_threads([(claim, worker.threads_max) for worker, claim in busy], self.left)
        for (worker, claim), number in zip(busy, threads, strict=True):
            self._busy.set()
            if claim != LOADING and self._assigned.get(worker) != number:
                self._assigned[worker] = number
                worker.set_threads(number)
