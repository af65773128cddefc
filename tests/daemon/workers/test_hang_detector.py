"""The evidence of a hang: a worker that computes uses CPU time, a stopped one does not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from inferd.daemon.workers.process import CHECKS, HangDetector, cpu_seconds, stands_still, usage_of
from inferd.scheduler.record import ActivityKind, Recorder

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


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("signs", "checks"),
    [
        ([1] * 9, CHECKS + 1),
        ([1, 2, 3, 4, 5, *[6] * 9], CHECKS + 6),
        ([*[None] * 9, *[1] * 9], CHECKS + 10),
    ],
)
async def test_signs_that_stay_the_same_end_the_wait(signs: list[int | None], checks: int) -> None:
    left: Iterator[int | None] = iter(signs)
    assert await stands_still(anyio.Event(), HANG_S, lambda: next(left))
    assert len(list(left)) == len(signs) - checks


@pytest.mark.asyncio
async def test_a_load_that_ends_does_not_stand_still() -> None:
    ended = anyio.Event()
    ended.set()
    assert not await stands_still(ended, HANG_S, lambda: 1)


def test_the_usage_of_a_process_changes_with_the_files_that_it_reads() -> None:
    assert usage_of(1 << 22) == (), "there is no such process"
    before = usage_of(os.getpid())
    assert Path(__file__).read_bytes()
    assert len(before) == 2 and usage_of(os.getpid()) != before
