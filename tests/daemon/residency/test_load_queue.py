"""The order of loads: by class, users take turns, and a place is left for another user."""

from __future__ import annotations

import time

import anyio
import pytest

from inferd.daemon.residency.load_queue import (
    LOAD_BURST_S,
    LOAD_PAUSE_S,
    LOADS_MAX,
    LOADS_USER_MAX,
    LoadQueue,
    QueuedLoad,
    next_load,
)
from inferd.scheduler import Priority

ADA, BOB, CYD = 1, 2, 3


def load(owner: int | None, number: int, priority: Priority = Priority.NORMAL) -> QueuedLoad:
    return QueuedLoad(priority, owner, number)


def test_a_user_gets_some_of_the_places() -> None:
    assert next_load([load(ADA, 1)], [ADA] * (LOADS_USER_MAX - 1), {}) == load(ADA, 1)
    assert next_load([load(ADA, 1)], [ADA] * LOADS_USER_MAX, {}) is None
    assert next_load([load(ADA, 1), load(BOB, 2)], [ADA] * LOADS_USER_MAX, {}) == load(BOB, 2)
    assert next_load([load(CYD, 1)], [ADA, BOB] * LOADS_MAX, {}) is None


def test_the_higher_class_is_first_then_the_user_served_longest_ago_then_the_earlier_load() -> None:
    early, late = load(ADA, 1), load(ADA, 2)
    assert next_load([late, early], [], {}) == early
    assert next_load([early, load(BOB, 3)], [], {ADA: 5, BOB: 4}) == load(BOB, 3)
    urgent = load(ADA, 9, Priority.URGENT)
    assert next_load([load(BOB, 3), urgent], [], {ADA: 5}) == urgent


@pytest.mark.asyncio
async def test_loads_begin_as_places_are_given_up_and_a_cancelled_wait_takes_none() -> None:
    queue, begun = LoadQueue(lambda _: False, time.monotonic), list[str]()

    async def begin(name: str, owner: int) -> None:
        await queue.wait_for_place(name, Priority.NORMAL, owner)
        begun.append(name)

    async with anyio.create_task_group() as group:
        for name, owner in (("a1", ADA), ("a2", ADA), ("a3", ADA), ("a4", ADA)):
            group.start_soon(begin, name, owner)
            await anyio.wait_all_tasks_blocked()
        assert begun == ["a1", "a2"]
        with anyio.move_on_after(0.01):
            await begin("b", ADA)
        group.start_soon(begin, "b1", BOB)
        await anyio.wait_all_tasks_blocked()
        assert begun == ["a1", "a2", "b1"]
        queue.end_wait("a3")
        queue.leave("a1")
        await anyio.wait_all_tasks_blocked()
        assert begun == ["a1", "a2", "b1", "a3", "a4"], "an ended wait has no place"
        for name in ("a2", "a4", "b1"):
            queue.leave(name)
        assert not (queue._waiting or queue._loading)
        group.start_soon(begin, "c", CYD)
        await anyio.wait_all_tasks_blocked()
        assert begun[-1] == "c" and queue._served.keys() == {CYD}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.asyncio
async def test_a_user_who_has_loaded_waits_while_models_compute_for_others() -> None:
    clock, serves_others = Clock(), True
    queue = LoadQueue(lambda owner: serves_others and owner == ADA, clock)

    async def load_for(owner: int | None, seconds: float) -> bool:
        with anyio.move_on_after(0.01) as scope:
            await queue.wait_for_place("key", Priority.NORMAL, owner)
        clock.now_s += seconds
        queue.leave("key")
        return not scope.cancelled_caught

    assert await load_for(ADA, LOAD_BURST_S)
    assert await load_for(ADA, 0.3), "a burst is free"
    assert not await load_for(ADA, 0.0)
    assert await load_for(BOB, 100.0) and await load_for(BOB, 0.0), "no model computes for others"
    assert await load_for(ADA, 100.0), "she has waited for long"
    assert not await load_for(ADA, LOAD_PAUSE_S - 0.1), "the wait has a bound"
    assert not await load_for(ADA, 0.2)
    assert await load_for(ADA, 100.0)
    serves_others = False
    assert await load_for(ADA, 0.0)


@pytest.mark.asyncio
async def test_a_paused_load_begins_after_the_pause_or_when_the_turns_of_others_end() -> None:
    clock, serves_others = Clock(), True
    queue = LoadQueue(lambda _: serves_others, clock)
    for ends_by_itself in (True, False):
        await queue.wait_for_place("first", Priority.NORMAL, ADA)
        clock.now_s += 100
        queue.leave("first")
        async with anyio.create_task_group() as group:
            group.start_soon(queue.wait_for_place, "second", Priority.NORMAL, ADA)
            await anyio.wait_all_tasks_blocked()
            if ends_by_itself:
                serves_others = False
                queue.grant_places()
            else:
                clock.now_s += LOAD_PAUSE_S - 0.01
                queue.grant_places()
                clock.now_s += 0.01
        queue.leave("second")
        serves_others = True
        clock.now_s += 1000


@pytest.mark.asyncio
async def test_the_place_of_a_stuck_load_goes_to_another_user_and_stays_lost_to_its_own() -> None:
    queue, begun = LoadQueue(lambda _: False, Clock()), list[str]()

    async def begin(name: str, owner: int) -> None:
        await queue.wait_for_place(name, Priority.NORMAL, owner)
        begun.append(name)

    async with anyio.create_task_group() as group:
        for name, owner in (("a1", ADA), ("a2", ADA), ("a3", ADA), ("b1", BOB), ("c1", CYD)):
            group.start_soon(begin, name, owner)
        await anyio.wait_all_tasks_blocked()
        assert begun == ["a1", "a2", "b1"]
        queue.note_stuck("a1")
        await anyio.wait_all_tasks_blocked()
        assert begun == ["a1", "a2", "b1", "c1"]
        queue.leave("b1")
        queue.note_stuck("unknown")
        await anyio.wait_all_tasks_blocked()
        assert len(begun) == 4, "of two loads of a user, one is stuck and one has a place"
        queue.leave("a1")
        await anyio.wait_all_tasks_blocked()
        assert begun[-1] == "a3"
