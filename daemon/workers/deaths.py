"""Causes of workers' deaths, and the tasks to blame for each: pure functions.

A task is blamed only on evidence that the worker died by its own fault while it computed that task.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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
