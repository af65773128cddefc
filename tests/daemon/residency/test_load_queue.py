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


async def place(queue: LoadQueue, key: str, owner: int | None) -> None:
    queue.request_place(key, Priority.NORMAL, owner)
    await queue.wait_for_place(key)


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
        await place(queue, name, owner)
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
            await place(queue, "key", owner)
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
        await place(queue, "first", ADA)
        clock.now_s += 100
        queue.leave("first")
        async with anyio.create_task_group() as group:
            group.start_soon(place, queue, "second", ADA)
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
        await place(queue, name, owner)
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


@pytest.mark.asyncio
async def test_a_load_that_waited_for_memory_needs_a_place_in_the_order_of_all_loads() -> None:
    queue = LoadQueue(lambda _: False, Clock())
    for key, owner in (("a", ADA), ("b", BOB), ("c", CYD)):
        queue.request_place(key, Priority.NORMAL, owner)
        assert queue.has_place(key)
    queue.suspend("a")
    assert not queue.has_place("a") and queue.claim_place("a"), "its place is free"
    queue.suspend("a")
    queue.request_place("d", Priority.NORMAL, 4)
    queue.request_place("e", Priority.NORMAL, 5)
    assert queue.has_place("d") and not queue.has_place("e")
    assert not queue.claim_place("a") and not queue.claim_place("a")
    queue.leave("d")
    assert queue.has_place("a") and not queue.has_place("e"), "it came before"
    queue.suspend("a")
    assert queue.has_place("e")
    queue.leave("a")
    queue.leave("b")
    assert not (queue.claim_place("a") or queue._waiting or queue._suspended)


@pytest.mark.asyncio
async def test_a_load_that_is_suspended_while_it_waits_for_a_place_ends_its_wait() -> None:
    queue = LoadQueue(lambda _: False, Clock())
    for key, owner in (("a", ADA), ("b", BOB), ("c", CYD), ("d", 4)):
        queue.request_place(key, Priority.NORMAL, owner)
    async with anyio.create_task_group() as group:
        group.start_soon(queue.wait_for_place, "d")
        await anyio.wait_all_tasks_blocked()
        queue.suspend("d")
    assert not queue.has_place("d")


@pytest.mark.asyncio
async def test_a_user_who_has_just_loaded_waits_also_after_a_wait_for_memory() -> None:
    clock, serves_others = Clock(), True
    queue = LoadQueue(lambda _: serves_others, clock)
    for key in ("a", "b"):
        queue.request_place(key, Priority.NORMAL, ADA)
    queue.suspend("b")
    clock.now_s += 100
    queue.leave("a")
    assert queue.is_paused("b") and not queue.claim_place("b") and queue.is_paused("b")
    serves_others = False
    assert not queue.is_paused("b") and queue.claim_place("b") and not queue.is_paused("b")
    queue.leave("b")
