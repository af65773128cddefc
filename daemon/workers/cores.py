"""Assignment of the machine's cores to the models with work, and the CPU load of other programs.

llama.cpp's threads wait for each other many times a step. With more of them than cores, two models
at once are slower than one after the other. (Measured on two cores: 103 tokens/s with two threads
each, 225 with one each, 195 for one model alone with two.) Another process on the core of one
thread stalls them all. (Measured beside one busy process on two cores: 53 tokens/s with two
threads, 115 with one.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import anyio
import psutil
import structlog

LOADING = -1
"""The claim of a model that is being loaded, which ranks after all models that compute. A load
reads the file with one thread, but computes a token at the end.
"""
ENCODING = -2
"""The claim of a worker all of whose tasks wait for embeddings. It gets one thread, and leaves its
core to the encoder; meanwhile it may compute the texts before an image.
"""
WEIGHTS_BASE, STRICT_WEIGHT = 3.0, 1e6
"""The ratio of the weights of two neighbouring classes; strict ones differ by more than the number
of cores.
"""
EXTERNAL_LOAD_INTERVAL_S = 0.25
"""The interval between samples of the external load while a model computes."""
IDLE_INTERVAL_S = 1.0
"""The interval while no model computes and other programs keep cores busy."""
BUSY_AT = 0.5
"""The share of a core's time from which the core counts as busy. A program beside two threads on
two cores gets two thirds of one.
"""
FREE_AT = 0.3
"""The share below which a core counts as free again. Programs that read our answers use less."""
SAMPLE_S_MIN, SAMPLE_S_MAX = 0.1, 5.0
"""A sample across less time is inaccurate, because the kernel counts in ticks of 10 ms; one across
more time says little about the present load.
"""
SAMPLES = 2
"""Samples in a row that must agree, so that a program's start alone changes nothing."""

log = structlog.get_logger()


class CoreUser(Protocol):
    """A worker that computes on some of the cores."""

    pid: int

    @property
    def claim(self) -> int | None:
        """The highest priority class of its tasks, `LOADING`, `ENCODING`, or None if it is idle."""

    @property
    def users(self) -> Collection[int]:
        """The users of its tasks."""

    @property
    def threads_max(self) -> int:
        """The most threads that it can use."""

    def set_threads(self, threads: int, first: int) -> None:
        """Use *threads* from the next step on. A process that has more threads confines them to as
        many cores, from number *first* on: no other one is confined to these.
        """


def assign_threads(
    claims: Sequence[tuple[int, int]], cores: int, *, strict: bool = True
) -> list[int]:
    """Return the threads of each of *claims* (priority class, most threads). Each gets one. With
    *strict*, those of the highest class divide as many of the rest as they can use, then those of
    the next. Otherwise all of them divide the rest by weight, 3 : 1 from one class to the next.
    """
    threads = [1] * len(claims)
    weights = [(STRICT_WEIGHT if strict or c == LOADING else WEIGHTS_BASE) ** c for c, _ in claims]
    for _ in range(cores - len(claims)):
        able = [i for i, (_, most) in enumerate(claims) if threads[i] < most]
        if not able:
            break
        threads[min(able, key=lambda i: (threads[i] / weights[i], i))] += 1
    return threads


class Cores:
    """Assigns *count* of the *machine*'s cores to the *workers*, less those that other programs
    keep busy. With *strict*, classes of priority count strictly between users, too. Lives on the
    daemon's event loop.
    """

    def __init__(
        self,
        count: int,
        workers: Callable[[], Iterable[CoreUser]],
        machine: int | None = None,
        *,
        strict: bool = False,
    ):
        self.count, self._strict = count, strict
        self.external_load = ExternalLoad()
        self._machine = machine or os.cpu_count() or count
        self._workers = workers
        self._assigned: dict[CoreUser, int] = {}
        self._begun: set[CoreUser] = set()
        """The workers that have had work since their load."""
        self._busy = anyio.Event()

    @property
    def available(self) -> int:
        """The cores that other programs leave free, at least one."""
        return max(1, min(self.count, self._machine - self.external_load.cores))

    async def watch_external_load(self) -> None:
        """Sample the load of other programs, until cancelled: while a model computes, and then
        until they leave all cores free, so that the next work has these from its start.
        """
        while True:
            await self._busy.wait()
            self._busy = anyio.Event()
            self.external_load.restart()
            while (computes := self._computes()) or self.external_load.cores:
                if self._sample_external_load():
                    self.assign_cores()
                if computes:
                    await anyio.sleep(EXTERNAL_LOAD_INTERVAL_S)
                else:
                    self._busy = anyio.Event()  # it was set by the work that has ended
                    with anyio.move_on_after(IDLE_INTERVAL_S):
                        await self._busy.wait()

    def _computes(self) -> bool:
        return any(worker.claim is not None for worker in self._workers())

    def _sample_external_load(self, *, begins: bool = False) -> bool:
        own = own_s([os.getpid(), *(worker.pid for worker in self._workers() if worker.pid)])
        changed = self.external_load.add_sample(time.monotonic(), busy_s(), own, begins=begins)
        if changed:
            log.info("cores.available", cores=self.available, external=self.external_load.cores)
        return changed

    def assign_cores(self) -> None:
        """Assign the cores again after work began or ended; send each worker a changed number.

        The external load is sampled before the first step of a worker. With too many threads on a
        busy machine that step alone can take seconds, before the regular samples agree.
        """
        workers = list(self._workers())
        self._assigned = {w: n for w, n in self._assigned.items() if w in workers}
        self._begun.intersection_update(workers)
        claimed = [(w, c) for w in workers if (c := w.claim) is not None]
        busy = [(w, c) for w, c in claimed if c != ENCODING]
        begins = {worker for worker, claim in busy if claim != LOADING} - self._begun
        if begins:
            self._begun |= begins
            with suppress(OSError):  # the regular samples report it
                self._sample_external_load(begins=True)
        claims = [(c, w.threads_max) for w, c in busy]
        one_user = len({user for worker, _ in busy for user in worker.users}) < 2
        threads = assign_threads(claims, self.available, strict=self._strict or one_user)
        assigned = dict.fromkeys((w for w, c in claimed if c == ENCODING), 1)
        assigned |= {worker: n for (worker, _), n in zip(busy, threads, strict=True)}
        first = 0
        for worker, number in assigned.items():
            self._busy.set()
            if self._assigned.get(worker) != number:
                self._assigned[worker] = number
                worker.set_threads(number, first)
            first += number


class ExternalLoad:
    """The number of cores that other programs keep busy. Owned by `Cores`."""

    def __init__(self) -> None:
        self.cores = 0
        self._last: tuple[float, float, dict[int, float]] | None = None
        self._candidate, self._agreeing = 0, 0

    def add_sample(
        self, now: float, busy: float, own: dict[int, float], *, begins: bool = False
    ) -> bool:
        """Add the CPU seconds since boot of all programs and, by pid, of our own processes; return
        whether `cores` has changed. If a worker *begins* its first step, a single sample of more
        busy cores counts.
        """
        last = self._last
        seconds = SAMPLE_S_MAX if last is None else now - last[0]
        if not 0 <= seconds < SAMPLE_S_MIN:
            self._last = (now, busy, own)
            if last is None or not (last[2].keys() <= own.keys() and 0 < seconds <= SAMPLE_S_MAX):
                self._agreeing = 0
                return False
            used = busy - last[1] - sum(own.values()) + sum(last[2].values())
            self._add_load(max(0.0, used / seconds))
        enough = self._agreeing >= (1 if begins and self._candidate > self.cores else SAMPLES)
        if not enough or self._candidate == self.cores:
            return False
        self.cores = self._candidate
        return True

    def restart(self) -> None:
        """Drop the last sample, which is too old for a difference."""
        self._last = None

    def _add_load(self, load: float) -> None:
        busy, not_free = int(load + 1 - BUSY_AT), int(load + 1 - FREE_AT)
        cores = busy if busy > self.cores else min(not_free, self.cores)
        self._agreeing = self._agreeing + 1 if cores == self._candidate else 1
        self._candidate = cores


def busy_s() -> float:
    """Return the CPU seconds that all programs have used since boot."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq


def own_s(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU seconds of each of our processes, except those that have exited."""
    found = {}
    for pid in pids:
        with suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            found[pid] = times.user + times.system
    return found
