"""The machine's cores, dealt out among the models that have work.

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

from .external_load import ForeignLoad, busy_s, own_s

__all__ = ("LOADING", "Cores", "Worker", "deal")

LOADING = -1
"""The claim of a model that is being loaded: one core, after all that compute."""


class Worker(Protocol):
    """What the cores are dealt out to."""

    pid: int

    @property
    def claim(self) -> int | None:
        """The highest class of its tasks, `LOADING`, or None: it has nothing to do."""

    @property
    def threads_max(self) -> int:
        """No more are of use to it."""

    def set_threads(self, threads: int) -> None:
        """Use so many from the next step on."""


def deal(claims: Sequence[tuple[int, int]], cores: int) -> list[int]:
    """Return the threads of each of *claims* (class, most threads): those of the first of the
    highest class are what one core for each other leaves. Nobody has less than one.
    """
    threads = [1] * len(claims)
    left = cores - len(claims)
    for index in sorted(range(len(claims)), key=lambda i: -claims[i][0]):
        claim, most = claims[index]
        extra = max(0, min(left, most - 1)) if claim != LOADING else 0
        threads[index] += extra
        left -= extra
    return threads


LOOK_S = 0.25
"""While somebody computes, what other programs take is looked at so often."""

log = structlog.get_logger()


class Cores:
    """Deals *count* cores of the *machine*'s out among the *workers* there are, less what other
    programs take. Lives on the daemon's event loop.
    """

    def __init__(
        self,
        count: int,
        workers: Callable[[], Iterable[Worker]],
        machine: int | None = None,
    ):
        self.count = count
        self.foreign = ForeignLoad()
        self._machine = machine or os.cpu_count() or count
        self._workers = workers
        self._told: dict[Worker, int] = {}
        self._busy = anyio.Event()

    @property
    def left(self) -> int:
        """The cores that others leave to us: one at least."""
        return max(1, min(self.count, self._machine - self.foreign.taken))

    async def watch(self) -> None:
        """Deal anew when other programs come and go, for ever; no polling while nobody computes."""
        while True:
            await self._busy.wait()
            self._busy = anyio.Event()
            self.foreign.rest()
            while any(worker.claim is not None for worker in self._workers()):
                self._look()
                await anyio.sleep(LOOK_S)

    def _look(self) -> None:
        own = own_s([os.getpid(), *(worker.pid for worker in self._workers() if worker.pid)])
        if self.foreign.sample(time.monotonic(), busy_s(), own):
            log.info("cores.left", cores=self.left, taken=self.foreign.taken)
            self.share()

    def share(self) -> None:
        """Deal anew: work has appeared or ended. Only who gets another number is told."""
        workers = list(self._workers())
        self._told = {w: n for w, n in self._told.items() if w in workers}
        busy = [(w, c) for w in workers if (c := w.claim) is not None]
        threads = deal([(claim, worker.threads_max) for worker, claim in busy], self.left)
        for (worker, claim), number in zip(busy, threads, strict=True):
            self._busy.set()
            if claim != LOADING and self._told.get(worker) != number:
                self._told[worker] = number
                worker.set_threads(number)
