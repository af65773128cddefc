"""The measurement of loaded models' settings while the daemon has no work.

One model at a time measures, in slices of its worker's engine, and any work ends that at once. The
result is stored for the next load, because KV states fit only the setting that computed them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio
import msgspec
import structlog
from msgspec.structs import replace

from ...backends.errors import OutOfMemory
from ...backends.library import LLAMA_COMMIT
from ...backends.tuning_choice import (
    ChosenSetting,
    LoadTuning,
    ModelShape,
    ModelTuning,
    Setting,
    choose_setting,
    this_cpu,
)
from ...scheduler import messages as m
from ..residency.reservations import Reservations
from ..workers.cores import busy_s, own_s
from ..workers.worker import Worker
from .tuning_records import TuningRecords

MEASURED_SOURCES = ("like", "rule", "default")
"""The sources of settings that a measurement may replace."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class TuningPace:
    """The conditions under which a measurement begins."""

    idle_s: float = 2.0
    """The time without any work before it."""
    check_s: float = 1.0
    """The interval at which other programs are checked during it. With a busy core, a step of a
    thread for each core can take seconds, and its time says nothing.
    """
    retry_s: float = 30.0
    """The time after which memory and other programs are checked again."""
    external_cores_max: float = 0.5
    """The cores that other programs may use meanwhile."""


class Tuner:
    """Decides when models are measured, and keeps the results. Lives on the daemon's event loop.

    *is_on* returns whether the configuration allows it.
    """

    def __init__(
        self,
        records: TuningRecords,
        workers: Callable[[], Iterable[Worker]],
        reservations: Reservations,
        cores: int,
        is_on: Callable[[], bool],
        pace: TuningPace | None = None,
    ):
        self._records, self._workers, self._reservations = records, workers, reservations
        self._is_on, self._pace = is_on, pace or TuningPace()
        self._cpu = this_cpu(cores)
        self._measuring: Worker | None = None
        self._reserved = 0
        self._done: set[Worker] = set()
        """The loaded workers that were measured, or cannot be."""
        self._deadly: set[ModelShape] = set()
        """The shapes of models whose worker died while it measured."""
        self._changed = anyio.Event()

    def load_tuning(self, *, keeps_threads: bool) -> LoadTuning:
        """Return the part of a `ModelSpec` by which a load chooses its setting."""
        records = self._records.of_machine(self._cpu.key, LLAMA_COMMIT)
        return LoadTuning(cpu=self._cpu, records=records, keeps_threads=keeps_threads)

    def next_choice(self, tuning: ModelTuning) -> ChosenSetting:
        """Return the setting that the next load of a loaded model will choose."""
        if tuning.chosen.source == "configured":
            return tuning.chosen
        records = self._records.of_machine(self._cpu.key, LLAMA_COMMIT)
        return choose_setting(None, tuning.shape, self._cpu, LLAMA_COMMIT, records)

    def note_change(self) -> None:
        """Stop a measurement if there is work, in the same step of the event loop; otherwise check
        soon whether one can begin.
        """
        if self._measuring is not None and (self._has_work or not self._is_on()):
            self._stop()
        self._changed.set()

    def note_exited(self, worker: Worker) -> None:
        """Note that a worker has exited. A model whose worker died in a measurement could die in
        each, so it is not measured again by this daemon.
        """
        self._done.discard(worker)
        if worker is self._measuring:
            self._stop()
        self._changed.set()

    def note_result(self, worker: Worker, report: m.Measured) -> None:
        """Store the result of a measurement."""
        self._done.add(worker)
        if worker is self._measuring:
            self._stop()
        name, facts = worker.spec.name, {"seconds": report.seconds, "slices": report.slices}
        if report.record is None:
            log.info("tuning.not_measured", model=name, cause=report.cause, **facts)
            return
        record = replace(report.record, measured_at=time.time())
        log.info("tuning.measured", model=name, **_fields(record.chosen, record.reason), **facts)
        try:
            self._records.store(record)
        except OSError as exc:
            log.warning("tuning.not_stored", model=name, cause=exc.strerror or str(exc))

    async def run(self) -> None:
        """Begin measurements forever, without polling except while one runs."""
        while True:
            self._changed = anyio.Event()
            if self._measuring is None and (self._has_work or self._next_worker() is None):
                await self._changed.wait()
                continue
            is_measuring = self._measuring is not None
            wait_s = self._pace.check_s if is_measuring else self._pace.idle_s
            begin, used_s = time.monotonic(), self._external_s()
            if await self._has_changed_within(wait_s):
                continue
            used_s, passed_s = self._external_s() - used_s, time.monotonic() - begin
            if used_s > self._pace.external_cores_max * passed_s:
                if self._measuring is not None:
                    self._stop()
            elif is_measuring or self._begin():
                continue
            await self._has_changed_within(self._pace.retry_s)

    async def _has_changed_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self._changed.wait()
        return self._changed.is_set()

    @property
    def _has_work(self) -> bool:
        """Whether a model computes or is being loaded."""
        return any(worker.claim is not None for worker in self._workers())

    def _next_worker(self) -> Worker | None:
        """Return a worker whose settings are to be measured."""
        if not self._is_on():
            return None
        for worker in self._workers():
            tuning = worker.tuning
            if worker in self._done or worker.unloading or tuning is None:
                continue
            if worker.spec.fd >= 0:  # a user's file must not decide for others of its shape
                continue
            # Another model of this shape may have been measured since the load.
            if tuning.chosen.source not in MEASURED_SOURCES or tuning.shape in self._deadly:
                continue
            if self.next_choice(tuning).source in MEASURED_SOURCES and self._bytes_of(worker):
                return worker
        return None

    def _bytes_of(self, worker: Worker) -> int:
        need = self._reservations.of_worker(worker)
        return 0 if need is None else need.measuring

    def _begin(self) -> bool:
        """Begin to measure, unless memory is short; return whether it begins."""
        worker = self._next_worker()
        assert worker is not None, "a change would have ended the wait"
        size = self._bytes_of(worker)
        try:
            self._reservations.reserve_more(worker, size)
        except OutOfMemory:
            log.debug("tuning.postponed", model=worker.spec.name, bytes=size)
            return False
        self._measuring, self._reserved = worker, size
        log.info("tuning.began", model=worker.spec.name, pid=worker.pid, bytes=size)
        worker.client.send_command(m.SetMeasuring(True))
        return True

    def _stop(self) -> None:
        worker, self._measuring = self._measuring, None
        assert worker is not None, "the caller has checked it"
        self._reservations.add_bytes(worker, -self._reserved)
        if worker.died and worker.tuning is not None:
            self._deadly.add(worker.tuning.shape)
            log.warning("tuning.worker_died", model=worker.spec.name, pid=worker.pid)
        elif not worker.unloading:
            worker.client.send_command(m.SetMeasuring(False))
        log.debug("tuning.stopped", model=worker.spec.name, pid=worker.pid)

    def _external_s(self) -> float:
        """Return the CPU seconds of other programs since boot."""
        pids = [os.getpid(), *(worker.pid for worker in self._workers() if worker.pid)]
        return busy_s() - sum(own_s(pids).values())


def _fields(setting: Setting, reason: str) -> dict[str, object]:
    return msgspec.structs.asdict(setting) | {"reason": reason}
