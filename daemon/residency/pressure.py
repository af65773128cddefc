"""Memory pressure while models run: the memory to free, and its order.

First the KV states in the workers' memory are dropped, after a write to disk where that is
allowed. Then models are evicted one at a time, as `Loader.evict_idle` chooses them.
`Pressure` decides from readings alone; `MemoryWatch` reads, acts and counts. It wakes on the
kernel's stall alarms (PSI), and at intervals to read the free memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum

import anyio
import structlog

from ...backends.errors import InferdError
from ..workers.worker import Worker
from .machine import MachineMemory, headroom_bytes
from .plan import EvictionCandidate
from .reservations import Reservations

log = structlog.get_logger()

STALLED_HIGH, STALLED_LOW = 0.1, 0.01
"""Shares of time for which some task stalled on memory. The high one is systemd's
`MemoryPressureThresholdSec=` (200 ms in 2 s).
"""
FREE_SHARE_AMPLE = 0.2
"""With this share of memory free, the machine's stalls come from another cgroup's limit, so freeing
memory here would not end them.
"""
WORKER_ANSWER_S_MAX = 5.0
"""The longest wait for a worker's answer; a slower worker drops its states, too."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory at one time: the bytes free beside the models, negative if part of the headroom is
    used, and the seconds for which tasks have stalled so far, None if unknown.
    """

    at: float
    free_bytes: int
    total_bytes: int
    machine_stalled_s: float | None = None
    own_stalled_s: float | None = None

    @property
    def is_ample(self) -> bool:
        """Whether so much memory is free that freeing more here would not end stalls."""
        return self.free_bytes >= FREE_SHARE_AMPLE * self.total_bytes


@dataclass(frozen=True, slots=True)
class Pace:
    """The intervals of readings and acts."""

    poll_s_ample: float = 15.0
    """Between two readings without an alarm, while `FREE_SHARE_AMPLE` of the memory is free. Each
    reading wakes an idle daemon.
    """
    poll_s: float = 5.0
    """The same, while less is free."""
    poll_s_pressed: float = 1.0
    """Between two readings while memory is short."""
    settle_s: float = 2.0
    """Between an act and the next one, so that the first can take effect."""
    calm_s: float = 30.0
    """The time for which memory must suffice before KV states are kept again."""

    def interval_s(self, last: Reading | None, pressed: bool) -> float:
        """Return the longest time until the next reading."""
        if pressed:
            return self.poll_s_pressed
        return self.poll_s_ample if last is not None and last.is_ample else self.poll_s


class MemoryAct(StrEnum):
    """An action on memory pressure."""

    NONE = "none"
    STATES = "states"
    """Drop the workers' KV states from memory."""
    MODEL = "model"
    """Evict an idle model."""
    RELIEF = "relief"
    """Keep KV states again."""


class Pressure:
    """Decides on acts; see the module's docstring. Its only clock is that of the readings.

    Pressure begins when more than half of the headroom is used, or tasks stalled for a tenth of the
    time. It ends when at most a quarter of the headroom is used and tasks hardly stalled, for
    `Pace.calm_s`.
    """

    def __init__(self, pace: Pace):
        self.pressed = False
        self._pace = pace
        self._before: Reading | None = None
        self._acted_at = 0.0
        self._calm_since: float | None = None

    def decide(self, reading: Reading) -> MemoryAct:
        """Return the act for *reading*, which the caller must carry out."""
        stalled = self._stalled(reading)
        self._before = reading
        headroom = headroom_bytes(reading.total_bytes)
        if stalled >= STALLED_HIGH or reading.free_bytes < -headroom // 2:
            return self._short(reading.at)
        if self.pressed and stalled <= STALLED_LOW and reading.free_bytes >= -headroom // 4:
            return self._calm(reading.at)
        self._calm_since = None
        return MemoryAct.NONE

    def _stalled(self, reading: Reading) -> float:
        """Return the share of time since the previous reading for which tasks stalled on memory,
        only in this cgroup if memory is ample.
        """
        before = self._before
        if before is None or reading.at <= before.at:
            return 0.0
        own = _grown(before.own_stalled_s, reading.own_stalled_s)
        machine = _grown(before.machine_stalled_s, reading.machine_stalled_s)
        if reading.is_ample:
            machine = 0.0
        return max(own, machine) / (reading.at - before.at)

    def _short(self, now: float) -> MemoryAct:
        self._calm_since = None
        if not self.pressed:
            self.pressed, self._acted_at = True, now
            return MemoryAct.STATES
        if now - self._acted_at < self._pace.settle_s:
            return MemoryAct.NONE
        self._acted_at = now
        return MemoryAct.MODEL

    def _calm(self, now: float) -> MemoryAct:
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since < self._pace.calm_s:
            return MemoryAct.NONE
        self.pressed, self._calm_since = False, None
        return MemoryAct.RELIEF


def _grown(before: float | None, now: float | None) -> float:
    return now - before if before is not None and now is not None else 0.0


class MemoryWatch:
    """Reads the memory and carries out the acts of `Pressure`. Lives on the daemon's event loop.

    *workers* returns the loaded ones. *evict_idle* evicts an idle model, if there is one.
    *note_reading* is called after each reading, with the reason of a failure or None.
    """

    def __init__(
        self,
        machine: MachineMemory,
        reservations: Reservations,
        workers: Callable[[], Collection[Worker]],
        evict_idle: Callable[[], EvictionCandidate | None],
        note_reading: Callable[[str | None], None],
        pace: Pace,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self._machine, self._reservations, self._seconds = machine, reservations, seconds
        self._workers, self._evict_idle = workers, evict_idle
        self._note_reading, self._pace = note_reading, pace
        self._pressure = Pressure(self._pace)
        counts = ("low_events", "kv_bytes_freed", "models_unloaded", "model_bytes_freed")
        self._counts = dict.fromkeys(counts, 0)
        """Counts since the start; `low_events`: how often memory became short."""
        self._in_low_memory_mode: set[Worker] = set()
        self._last: Reading | None = None
        self._is_helpless = False

    @property
    def status(self) -> dict[str, int | bool | None]:
        """The part of `stats` on memory."""
        last = self._last
        return {
            "low": self._pressure.pressed,
            "free_bytes": last.free_bytes if last is not None else None,
            "pressure_known": last is not None and last.machine_stalled_s is not None,
            **self._counts,
        }

    async def run(self) -> None:
        """Read the memory forever, on alarms and at intervals."""
        with closing(self._machine.alarm()) as alarm:
            log.debug("memory.watched", alarms=len(alarm))
            while True:
                await self._check()
                await alarm.wait(self._pace.interval_s(self._last, self._pressure.pressed))

    async def _check(self) -> None:
        try:
            reading = Reading(
                self._seconds(),
                self._reservations.machine_free_bytes(),
                self._machine.total_bytes(),
                self._machine.stalled_s(),
                self._machine.own_stalled_s(),
            )
        except (OSError, ValueError, KeyError) as exc:
            self._last = None
            self._note_reading(repr(exc))
            return
        self._note_reading(None)
        self._last, was_pressed = reading, self._pressure.pressed
        await self._act(self._pressure.decide(reading), reading.free_bytes)
        if was_pressed and self._pressure.pressed:
            new = [w for w in self._workers() if w not in self._in_low_memory_mode]
            await self._set_low_memory_mode(new, on=True)

    # Acts.

    async def _act(self, act: MemoryAct, free_bytes: int) -> None:
        match act:
            case MemoryAct.STATES:
                freed = await self._set_low_memory_mode(self._workers(), on=True)
                self._counts["low_events"] += 1
                log.warning("memory.low", free_bytes=free_bytes, kv_bytes_freed=freed)
            case MemoryAct.MODEL:
                self._evict_model(free_bytes)
            case MemoryAct.RELIEF:
                self._is_helpless = False
                low = [w for w in self._workers() if w in self._in_low_memory_mode]
                await self._set_low_memory_mode(low, on=False)
                self._in_low_memory_mode.clear()
                log.info("memory.recovered", free_bytes=free_bytes)

    def _evict_model(self, free_bytes: int) -> None:
        evicted, was_helpless = self._evict_idle(), self._is_helpless
        self._is_helpless = evicted is None
        if evicted is not None:
            self._counts["models_unloaded"] += 1
            self._counts["model_bytes_freed"] += evicted.need
            log.warning("memory.model_unloaded", model=evicted.name, bytes=evicted.need)
        elif not was_helpless:
            log.warning("memory.still_low", free_bytes=free_bytes)

    async def _set_low_memory_mode(self, workers: Collection[Worker], *, on: bool) -> int:
        """Switch the low-memory mode of *workers*; return the bytes that it frees."""
        before = self._counts["kv_bytes_freed"]
        async with anyio.create_task_group() as group:
            for worker in workers:
                group.start_soon(self._switch_worker, worker, on)
        return self._counts["kv_bytes_freed"] - before

    async def _switch_worker(self, worker: Worker, on: bool) -> None:
        self._in_low_memory_mode.add(worker)
        with anyio.move_on_after(WORKER_ANSWER_S_MAX):
            try:
                freed = await worker.set_low_memory(on=on)
            except InferdError:
                return  # it has just died, and its states with it
            self._counts["kv_bytes_freed"] += freed
