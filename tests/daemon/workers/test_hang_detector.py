"""The evidence of a hang: a worker that computes uses CPU time, a stopped one does not."""

from __future__ import annotations

import os
import time

import anyio
import pytest

from inferd.daemon.workers.hang_detector import HangDetector
from inferd.daemon.workers.worker_process import cpu_seconds
from inferd.scheduler.recording.recorder import ActivityKind, Recorder

HANG_S = 0.04


@pytest.mark.asyncio
@pytest.mark.parametrize("computes", [True, False])
async def test_a_hung_worker_is_killed_with_the_evidence_of_its_cpu_time(computes: bool) -> None:
    killed = anyio.Event()
    recorder = Recorder()
    recorder.record_activity(ActivityKind.STEP, [1])
    detector = HangDetector(
        recorder,
        HANG_S,
        lambda: True,
        killed.set,
        cpu_s=time.monotonic if computes else lambda: 5.0,
    )
    detector.note_command()
    await killed.wait()
    detector.stop()
    assert detector.used_cpu == computes


def test_the_cpu_time_of_a_process() -> None:
    ends_at = time.process_time() + 0.02
    while time.process_time() < ends_at:
        pass
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.01)
    assert cpu_seconds(1 << 22) == 0.0, "there is no such process"
