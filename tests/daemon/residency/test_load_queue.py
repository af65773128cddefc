"""The order of loads: by class, users take turns, and a place is left for another user."""

from __future__ import annotations

import anyio
import pytest

from inferd.daemon.residency.load_queue import (
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
    queue, begun = LoadQueue(), list[str]()

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
