"""Requests of all users start in turn, a few in each iteration of the loop."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from inferd.ipc.server.fairness import STARTS_MAX, WITHOUT_TASK, FairStarts, LoopTime

pytestmark = pytest.mark.asyncio
ADA, BOB, EVE = 1, 2, 3


class Starts:
    """Requests that wait for their turn, and the users whose requests have started, in order."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self._starts = FairStarts(LoopTime())

    async def request(self, uid: int) -> None:
        await self._starts.wait_start(uid)
        self.order.append(uid)

    def add(self, uid: int, count: int = 1) -> list[asyncio.Task[None]]:
        return [asyncio.ensure_future(self.request(uid)) for _ in range(count)]


async def test_a_request_alone_starts_at_once() -> None:
    starts = Starts()
    await starts.request(ADA)
    assert starts.order == [ADA]


async def test_a_request_starts_before_those_that_another_user_sent_earlier() -> None:
    starts = Starts()
    flood = starts.add(ADA, 256)
    await asyncio.sleep(0)
    [bob, eve] = [*starts.add(BOB), *starts.add(EVE)]
    await asyncio.gather(bob, eve)
    assert len(starts.order) <= 4 * STARTS_MAX
    await asyncio.gather(*flood)
    assert starts.order.count(ADA) == 256 and len(starts.order) == 258


async def test_an_iteration_starts_a_bounded_number_of_requests() -> None:
    starts = Starts()
    flood = starts.add(ADA, 10 * STARTS_MAX)
    counts = [0]
    while counts[-1] < len(flood):
        await asyncio.sleep(0)
        counts.append(len(starts.order))
    # A turn is given in one iteration and used in the next.
    assert max(b - a for a, b in pairwise(counts)) <= 2 * STARTS_MAX


async def test_requests_without_a_task_count_as_parts_of_those_that_start() -> None:
    starts = FairStarts(LoopTime())
    count = round(STARTS_MAX / WITHOUT_TASK)
    for _ in range(count):
        assert starts.may_start(ADA)
        starts.count_start(WITHOUT_TASK)
    assert not starts.may_start(ADA)
    await asyncio.sleep(0)
    assert starts.try_start(ADA)


async def test_a_request_that_cancels_precedes_the_others_of_its_user() -> None:
    starts = FairStarts(LoopTime())
    order: list[int] = []

    async def request(number: int, *, is_first: bool = False) -> None:
        await starts.wait_start(ADA, is_first=is_first)
        order.append(number)

    flood = [asyncio.ensure_future(request(number)) for number in range(10 * STARTS_MAX)]
    await asyncio.sleep(0)
    await request(-1, is_first=True)
    assert len(order) <= 2 * STARTS_MAX and order.index(-1) <= STARTS_MAX
    await asyncio.gather(*flood)


async def test_cancelled_requests_take_no_turn() -> None:
    starts = Starts()
    flood = starts.add(ADA, 100 * STARTS_MAX)
    await asyncio.sleep(0)
    for task in flood[STARTS_MAX:]:
        task.cancel()
    [bob] = starts.add(BOB)
    await bob
    await asyncio.gather(*flood, return_exceptions=True)
    assert starts.order == [ADA] * STARTS_MAX + [BOB]
    await starts.request(ADA)
