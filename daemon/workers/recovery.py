"""Turns that no worker has: those of a dead worker, which continue in a new worker, and those that
were set aside, which continue once their clients read again or their sessions have a place.

The evidence about a death (`deaths`) decides whether tasks are suspects. The new worker's engine
computes suspects alone, one a step, until each has the tokens of its trial. If a worker dies again
in a step with the suspect alone, or while it samples for it, the task is refused and quarantined.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping

import anyio
import msgspec
import structlog

from ...backends import ModelInfo
from ...backends.errors import (
    Cancelled,
    InferdError,
    LoadFailed,
    OutOfMemory,
    ReaderTimeout,
    WorkerCrashed,
)
from ...scheduler import messages as m
from ...sessions.worker_client import TaskClient, TaskReader, WorkerClient
from .deaths import (
    ENCODER_PROCESS,
    Cause,
    Death,
    DeathPhase,
    Quarantine,
    Verdict,
    quarantine_error,
)

BACKOFF_S = 0.25
BACKOFF_S_MAX = 4.0
STALLED_S_MAX = 120.0
"""The time without a token after which the tasks of dying workers fail."""
SUSPECT_DEATHS_MAX = 2
LOAD_FAULTS_MAX = 2
STEP_OOM_KILLS_MAX = 3
SHRINK_S = 600.0
"""The time after a model's last OOM kill in which loads choose its smaller shape."""
CAREFUL_S = 60.0

log = structlog.get_logger()


class Restarts:
    """The delay before a model's next worker starts, after deaths without a token between them."""

    def __init__(self, seconds: Callable[[], float]):
        self._seconds = seconds
        self._deaths = 0
        self._died_at = 0.0
        self._stalled_since: float | None = None
        """The time of the first death of a needed worker since the last token."""

    def note_death(self, *, made_progress: bool, needed: bool) -> None:
        """Note the death of a worker; tasks or callers may have *needed* it."""
        if made_progress:
            self.note_progress()
        self._died_at = self._seconds()
        self._deaths += 1
        if not needed:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self._died_at

    def note_progress(self) -> None:
        """Note that the deaths so far have not stopped the work."""
        self._deaths, self._stalled_since = 0, None

    def delay_s(self, model: str) -> float:
        """Return the seconds until a worker of *model* may start.

        :raises WorkerCrashed: workers have died for too long.
        """
        now, since = self._seconds(), self._stalled_since
        passed_s = now - self._died_at
        if since is not None and now > since + STALLED_S_MAX and passed_s < BACKOFF_S_MAX:
            raise WorkerCrashed(
                f"the worker process of {model!r} ended {self._deaths} times within"
                f" {now - since:.0f} s without a token",
                hint="see the daemon's log; a later request loads the model again",
                data={"model": model},
            )
        doublings = min(self._deaths - 2, 16)
        backoff_s = min(BACKOFF_S * 2**doublings, BACKOFF_S_MAX) if doublings >= 0 else 0.0
        return max(0.0, backoff_s - passed_s)


class Recovery:
    """Recovery of one model's tasks. Lives on the daemon's event loop."""

    def __init__(self, model: str, seconds: Callable[[], float] = time.monotonic):
        self.quarantine = Quarantine(seconds)
        self.media_quarantine = Quarantine(seconds, ENCODER_PROCESS)
        self.restarts = Restarts(seconds)
        self.recovered = 0
        """Times that a task continued in another worker after a death or a swap."""
        self._model, self._seconds = model, seconds
        self._orphans: dict[int, TaskReader] = {}
        self._suspects: dict[int, Suspect] = {}
        self._load_faults = 0
        self._step_oom_kills = self._shrinks = 0
        self._oom_killed_at = 0.0
        self._fault_at = -CAREFUL_S

    def __len__(self) -> int:
        return len(self._orphans)

    @property
    def careful_s(self) -> float:
        """The `EngineSettings.careful_s` of the next worker."""
        recent = self._seconds() < self._fault_at + CAREFUL_S
        suspects = any(suspect.on_trial for suspect in self._suspects.values())
        return CAREFUL_S if recent or suspects else 0.0

    @property
    def probes(self) -> bool:
        """The `EngineSettings.probes` of the next worker: whether the last load has not crashed."""
        return not self._load_faults

    @property
    def shrinks(self) -> int:
        """The number of times that the next load is to choose a smaller shape."""
        self._expire_oom_kills()
        return self._shrinks

    # Deaths.

    def note_death(self, death: Death, *, needed: bool) -> None:
        """Note the death of a worker, which tasks or callers may have *needed*."""
        self.restarts.note_death(made_progress=death.made_progress, needed=needed)
        verdict = death.verdict
        if death.loaded and death.cause in (Cause.FAULT, Cause.HANG):
            self._fault_at = self._seconds()
        if verdict in (Verdict.SHRINK, Verdict.SHRINK_LATER):
            self._expire_oom_kills()
            self._oom_killed_at = self._seconds()
            self._step_oom_kills += verdict is Verdict.SHRINK_LATER
            self._shrinks += verdict is Verdict.SHRINK or self._step_oom_kills > 1

    def _expire_oom_kills(self) -> None:
        if self._seconds() > self._oom_killed_at + SHRINK_S:
            self._step_oom_kills = self._shrinks = 0

    def load_error(self, death: Death, status: str) -> InferdError:
        """Return the error of a load during which the worker has died with *status*. The cause
        `died` means that another load may succeed.
        """
        verdict, cause = death.verdict, "died"
        if verdict is Verdict.FAIL_LOAD_FOR_MEMORY:
            return out_of_memory(self._model, "its load")
        if verdict is Verdict.LOAD_ONCE_MORE:
            self._load_faults += 1
        if verdict is Verdict.FAIL_LOAD or self._load_faults >= LOAD_FAULTS_MAX:
            self._load_faults, cause = 0, "crashed"
        return LoadFailed(
            f"loading {self._model!r} ended the worker process ({status})",
            hint="the file is probably damaged: see the daemon's log",
            data={"cause": cause},
        )

    def note_loaded(self) -> None:
        """Note that a load has succeeded."""
        self._load_faults = 0

    # Tasks.

    def move_tasks(self, readers: Mapping[int, TaskReader]) -> None:
        """Add tasks that are to continue in another worker, without a death."""
        self._orphans |= _unwrap(readers)

    def release_tasks(self) -> dict[int, TaskReader]:
        """Remove and return the tasks that wait for a worker."""
        orphans, self._orphans = self._orphans, {}
        for number in orphans:
            self._suspects.pop(number, None)
        return orphans

    def add_orphans(self, readers: Mapping[int, TaskReader], death: Death) -> None:
        """Add the tasks of a worker that has died, and refuse those that are to blame."""
        tasks, phase, verdict = _unwrap(readers), death.phase, death.verdict
        ids = death.activity.ids if phase in (DeathPhase.STEP, DeathPhase.SAMPLE) else ()
        involved = [number for number in ids if number in tasks]
        match verdict:
            case Verdict.SUSPECT_STEP | Verdict.SUSPECT_TASK:
                for number in involved:
                    suspect = self._suspects.setdefault(number, Suspect())
                    suspect.note_death()
                    alone = len(ids) == 1 and not death.activity.beside_text
                    if alone and suspect.deaths >= SUSPECT_DEATHS_MAX:
                        self._convict(tasks.pop(number), while_sampling=phase is DeathPhase.SAMPLE)
            case Verdict.REFUSE_TASK_FOR_MEMORY:
                self._refuse_for_memory(tasks, involved)
            case Verdict.SHRINK_LATER if self._step_oom_kills >= STEP_OOM_KILLS_MAX:
                self._refuse_for_memory(tasks, involved)
        self._orphans |= tasks

    def _convict(self, reader: TaskReader, *, while_sampling: bool) -> None:
        spec = reader.spec
        del self._suspects[spec.id]
        self.quarantine.add_task(spec, while_sampling=while_sampling)
        self.restarts.note_progress()
        log.error("task.quarantined", model=self._model, task=spec.id, request=spec.request)
        fail_readers({spec.id: reader}, quarantine_error(self._model))

    def _refuse_for_memory(self, tasks: dict[int, TaskReader], numbers: list[int]) -> None:
        for number in numbers:
            self._suspects.pop(number, None)
        refused = {number: tasks.pop(number) for number in numbers}
        fail_readers(refused, out_of_memory(self._model, "this turn"))

    async def resume_tasks(self, ready: Callable[[], Awaitable[WorkerClient]]) -> None:
        """Continue the tasks in the worker whose client *ready* returns; they fail if it does not
        start.
        """
        try:
            client = await ready()
        except InferdError as exc:
            fail_readers(self.release_tasks(), exc)
            return
        except BaseException:
            error = WorkerCrashed(f"the worker process of {self._model!r} was lost")
            fail_readers(self.release_tasks(), error)
            raise
        orphans, self._orphans = self._orphans, {}
        for reader in orphans.values():
            self._resume(reader, client)

    def _resume(self, reader: TaskReader, client: WorkerClient) -> None:
        number = reader.spec.id
        spec, suspect = reader.continue_on(client), self._suspects.get(number)
        if spec is None:  # its reader has left meanwhile
            self._suspects.pop(number, None)
            return
        if suspect is not None:
            spec = msgspec.structs.replace(spec, trial_tokens=suspect.tokens_left)
            reader = SuspectReader(reader, suspect, lambda n: self._suspects.pop(n, None))
        self.recovered += 1
        client.submit(spec, reader)


def out_of_memory(model: str, what: str) -> OutOfMemory:
    """Return the error of work for which the kernel has killed a worker."""
    return OutOfMemory(
        f"memory ran out while the worker process of {model!r} computed {what}",
        hint="end other programs, unload models, or use a smaller ctx-size or fewer slots",
        data={"model": model},
    )


def _unwrap(readers: Mapping[int, TaskReader]) -> dict[int, TaskReader]:
    return {n: r.reader if isinstance(r, SuspectReader) else r for n, r in readers.items()}


def fail_readers(readers: Mapping[int, TaskReader], error: InferdError) -> None:
    """Report to each of *readers* that its task has failed."""
    for number, reader in readers.items():
        try:
            reader.report(m.Failed(number, error.to_wire()))
        except Exception:  # the other readers still get their report
            log.exception("task.report_failed", task=number)


TRIAL_GROWTH, TRIAL_TOKENS_MAX = 4, 256
"""Each trial is longer than the previous one, as an input may crash the worker only at times."""


class Suspect:
    """A task in whose steps workers have died."""

    def __init__(self) -> None:
        self.deaths = 0
        """Deaths since it last passed a trial."""
        self.trial_tokens = 1
        """Tokens that it is to sample alone in the next trial."""
        self._left = 0

    @property
    def on_trial(self) -> bool:
        """Whether it is to be computed alone."""
        return self.deaths > 0

    def note_death(self) -> None:
        """Note another death; a new trial begins, unless one is under way."""
        self.deaths += 1
        if self._left == 0:
            self._left = self.trial_tokens
            self.trial_tokens = min(self.trial_tokens * TRIAL_GROWTH, TRIAL_TOKENS_MAX)

    @property
    def tokens_left(self) -> int:
        """The tokens of the present trial that are left."""
        return self._left

    def note_tokens(self, count: int) -> None:
        """Note sampled tokens; the last one of the trial clears the task."""
        self._left = max(0, self._left - count)
        if self._left == 0:
            self.deaths = 0


class SuspectReader:
    """A suspect's reader, which counts the task's tokens. *ended* gets the task's id at its end."""

    begun = True

    def __init__(self, reader: TaskReader, suspect: Suspect, ended: Callable[[int], object]):
        self.reader, self.spec = reader, reader.spec
        self._suspect, self._ended = suspect, ended

    def report(self, report: m.Report) -> None:
        """Pass a report on; see `TaskReader.report`."""
        self.reader.report(report)
        if isinstance(report, m.Tokens):
            self._suspect.note_tokens(len(report.tokens))
        elif isinstance(report, m.Finished | m.Failed):
            self._ended(self.spec.id)

    def continue_on(self, client: TaskClient) -> m.TaskSpec | None:
        """Continue in another worker; see `TaskReader.continue_on`."""
        return self.reader.continue_on(client)

    def media_encoded(self, items: int, seconds: float) -> None:
        """Pass a count on; see `TaskReader.media_encoded`."""
        self.reader.media_encoded(items, seconds)

    def unread_for(self, seconds: float) -> bool:
        """Return whether its output has not been read; see `TaskReader.unread_for`."""
        return self.reader.unread_for(seconds)


class EvictedTurns:
    """The `TaskClient` of turns that no worker has; a turn continues when its client reads again.
    Owned by the daemon's event loop.

    *move* loads the model and continues turns in its worker. *start* starts background work. A turn
    that is not read for *timeout_s* fails.
    """

    def __init__(
        self,
        move: Callable[[Mapping[int, TaskReader]], None],
        start: Callable[..., None],
        timeout_s: float,
    ):
        self._move, self._start, self._timeout_s = move, start, timeout_s
        self._readers: dict[int, TaskReader] = {}
        self._info: ModelInfo | None = None

    def __len__(self) -> int:
        return len(self._readers)

    def add_turns(self, readers: Mapping[int, TaskReader], info: ModelInfo) -> None:
        """Add turns that their worker no longer has; *info* describes its model."""
        self._info = info
        added = {number: r for number, r in readers.items() if r.continue_on(self) is not None}
        self._readers |= added
        if added:
            self._start(self._fail_unread, added)

    async def _fail_unread(self, added: Mapping[int, TaskReader]) -> None:
        await anyio.sleep(self._timeout_s)
        # Some may have been read since, whose sessions wait for a place.
        unread = {number: r for number, r in added.items() if r.unread_for(self._timeout_s)}
        self._fail(unread, ReaderTimeout(f"the stream was not read for {self._timeout_s:g} s"))

    def fail_swapped(self, model: str) -> None:
        """Fail all turns, because the next worker of *model* may have a different vocabulary."""
        error = Cancelled(
            f"the turn ended with its model: {model!r} was swapped",
            hint="send the next turn: the history is kept",
        )
        self._fail(dict(self._readers), error)

    def _fail(self, readers: Mapping[int, TaskReader], error: InferdError) -> None:
        for number, reader in readers.items():
            if self._readers.get(number) is reader:
                del self._readers[number]
                reader.report(m.Failed(number, error.to_wire()))

    # The methods of `TaskClient`.

    @property
    def info(self) -> ModelInfo:
        """Facts about the evicted model."""
        assert self._info is not None, "no turn was evicted"
        return self._info

    def submit(self, spec: m.TaskSpec, reader: TaskReader) -> None:
        """Start a turn in a worker."""
        self._move({spec.id: reader})

    def has_task(self, task_id: int, reader: TaskReader) -> bool:
        """Return whether a turn waits here for its reader."""
        return self._readers.get(task_id) is reader

    def withdraw_task(self, task_id: int) -> None:
        """Remove a turn."""
        del self._readers[task_id]

    def keep_turn(self, reader: TaskReader) -> None:
        """Add a turn whose session has no place."""
        self.add_turns({reader.spec.id: reader}, self.info)

    def send_command(self, command: m.Command) -> None:
        """Drop a cancelled turn. Continue a turn whose client reads again or requests a token.

        Other commands are ignored: a continued turn starts with its current parameters and requests
        the pending comparison of a sentence again.
        """
        if isinstance(command, m.Cancel | m.Credit | m.PullToken):
            reader = self._readers.pop(command.task_id, None)
            if reader is not None and not isinstance(command, m.Cancel):
                self._move({command.task_id: reader})
