"""Recovery of the tasks of a dead worker, which continue in a new worker.

The tasks of the step in which the worker died are suspects. The new worker runs one suspect at a
time beside the other tasks, until the suspect is past that step. If the worker dies again in a step
with the suspect, the task is refused and its prompt is quarantined for an hour.
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
from ...scheduler.recording.recorder import Activity, ActivityKind
from ...sessions.worker_client import TaskClient, TaskReader, WorkerClient

DEATHS_MAX = 8
"""Deaths within `DEATHS_S`, with no progress between them, after which the tasks fail."""
DEATHS_S = 60.0
BACKOFF_S = 0.25
QUARANTINE_S = 3600.0
QUARANTINE_INPUTS_MAX = 1000

log = structlog.get_logger()


class Quarantine:
    """Inputs that have crashed a worker, by hash; each is refused for an hour."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic):
        self._seconds = seconds
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add_input(self, data: bytes) -> None:
        """Refuse an input for the next hour."""
        self._until[_hash(data)] = self._seconds() + QUARANTINE_S
        while len(self._until) > QUARANTINE_INPUTS_MAX:
            self._until.popitem(last=False)

    def __contains__(self, data: bytes) -> bool:
        if not self._until:  # a hash of each input would take time
            return False
        return self._seconds() < self._until.get(_hash(data), float("-inf"))


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def quarantine_error(model: str) -> WorkerCrashed:
    """Return the error of an input that has crashed a worker process."""
    return WorkerCrashed(
        f"this input crashes the worker process of {model!r}",
        hint="change the input: unchanged it is refused for an hour; the daemon's log has the cause"
        " of the crash",
        data={"model": model, "cause": "input"},
    )


class _TrialReader:
    """A suspect's reader, which calls *passed* once the suspect is past the fatal step."""

    def __init__(self, reader: TaskReader, passed: Callable[[int], None]):
        self.reader, self.spec = reader, reader.spec
        self._passed: Callable[[int], None] | None = passed

    def report(self, report: m.Report) -> None:
        self.reader.report(report)
        if self._passed is not None and isinstance(report, m.Tokens | m.Finished | m.Failed):
            passed, self._passed = self._passed, None
            passed(self.spec.id)

    def continue_on(self, client: TaskClient) -> m.TaskSpec | None:
        return self.reader.continue_on(client)

    @property
    def begun(self) -> bool:
        return True


class Recovery:
    """Recovery of one model's tasks. *ready* returns a worker's client; it may start a worker.

    Owned by the daemon's event loop.
    """

    def __init__(
        self,
        model: str,
        ready: Callable[[], Awaitable[WorkerClient]],
        seconds: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ):
        self.quarantine = Quarantine(seconds)
        self.recovered = 0
        """How often a task continued in another worker, after a death or a swap."""
        self._model, self._ready = model, ready
        self._seconds, self._sleep = seconds, sleep
        self._orphans: dict[int, TaskReader] = {}
        self._suspects: set[int] = set()
        self._trial: int | None = None
        self._deaths: deque[float] = deque()
        self._act: Activity | None = None

    def __len__(self) -> int:
        return len(self._orphans)

    def move_tasks(self, readers: Mapping[int, TaskReader]) -> None:
        """Add tasks that are to continue in another worker, without a death."""
        self._orphans |= _unwrap_trials(readers)

    def release_tasks(self) -> dict[int, TaskReader]:
        """Remove and return the tasks that wait for a worker."""
        orphans, self._orphans = self._orphans, {}
        self._suspects.clear()
        return orphans

    def add_orphans(self, readers: Mapping[int, TaskReader], act: Activity) -> None:
        """Add the tasks of a worker that died during *act*."""
        tasks = _unwrap_trials(readers)
        fatal = {n for n in act.ids if n in tasks} if act.kind is ActivityKind.STEP else set()
        if self._trial is not None and self._trial in fatal:
            self._suspects.discard(self._trial)
            reader = tasks.pop(self._trial)
            self.quarantine.add_input(reader.spec.tokens)
            task, request = self._trial, reader.spec.request
            log.error("task.quarantined", model=self._model, task=task, request=request)
            fail_readers({task: reader}, quarantine_error(self._model))
            self._deaths.clear()
        else:
            self._suspects |= fatal
            if act != self._act:  # a task that is added late is not another death
                self._deaths.append(self._seconds())
        self._trial, self._act = None, act
        self._orphans |= tasks

    async def resume_tasks(self) -> None:
        """Start a worker and continue the tasks in it; they fail if it does not start."""
        try:
            client = await self._start_worker()
            for number in [n for n in self._orphans if n not in self._suspects]:
                self._resume(self._orphans.pop(number), client)
            if self._trial is None:
                self._start_next_trial(client)
        except InferdError as exc:
            fail_readers(self.release_tasks(), exc)
        except BaseException:
            fail_readers(self.release_tasks(), self._too_many_deaths())
            raise

    async def _start_worker(self) -> WorkerClient:
        """Return a new worker's client; retry after a death during the load."""
        while True:
            await self._sleep(self._backoff_s())
            try:
                return await self._ready()
            except LoadFailed as exc:
                if exc.data.get("cause") != "died":
                    raise
                self._deaths.append(self._seconds())

    def _backoff_s(self) -> float:
        """Return the seconds to wait before the next start.

        :raises WorkerCrashed: too many workers have died.
        """
        while self._deaths and self._deaths[0] + DEATHS_S < self._seconds():
            self._deaths.popleft()
        if len(self._deaths) > DEATHS_MAX:
            raise self._too_many_deaths()
        before = len(self._deaths) - 1
        return BACKOFF_S * 2 ** (before - 1) if before > 0 else 0.0

    def _too_many_deaths(self) -> WorkerCrashed:
        return WorkerCrashed(
            f"the worker process of {self._model!r} ended {len(self._deaths)} times in a row",
            hint="see the daemon's log; the next request loads the model again",
            data={"model": self._model},
        )

    def _start_next_trial(self, client: WorkerClient) -> None:
        while self._suspects:
            number = min(self._suspects)
            reader = self._orphans.pop(number, None)
            if reader is not None:
                self._trial = number
                trial = _TrialReader(reader, lambda n: self._trial_passed(n, client))
                if self._resume(trial, client):
                    return
                self._trial = None
            self._suspects.discard(number)

    def _resume(self, reader: TaskReader, client: WorkerClient) -> bool:
        """Continue a task; return False if its reader was closed meanwhile."""
        spec = reader.continue_on(client)
        if spec is None:
            return False
        self.recovered += 1
        client.submit(spec, reader)
        return True

    def _trial_passed(self, number: int, client: WorkerClient) -> None:
        if self._trial == number:
            self._suspects.discard(number)
            self._trial = None
            self._deaths.clear()
            self._start_next_trial(client)


def _unwrap_trials(readers: Mapping[int, TaskReader]) -> dict[int, TaskReader]:
    return {n: r.reader if isinstance(r, _TrialReader) else r for n, r in readers.items()}


def fail_readers(readers: Mapping[int, TaskReader], error: InferdError) -> None:
    """Report to each of *readers* that its task has failed."""
    for number, reader in readers.items():
        try:
            reader.report(m.Failed(number, error.to_wire()))
        except Exception:  # the other readers still get their report
            log.exception("task.report_failed", task=number)
