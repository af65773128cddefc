"""Memory that falls short while models run: what is given back, and in which order.

First the KV states in the workers' memory go (to the disk, if they may), then idle models, those
least worth their memory first, one at a time. Busy and pinned ones never do. `Pressure` decides,
from readings alone; `MemoryWatch` reads, acts and counts. It wakes when the kernel tells of stalls
(PSI), and every few seconds to look at the free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol

import anyio
import structlog

from ...backends.errors import InferdError
from .eviction import EvictionCandidate
from .machine import MachineMemory
from .sizes import headroom_bytes

log = structlog.get_logger()

STALLED_HIGH, STALLED_LOW = 0.1, 0.01
"""Shares of time in which some task waited for memory. The high one is systemd's
`MemoryPressureThresholdSec=` (200 ms in 2 s).
"""
PLENTY = 0.2
"""With so much of the memory free, stalls elsewhere on the machine are those of another cgroup's
limit, and nothing given back here would end them.
"""
ANSWER_S = 5.0
"""What a worker may take to answer; it lets go of its states all the same."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory at one time: bytes beside the models (negative: less than is to be spared), and
    the seconds so far in which tasks waited for memory; None where the kernel does not tell.
    """

    at: float
    free_bytes: int
    total_bytes: int
    machine_stalled_s: float | None = None
    own_stalled_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """When it is looked, and how long each act is given."""

    look_s: float = 5.0
    """Between two looks, without an alarm."""
    pressed_s: float = 1.0
    """Between two looks while memory is short."""
    settle_s: float = 2.0
    """What an act is given to show before the next one."""
    calm_s: float = 30.0
    """How long memory must have been there before states are held again."""


class MemoryAct(StrEnum):
    """What is to be done."""

    NONE = "none"
    STATES = "states"
    """Empty the workers' KV states out of memory."""
    MODEL = "model"
    """Let an idle model leave."""
    RELIEF = "relief"
    """Hold KV states again."""


class Pressure:
    """Decides what is given back; see the module's docstring. Knows no clock but the readings'.

    Short begins where half of what is to be spared is gone, or a tenth of the time was stalled; it
    ends where a quarter of it is there again and nearly no time was, for `Pace.calm_s`.
    """

    def __init__(self, pace: Pace):
        self.pressed = False
        self._pace = pace
        self._before: Reading | None = None
        self._acted_at = 0.0
        self._calm_since: float | None = None

    def decide(self, reading: Reading) -> MemoryAct:
        """Return what is to be done at *reading*; it counts as done."""
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
        """Return the share of time since the reading before in which somebody waited for memory
        that can be given back here.
        """
        before = self._before
        if before is None or reading.at <= before.at:
            return 0.0
        own = _grown(before.own_stalled_s, reading.own_stalled_s)
        machine = _grown(before.machine_stalled_s, reading.machine_stalled_s)
        if reading.free_bytes >= PLENTY * reading.total_bytes:
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


class ThriftyWorker(Protocol):
    """What is asked of a worker."""

    async def set_low_memory(self, *, on: bool) -> int:
        """Let go of KV states; return their bytes."""


@dataclass(slots=True)
class _Counts:
    """What was done since the start."""

    low_events: int = 0
    """How often memory fell short."""
    kv_bytes_freed: int = 0
    models_unloaded: int = 0
    model_bytes_freed: int = 0


class MemoryWatch:
    """Checks the memory for ever, and frees what `Pressure` decides. Lives on the daemon's event
    loop. *free_bytes* is what is free beside the models; *evict_idle* evicts an idle one;
    *note_reading* is called after each check, with the reason why nothing could be read or None.
    """

    def __init__(
        self,
        machine: MachineMemory,
        workers: Callable[[], Collection[ThriftyWorker]],
        free_bytes: Callable[[], int],
        evict_idle: Callable[[], EvictionCandidate | None],
        note_reading: Callable[[str | None], None],
        seconds: Callable[[], float],
        pace: Pace | None = None,
    ):
        self._note_reading = note_reading
        self._machine, self._workers = machine, workers
        self._free_bytes, self._evict_idle, self._seconds = free_bytes, evict_idle, seconds
        self._pace = pace or Pace()
        self._pressure = Pressure(self._pace)
        self._counts = _Counts()
        self._thrifty: set[ThriftyWorker] = set()
        self._last: Reading | None = None
        self._is_helpless = False

    @property
    def status(self) -> dict[str, int | bool | None]:
        """What `stats` says of it."""
        last = self._last
        return {
            "low": self._pressure.pressed,
            "free_bytes": last.free_bytes if last is not None else None,
            "pressure_known": last is not None and last.machine_stalled_s is not None,
            **asdict(self._counts),
        }

    async def run(self) -> None:
        """Look when the kernel tells of stalls, and now and then."""
        with closing(self._machine.alarm()) as alarm:
            log.debug("memory.watched", alarms=len(alarm))
            while True:
                await self._check()
                pressed = self._pressure.pressed
                await alarm.wait(self._pace.pressed_s if pressed else self._pace.look_s)

    async def _check(self) -> None:
        try:
            reading = self._read()
        except (OSError, ValueError, KeyError) as exc:
            self._note_reading(repr(exc))
            return
        self._note_reading(None)
        self._last = reading
        was_pressed = self._pressure.pressed
        await self._act(self._pressure.decide(reading))
        if was_pressed and self._pressure.pressed:
            await self._tell([w for w in self._workers() if w not in self._thrifty], on=True)

    def _read(self) -> Reading:
        return Reading(
            self._seconds(),
            self._free_bytes(),
            self._machine.total_bytes(),
            self._machine.stalled_s(),
            self._machine.own_stalled_s(),
        )

    # Acts.

    async def _act(self, act: MemoryAct) -> None:
        match act:
            case MemoryAct.STATES:
                await self._empty_states()
            case MemoryAct.MODEL:
                self._evict_model()
            case MemoryAct.RELIEF:
                await self._hold_again()

    async def _empty_states(self) -> None:
        freed = await self._tell(self._workers(), on=True)
        self._counts.low_events += 1
        log.warning("memory.low", free_bytes=self._last_free, kv_bytes_freed=freed)

    def _evict_model(self) -> None:
        evicted = self._evict_idle()
        if evicted is None and not self._is_helpless:
            log.warning("memory.still_low", free_bytes=self._last_free)
        self._is_helpless = evicted is None
        if evicted is not None:
            self._counts.models_unloaded += 1
            self._counts.model_bytes_freed += evicted.need
            log.warning("memory.model_unloaded", model=evicted.name, bytes=evicted.need)

    async def _hold_again(self) -> None:
        here, self._is_helpless = self._workers(), False
        await self._tell([w for w in here if w in self._thrifty], on=False)
        self._thrifty.clear()
        log.info("memory.recovered", free_bytes=self._last_free)

    @property
    def _last_free(self) -> int:
        return self._last.free_bytes if self._last is not None else 0

    async def _tell(self, workers: Collection[ThriftyWorker], *, on: bool) -> int:
        """Have *workers* let go of their states, or hold them again; return the bytes let go."""
        before = self._counts.kv_bytes_freed
        async with anyio.create_task_group() as group:
            for worker in workers:
                group.start_soon(self._tell_one, worker, on)
        return self._counts.kv_bytes_freed - before

    async def _tell_one(self, worker: ThriftyWorker, on: bool) -> None:
        self._thrifty.add(worker)
        with anyio.move_on_after(ANSWER_S):
            try:
                freed = await worker.set_low_memory(on=on)
            except InferdError:
                return  # it has just died, and its states with it
            self._counts.kv_bytes_freed += freed
