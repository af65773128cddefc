"""The reason for which a waiting or parked task has no slot: a pure function."""

from __future__ import annotations

from ..policy.slot_plan import reader_lags
from ..recording.engine_metrics import WaitReason
from ..settings import EngineSettings
from ..task import Task

__all__ = ("wait_reason",)


def wait_reason(task: Task, settings: EngineSettings, now: float, clock: int) -> WaitReason:
    """Return why *task* has no slot at *now*, when the token clock is at *clock*."""
    if task.preparing:
        return WaitReason.GRAMMAR
    if task.fetching:
        return WaitReason.DISK
    if not (task.has_work or task.wants_token) or reader_lags(task, settings, now):
        return WaitReason.READER
    if task.preempted_by_kv_pressure:
        return WaitReason.CELLS
    if task.follows:
        return WaitReason.PREFIX
    return WaitReason.OPERATOR if task.yields(clock) else WaitReason.SLOT
