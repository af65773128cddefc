"""Causes of workers' deaths, the tasks to blame for each, and the inputs that have crashed a
model's workers.

A task is blamed only on evidence that the worker died by its own fault while it computed that task.
Owners of quarantined inputs may not send them again for an hour. The same input of another user is
computed as before.
"""

from __future__ import annotations

import hashlib
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from ...backends.errors import InferdError, QuotaExceeded, WorkerCrashed
from ...backends.params import GRAMMAR_FIELDS
from ...backends.recent_dict import RecentDict
from ...scheduler.messages import TaskSpec
from ...scheduler.owner import Priority
from ...scheduler.record import Activity, ActivityKind

FAULT_SIGNALS = (
    *(signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGSYS),
    signal.SIGTRAP,  # `__builtin_trap` on ARM
)
"""Signals that a process causes itself. SIGBUS is another, unless the model's file has changed."""


class Cause(StrEnum):
    """The reason of a death."""

    FAULT = "fault"
    """The process crashed."""
    HANG = "hang"
    """It computed without progress, until the daemon killed it."""
    OUT_OF_MEMORY = "out_of_memory"
    """The kernel killed it to free memory."""
    OUTSIDE = "outside"
    """Anything else: another process has killed it, or its file was truncated."""


class DeathPhase(StrEnum):
    """The work during which a process died."""

    STEP = "step"
    SAMPLE = "sample"
    PROMPT = "prompt"
    OTHER = "other"
    LOADING = "loading"


class Verdict(StrEnum):
    """The treatment of the tasks of a dead worker, or of the load that it died in."""

    RESUME = "resume"
    """No task is to blame, and all continue; a load is repeated."""
    SUSPECT_STEP = "suspect_step"
    """All tasks of the step are suspects; one that is alone is guilty at its second death."""
    SUSPECT_TASK = "suspect_task"
    """The task is a suspect, and guilty at its second death."""
    REFUSE_INPUT = "refuse_input"
    """The text is to blame."""
    SHRINK_LATER = "shrink_later"
    """No task is to blame. A second death shrinks the model; at a third the step's tasks fail."""
    SHRINK = "shrink"
    """No task is to blame, and the model is loaded in a smaller shape."""
    REFUSE_TASK_FOR_MEMORY = "refuse_task_for_memory"
    """The task or the text needs more memory than there is."""
    LOAD_ONCE_MORE = "load_once_more"
    """The load is repeated; the model is to blame at the second death during a load."""
    FAIL_LOAD = "fail_load"
    """The model is to blame."""
    FAIL_LOAD_FOR_MEMORY = "fail_load_for_memory"
    """The model needs more memory than there is."""


_OWN_FAULT = {
    DeathPhase.STEP: Verdict.SUSPECT_STEP,
    DeathPhase.SAMPLE: Verdict.SUSPECT_TASK,
    DeathPhase.PROMPT: Verdict.REFUSE_INPUT,
    DeathPhase.OTHER: Verdict.RESUME,
}
VERDICTS: Mapping[Cause, Mapping[DeathPhase, Verdict]] = {
    Cause.FAULT: _OWN_FAULT | {DeathPhase.LOADING: Verdict.LOAD_ONCE_MORE},
    Cause.HANG: _OWN_FAULT | {DeathPhase.LOADING: Verdict.FAIL_LOAD},
    Cause.OUT_OF_MEMORY: {
        DeathPhase.STEP: Verdict.SHRINK_LATER,
        DeathPhase.SAMPLE: Verdict.REFUSE_TASK_FOR_MEMORY,
        DeathPhase.PROMPT: Verdict.REFUSE_TASK_FOR_MEMORY,
        DeathPhase.OTHER: Verdict.SHRINK,
        DeathPhase.LOADING: Verdict.FAIL_LOAD_FOR_MEMORY,
    },
    Cause.OUTSIDE: dict.fromkeys(DeathPhase, Verdict.RESUME),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The evidence about the death of a worker that was not ordered to quit."""

    activity: Activity
    """Its last activity."""
    loaded: bool = True
    """Whether its model was loaded."""
    code: int | None = None
    """Its exit status, or minus the signal that killed it; None if it is unknown."""
    was_killed_as_hung: bool = False
    used_cpu: bool = False
    """Whether it used CPU time while it was silent. If not, it was stopped or waited for a file."""
    was_oom_killed: bool = False
    """Whether the kernel counted a process that it killed to free memory."""
    sent_garbage: bool = False
    """Whether it sent a frame that could not be read."""
    files_changed: bool = False
    """Whether the model's files have changed since the load began."""
    made_progress: bool = False
    """Whether a task received a token or ended."""

    @property
    def phase(self) -> DeathPhase:
        """The work during which the process died."""
        if not self.loaded:
            return DeathPhase.LOADING
        return _PHASES.get(self.activity.kind, DeathPhase.OTHER)

    @property
    def cause(self) -> Cause:
        """The cause; see `cause_of`."""
        return cause_of(self)

    @property
    def suspects(self) -> tuple[int, ...]:
        """The tasks or requests that may be the cause: those under way or, if the process hung, the
        oldest of them.
        """
        activity = self.activity
        return activity.ids[: activity.oldest] if self.cause is Cause.HANG else activity.ids

    @property
    def verdict(self) -> Verdict:
        """The treatment of the tasks, or of the load."""
        return VERDICTS[self.cause][self.phase]


_PHASES = {
    ActivityKind.STEP: DeathPhase.STEP,
    ActivityKind.SAMPLE: DeathPhase.SAMPLE,
    ActivityKind.PROMPT: DeathPhase.PROMPT,
}


def cause_of(death: Death) -> Cause:
    """Return the cause of a death. Without evidence of another cause it is `OUTSIDE`."""
    if death.sent_garbage:
        return Cause.FAULT
    if death.code == -signal.SIGKILL:
        if death.was_killed_as_hung:
            return Cause.HANG if death.used_cpu else Cause.OUTSIDE
        return Cause.OUT_OF_MEMORY if death.was_oom_killed else Cause.OUTSIDE
    code = death.code or 0
    if code > 0 or -code in FAULT_SIGNALS:
        return Cause.FAULT
    if code == -signal.SIGBUS and not death.files_changed:
        return Cause.FAULT
    return Cause.OUTSIDE


QUARANTINE_S = 3600.0
INPUTS_MAX = 32
"""Quarantined inputs per owner; more than an owner can add within `QUARANTINE_S`."""
OWNERS_MAX = 1000
VERDICTS_MAX = 3
"""Verdicts within `QUARANTINE_S` after which the model refuses the owner for `BAN_S`."""
BAN_S = 600.0
SUSPECT_S = 60.0
"""So long after a death during which a channel of a user computed, its computations run alone."""
GUILTY, SUSPECT = "input", "suspect"
"""The cause in the error of an input that has crashed a process, or may have."""
WORKER_PROCESS, ENCODER_PROCESS = "worker", "encoder"
"""The processes of a model, in words."""


class _Owner:
    """The quarantined inputs of one owner."""

    def __init__(self) -> None:
        self.inputs = RecentDict[bytes, float](INPUTS_MAX)
        """The time at which the quarantine of each input ends, by its hash."""
        self.verdicts: deque[float] = deque(maxlen=VERDICTS_MAX)
        self.banned_until = self.suspect_until = self.passes_daemon_until = 0.0


class Quarantine:
    """Inputs of one model's users that crash a *process* of the model. Lives on the daemon's event
    loop.
    """

    def __init__(
        self, seconds: Callable[[], float] = time.monotonic, process: str = WORKER_PROCESS
    ):
        self._seconds, self._process = seconds, process
        self._owners = RecentDict[int, _Owner](OWNERS_MAX)

    def add_task(self, spec: TaskSpec, *, while_sampling: bool) -> None:
        """Quarantine a task, and its grammar if the worker crashed while sampling for the task."""
        grammar = _grammar(spec) if while_sampling else None
        self._add(spec.owner.user, *(_hash(it) for it in (_task(spec), grammar) if it))

    def add_text(self, owner: int, text: object) -> None:
        """Quarantine a text that crashed the worker while it was tokenized or rendered."""
        self._add(owner, _hash(text))

    def add_suspect(self, owner: int) -> None:
        """Suspect an owner whose channel has sent an input that may have crashed the worker. The
        daemon does not know that input; the client sends it here next. After a second suspicion
        within `QUARANTINE_S`, all inputs of the owner pass through the daemon for as long.
        """
        found, now = self._owners.get(owner) or _Owner(), self._seconds()
        self._owners[owner] = found
        is_again = found.suspect_until and now < found.suspect_until + QUARANTINE_S
        found.suspect_until = now + SUSPECT_S
        found.passes_daemon_until = now + (QUARANTINE_S if is_again else SUSPECT_S)

    def is_suspect(self, owner: int) -> bool:
        """Return whether the inputs of an owner are computed alone, to find the one to blame."""
        found = self._owners.get(owner)
        return found is not None and self._seconds() < found.suspect_until

    def trusts(self, owner: int) -> bool:
        """Return whether an owner may send inputs past the daemon: it was not suspect lately, and
        none of its inputs is quarantined.
        """
        found, now = self._owners.get(owner), self._seconds()
        if found is None:
            return True
        until = max((found.passes_daemon_until, *found.inputs.values()))
        return now >= until

    def refusal_of_task(self, model: str, spec: TaskSpec) -> InferdError | None:
        """Return the error of a task that may not run, or None if it may."""
        if spec.owner.user not in self._owners:  # nearly always
            return None
        return self._refusal(model, spec.owner.user, _task(spec), _grammar(spec))

    def refusal_of_text(self, model: str, owner: int, text: object) -> InferdError | None:
        """Return the error of a text that may not be tokenized or rendered, or None if it may."""
        return self._refusal(model, owner, text)

    def _add(self, owner: int, *hashes: bytes) -> None:
        now = self._seconds()
        found = self._owners[owner] = self._owners.get(owner) or _Owner()
        for key in hashes:
            found.inputs[key] = now + QUARANTINE_S
        found.verdicts.append(now)
        if len(found.verdicts) == VERDICTS_MAX and now < found.verdicts[0] + QUARANTINE_S:
            found.banned_until = now + BAN_S

    def _refusal(self, model: str, owner: int, *inputs: object) -> InferdError | None:
        found, now = self._owners.get(owner), self._seconds()
        if found is None:
            return None
        if now < found.banned_until:
            return _ban(model, found.banned_until - now, self._process)
        if any(now < found.inputs.get(_hash(it), now) for it in inputs if it):
            return quarantine_error(model, self._process)
        return None


def quarantine_error(model: str, process: str = WORKER_PROCESS) -> WorkerCrashed:
    """Return the error of an input that has crashed a *process* of a model."""
    return WorkerCrashed(
        f"this input crashes the {process} process of {model!r}",
        hint="change the input: unchanged it is refused for an hour; the daemon's log has the cause"
        " of the crash",
        data={"model": model, "cause": GUILTY},
        retryable=False,
    )


def suspect_error(model: str) -> WorkerCrashed:
    """Return the error of an input that may have crashed the worker process of a model, because it
    was computed beside others.
    """
    return WorkerCrashed(
        f"the worker process of {model!r} ended while it computed this input beside others",
        data={"model": model, "cause": SUSPECT},
    )


def _ban(model: str, seconds: float, process: str) -> QuotaExceeded:
    return QuotaExceeded(
        f"{VERDICTS_MAX} of your inputs have crashed the {process} process of {model!r} within an"
        " hour",
        hint="find out what they have in common (a grammar, an adapter, special tokens) before"
        " you try again after retry_after_s seconds",
        data={"model": model, "crashes_max": VERDICTS_MAX, "retry_after_s": seconds},
    )


def _task(spec: TaskSpec) -> TaskSpec:
    """Return the part of a task that determines its computation, whatever its reader and seed."""
    return replace(
        spec,
        id=0,
        sampling=replace(spec.sampling, seed=0),
        priority=Priority.NORMAL,
        pull=False,
        credit=-1,
        queue_timeout_s=0.0,
        total_timeout_s=0.0,
        session="",
        persist=False,
        shared_kv=None,
        watch=False,
        resume_point=None,
        request="",
    )


def _grammar(spec: TaskSpec) -> object:
    sampling = spec.sampling
    if not sampling.has_grammar:
        return None
    return [getattr(sampling, name) for name in GRAMMAR_FIELDS]


def _hash(data: object) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(data)).digest()
