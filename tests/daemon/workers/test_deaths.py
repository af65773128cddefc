"""The causes of deaths and their verdicts, over all cells of the table."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from inferd.daemon.workers.deaths import VERDICTS, Cause, Death, DeathPhase, Verdict, cause_of
from inferd.scheduler.record import Activity, ActivityKind

IDLE = Activity(ActivityKind.IDLE, (), 0.0)
PHASES = {
    DeathPhase.STEP: (ActivityKind.STEP, True),
    DeathPhase.SAMPLE: (ActivityKind.SAMPLE, True),
    DeathPhase.PROMPT: (ActivityKind.PROMPT, True),
    DeathPhase.OTHER: (ActivityKind.OTHER, True),
    DeathPhase.LOADING: (ActivityKind.IDLE, False),
}
EVIDENCE = {
    Cause.FAULT: Death(activity=IDLE, code=-signal.SIGSEGV),
    Cause.HANG: Death(activity=IDLE, code=-signal.SIGKILL, was_killed_as_hung=True, used_cpu=True),
    Cause.OUT_OF_MEMORY: Death(activity=IDLE, code=-signal.SIGKILL, was_oom_killed=True),
    Cause.OUTSIDE: Death(activity=IDLE, code=-signal.SIGKILL),
}
TABLE = {
    Cause.FAULT: (
        Verdict.SUSPECT_STEP,
        Verdict.SUSPECT_TASK,
        Verdict.REFUSE_INPUT,
        Verdict.RESUME,
        Verdict.LOAD_ONCE_MORE,
    ),
    Cause.HANG: (
        Verdict.SUSPECT_STEP,
        Verdict.SUSPECT_TASK,
        Verdict.REFUSE_INPUT,
        Verdict.RESUME,
        Verdict.FAIL_LOAD,
    ),
    Cause.OUT_OF_MEMORY: (
        Verdict.SHRINK_LATER,
        Verdict.REFUSE_TASK_FOR_MEMORY,
        Verdict.REFUSE_TASK_FOR_MEMORY,
        Verdict.SHRINK,
        Verdict.FAIL_LOAD_FOR_MEMORY,
    ),
    Cause.OUTSIDE: (Verdict.RESUME,) * 5,
}
CELLS = [
    (cause, phase, verdict)
    for cause, verdicts in TABLE.items()
    for phase, verdict in zip(PHASES, verdicts, strict=True)
]


@pytest.mark.parametrize(("cause", "phase", "verdict"), CELLS)
def test_each_cell_of_the_table(cause: Cause, phase: DeathPhase, verdict: Verdict) -> None:
    kind, loaded = PHASES[phase]
    evidence = EVIDENCE[cause]
    death = Death(
        activity=Activity(kind, (1,), 0.0),
        loaded=loaded,
        code=evidence.code,
        was_killed_as_hung=evidence.was_killed_as_hung,
        used_cpu=evidence.used_cpu,
        was_oom_killed=evidence.was_oom_killed,
    )
    assert (death.cause, death.phase, death.verdict) == (cause, phase, verdict)


def test_the_table_is_complete() -> None:
    assert {(c, p) for c, p, _ in CELLS} == {(c, p) for c in Cause for p in DeathPhase}
    assert all(set(VERDICTS[cause]) == set(DeathPhase) for cause in Cause)


@pytest.mark.parametrize("cause", Cause)
def test_of_a_hung_process_only_the_oldest_work_is_suspect(cause: Cause) -> None:
    activity = Activity(ActivityKind.PROMPT, (7, 8, 9), 0.0, oldest=2)
    death = replace(EVIDENCE[cause], activity=activity)
    assert death.suspects == ((7, 8) if cause is Cause.HANG else (7, 8, 9))


FAULTS = ("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP", "SIGBUS")


@pytest.mark.parametrize("number", signal.valid_signals())
def test_a_signal_that_a_process_causes_itself_is_a_fault(number: signal.Signals | int) -> None:
    is_fault = isinstance(number, signal.Signals) and number.name in FAULTS
    cause = cause_of(Death(activity=IDLE, code=-number))
    assert cause is (Cause.FAULT if is_fault else Cause.OUTSIDE)


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        (Death(activity=IDLE, code=1), Cause.FAULT),
        (Death(activity=IDLE, code=0), Cause.OUTSIDE),
        (Death(activity=IDLE), Cause.OUTSIDE),
        (Death(activity=IDLE, code=0, sent_garbage=True), Cause.FAULT),
        (Death(activity=IDLE, code=-signal.SIGKILL, sent_garbage=True), Cause.FAULT),
        (Death(activity=IDLE, code=-signal.SIGBUS, files_changed=True), Cause.OUTSIDE),
        (Death(activity=IDLE, code=-signal.SIGSEGV, files_changed=True), Cause.FAULT),
        (Death(activity=IDLE, code=-signal.SIGSEGV, was_oom_killed=True), Cause.FAULT),
        (Death(activity=IDLE, code=-signal.SIGKILL, was_killed_as_hung=True), Cause.OUTSIDE),
        (Death(activity=IDLE, code=-signal.SIGSEGV, was_killed_as_hung=True), Cause.FAULT),
        (Death(activity=IDLE, code=-signal.SIGTERM, was_oom_killed=True), Cause.OUTSIDE),
    ],
)
def test_evidence_that_stands_for_another_cause(death: Death, cause: Cause) -> None:
    assert cause_of(death) is cause
