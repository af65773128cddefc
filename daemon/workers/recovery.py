"""What becomes of the tasks of a worker that died: they go on in a new one.

The tasks of the step in which it died are suspects. The new worker runs one of them at a time
beside the others, until that one is past the step; if the worker dies in such a step again, that
task is refused, and so is its prompt for an hour.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping

import anyio
import structlog

from ...backends.errors import InferdError, LoadFailed, WorkerCrashed
from ...scheduler import messages as m
from ...scheduler.recording.recorder import Act, Doing
from ...sessions.worker_client import Line, Port, TaskReader

__all__ = ("Quarantine", "Recovery", "fail_readers", "quarantine_error")

DEATHS_MAX = 8
"""So many deaths within `DEATHS_S`, with nothing computed between them, and the tasks fail."""
DEATHS_S = 60.0
BACKOFF_S = 0.25
QUARANTINE_S = 3600.0
QUARANTINE_INPUTS_MAX = 1000

log = structlog.get_logger()


class Quarantine:
    """The inputs that ended a worker, by their hash: none of them is tried again for an hour."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add_input(self, data: bytes) -> None:
        """Remember an input."""
        self._until[_hash(data)] = self._seconds() + QUARANTINE_S
        while len(self._until) > QUARANTINE_INPUTS_MAX:
            self._until.popitem(last=False)

    def __contains__(self, data: bytes) -> bool:
        if not self._until:
            return False
        until = self._until.get(_hash(data))
        return until is not None and self._seconds() < until


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def quarantine_error(model: str) -> WorkerCrashed:
    """Return the error of an input that has ended a worker process."""
    return WorkerCrashed(
        f"this input ends the worker process of {model!r}",
        hint="change it: as it is it is refused for an hour; the daemon's log says how the process"
        " ended",
        data={"model": model, "cause": "input"},
    )


class _OnTrial:
    """A suspect's reader: hears when the suspect is past the step in which the worker died."""

    def __init__(self, reader: TaskReader, passed: Callable[[int], None]):
        self.reader, self.spec = reader, reader.spec
        self._passed: Callable[[int], None] | None = passed

    def report(self, report: m.Report) -> None:
        self.reader.report(report)
        if self._passed is not None and isinstance(report, m.Tokens | m.Finished | m.Failed):
            passed, self._passed = self._passed, None
            passed(self.spec.id)

    def go_on(self, port: Line) -> m.TaskSpec | None:
        return self.reader.go_on(port)

    @property
    def begun(self) -> bool:
        return True


class Recovery:
    """One model's. *ready* returns its worker's port, starting one if need be."""

    def __init__(
        self,
        model: str,
        ready: Callable[[], Awaitable[Port]],
        seconds: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ):
        self.quarantine = Quarantine(seconds)
        self.recovered = 0
        """Times that a task went on in another worker: its own had died, or was swapped."""
        self._model, self._ready = model, ready
        self._seconds, self._sleep = seconds, sleep
        self._orphans: dict[int, TaskReader] = {}
        self._suspects: set[int] = set()
        self._trial: int | None = None
        self._deaths: deque[float] = deque()
        self._act: Act | None = None

    def __len__(self) -> int:
        return len(self._orphans)

    def move(self, readers: Mapping[int, TaskReader]) -> None:
        """Take tasks that are to go on in another worker, though nothing has died."""
        self._orphans |= _themselves(readers)

    def release(self) -> dict[int, TaskReader]:
        """Return the tasks that wait for a worker; they are somebody else's now."""
        orphans, self._orphans = self._orphans, {}
        self._suspects.clear()
        return orphans

    def take(self, readers: Mapping[int, TaskReader], act: Act) -> None:
        """Take the tasks of a worker that died while it did *act*."""
        tasks = _themselves(readers)
        fatal = {n for n in act.ids if n in tasks} if act.doing is Doing.STEP else set()
        if self._trial is not None and self._trial in fatal:
            self._suspects.discard(self._trial)
            self._refuse(tasks.pop(self._trial))
            self._deaths.clear()
        else:
            self._suspects |= fatal
            if act != self._act:  # a task that comes too late is no other death
                self._deaths.append(self._seconds())
        self._trial, self._act = None, act
        self._orphans |= tasks

    def _refuse(self, reader: TaskReader) -> None:
        spec = reader.spec
        self.quarantine.add_input(spec.tokens)
        log.error("task.poisonous", model=self._model, task=spec.id, request=spec.request)
        fail_readers({spec.id: reader}, quarantine_error(self._model))

    async def bring_back(self) -> None:
        """Start a worker, and let the tasks go on in it; where that fails they fail."""
        try:
            self._admit(await self._start())
        except InferdError as exc:
            fail_readers(self.release(), exc)
        except BaseException:
            fail_readers(self.release(), self._gave_up())
            raise

    async def _start(self) -> Port:
        """Return the port of a worker; one that dies while it loads is no reason to give up."""
        while True:
            await self._sleep(self._backoff_s())
            try:
                return await self._ready()
            except LoadFailed as exc:
                if exc.data.get("cause") != "died":
                    raise
                self._deaths.append(self._seconds())

    def _backoff_s(self) -> float:
        """Return how long to wait before another worker is started.

        :raises WorkerCrashed: too many have died.
        """
        while self._deaths and self._deaths[0] + DEATHS_S < self._seconds():
            self._deaths.popleft()
        if len(self._deaths) > DEATHS_MAX:
            raise self._gave_up()
        before = len(self._deaths) - 1
        return BACKOFF_S * 2 ** (before - 1) if before > 0 else 0.0

    def _gave_up(self) -> WorkerCrashed:
        return WorkerCrashed(
            f"the worker process of {self._model!r} ended {len(self._deaths)} times in a row",
            hint="see the daemon's log; the model is tried again with the next request",
            data={"model": self._model},
        )

    def _admit(self, port: Port) -> None:
        for number in [n for n in self._orphans if n not in self._suspects]:
            self._resume(self._orphans.pop(number), port)
        if self._trial is None:
            self._try_next(port)

    def _try_next(self, port: Port) -> None:
        while self._suspects:
            number = min(self._suspects)
            reader = self._orphans.pop(number, None)
            if reader is not None:
                self._trial = number
                trial = _OnTrial(reader, lambda n: self._passed(n, port))
                if self._resume(trial, port):
                    return
                self._trial = None
            self._suspects.discard(number)

    def _resume(self, reader: TaskReader, port: Port) -> bool:
        """Let a task go on; False if its reader has left meanwhile."""
        spec = reader.go_on(port)
        if spec is None:
            return False
        self.recovered += 1
        port.submit(spec, reader)
        return True

    def _passed(self, number: int, port: Port) -> None:
        if self._trial == number:
            self._suspects.discard(number)
            self._trial = None
            self._deaths.clear()
            self._try_next(port)


def _themselves(readers: Mapping[int, TaskReader]) -> dict[int, TaskReader]:
    return {n: r.reader if isinstance(r, _OnTrial) else r for n, r in readers.items()}


def fail_readers(readers: Mapping[int, TaskReader], error: InferdError) -> None:
    """Tell each of *readers* that its task has failed."""
    for number, reader in readers.items():
        try:
            reader.report(m.Failed(number, error.to_wire()))
        except Exception:  # the others are told all the same
            log.exception("task.report_failed", task=number)
