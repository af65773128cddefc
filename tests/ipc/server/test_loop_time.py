"""A user's requests take a bounded part of the loop's time while other users have requests."""

from __future__ import annotations

import asyncio
import time

import pytest

from inferd.ipc.server.fairness import (
    BEGIN_S,
    BURST_S,
    LONG_STEP_S,
    LONGEST_PAUSE_S,
    LOOP_SHARE,
    READING_SHARE,
    REMEMBERED_USERS,
    FairStarts,
    LoopTime,
    TimeShares,
)

ADA, BOB = 1, 2


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop_time(clock: Clock) -> LoopTime:
    """Loop time with a request of each user in flight."""
    loop_time = LoopTime(clock)
    loop_time.add_requests(ADA, 1)
    loop_time.add_requests(BOB, 1)
    return loop_time


def test_a_burst_is_free_and_more_has_to_be_repaid(loop_time: LoopTime, clock: Clock) -> None:
    loop_time.charge(ADA, BURST_S)
    assert loop_time.pause_s(ADA) == 0
    loop_time.charge(ADA, 0.02)
    assert loop_time.pause_s(ADA) == pytest.approx(0.02 / LOOP_SHARE)
    assert loop_time.pause_s(BOB) == 0
    clock.now_s += 0.02 / LOOP_SHARE
    assert loop_time.pause_s(ADA) == 0


def test_reading_waits_for_reading_only_and_is_a_part_of_all_requests(
    loop_time: LoopTime, clock: Clock
) -> None:
    loop_time.charge(ADA, 10.0)
    assert loop_time.pause_s(ADA) == LONGEST_PAUSE_S and loop_time.reading_pause_s(ADA) == 0
    clock.now_s += 100
    begin_s, read_s = clock.now_s, 0.0
    while clock.now_s < begin_s + 60:
        loop_time.charge_reading(ADA, 0.007)
        read_s += 0.007
        clock.now_s += 0.007 + loop_time.reading_pause_s(ADA)
    assert read_s == pytest.approx(60 * READING_SHARE, rel=0.02, abs=BURST_S)
    assert loop_time.pause_s(ADA) == 0, "a half is left for running them"


def test_over_a_long_time_a_user_gets_the_share(loop_time: LoopTime, clock: Clock) -> None:
    begin_s, taken_s = clock.now_s, 0.0
    while clock.now_s < begin_s + 60:
        loop_time.charge(ADA, 0.007)
        taken_s += 0.007
        clock.now_s += 0.007 + loop_time.pause_s(ADA)
    assert taken_s == pytest.approx(60 * LOOP_SHARE, rel=0.02, abs=BURST_S)


def test_without_requests_of_others_no_request_waits(clock: Clock) -> None:
    loop_time = LoopTime(clock)
    loop_time.add_requests(ADA, 3)
    loop_time.charge(ADA, 100.0)
    assert loop_time.pause_s(ADA) == 0
    loop_time.add_requests(BOB, 1)
    assert loop_time.pause_s(ADA) == LONGEST_PAUSE_S
    loop_time.add_requests(BOB, -1)
    assert loop_time.pause_s(ADA) == 0


def test_users_who_have_repaid_are_forgotten(clock: Clock) -> None:
    shares = TimeShares(0.1, 0.05, 2.0, clock)
    for uid in range(10, 10 + REMEMBERED_USERS):
        shares.charge(uid, 0.0)
    clock.now_s += 60
    shares.charge(ADA, 1.0)
    assert len(shares._repaid_at_s) == 1


@pytest.mark.asyncio
async def test_the_first_milliseconds_and_long_steps_count(loop_time: LoopTime) -> None:
    async def call() -> str:
        loop_time.charge(ADA, BURST_S)
        for _ in range(200):
            _use_cpu(LONG_STEP_S / 5)
            await asyncio.sleep(0)
        _use_cpu(0.03)
        await asyncio.sleep(0)
        return "done"

    assert await loop_time.run_counted(ADA, call()) == "done"
    assert LOOP_SHARE * loop_time.pause_s(ADA) == pytest.approx(BEGIN_S + 0.03, abs=0.01)


@pytest.mark.asyncio
async def test_exceptions_and_cancellations_reach_the_counted_call(loop_time: LoopTime) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await loop_time.run_counted(ADA, fail())

    was_cancelled = False

    async def wait() -> None:
        nonlocal was_cancelled
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    async def run() -> None:
        await loop_time.run_counted(ADA, wait())

    task = asyncio.ensure_future(run())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert was_cancelled


@pytest.mark.asyncio
async def test_requests_of_a_paused_user_start_after_the_pause() -> None:
    loop_time = LoopTime()
    loop_time.add_requests(ADA, 1)
    loop_time.add_requests(BOB, 1)
    starts = FairStarts(loop_time)
    began_s = time.monotonic()
    loop_time.charge(ADA, BURST_S + LOOP_SHARE * 0.1)
    waiting = asyncio.ensure_future(starts.wait_start(ADA))
    await starts.wait_start(BOB)
    assert not waiting.done()
    await waiting
    assert time.monotonic() - began_s >= 0.09


def _use_cpu(seconds: float) -> None:
    ends_at_s = time.thread_time() + seconds
    while time.thread_time() < ends_at_s:
        pass
