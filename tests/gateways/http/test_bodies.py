"""The memory for long bodies of requests."""

from __future__ import annotations

import anyio
import pytest

from inferd.backends.errors import Busy
from inferd.gateways.http.bodies import BodyMemory

pytestmark = pytest.mark.asyncio


async def test_requests_get_memory_in_their_order() -> None:
    memory, got = BodyMemory(100), []

    async def want(caller: str, size: int) -> None:
        await memory.take(caller, size, 60)
        got.append(size)

    async with anyio.create_task_group() as group:
        await memory.take("", 70, 60)
        for size in (40, 20, 30):
            group.start_soon(want, "", size)
        await anyio.wait_all_tasks_blocked()
        assert got == [], "the small one does not overtake the first"
        memory.give_back("", 70)
        await anyio.wait_all_tasks_blocked()
        assert got == [40, 20, 30] and memory.held_bytes == 90


async def test_a_caller_with_a_key_leaves_half_to_others() -> None:
    memory = BodyMemory(100)
    await memory.take("ada", 50, 60)
    with pytest.raises(Busy):
        await memory.take("ada", 1, 0)
    await memory.take("bob", 50, 60)
    assert memory.held_bytes == 100
    memory.give_back("ada", 50)
    memory.give_back("bob", 50)
    assert memory.held_bytes == 0


async def test_a_caller_that_has_its_part_does_not_hold_up_others() -> None:
    memory = BodyMemory(100)
    await memory.take("ada", 50, 60)
    async with anyio.create_task_group() as group:
        group.start_soon(memory.take, "ada", 10, 60)
        await anyio.wait_all_tasks_blocked()
        await memory.take("bob", 10, 60)
        assert memory.held_bytes == 60
        memory.give_back("ada", 50)
    assert memory.held_bytes == 20


async def test_a_request_larger_than_its_part_takes_all_of_it() -> None:
    memory = BodyMemory(100)
    await memory.take("ada", 80, 60)
    assert memory.held_bytes == 50
    memory.give_back("ada", 80)
    assert memory.held_bytes == 0


async def test_a_request_that_stops_waiting_leaves_nothing() -> None:
    memory = BodyMemory(100)
    await memory.take("", 100, 60)
    with pytest.raises(Busy, match="memory"):
        await memory.take("", 1, 0)
    async with anyio.create_task_group() as group:
        group.start_soon(memory.take, "", 60, 60)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    memory.give_back("", 100)
    assert memory.held_bytes == 0, "nothing was granted to the cancelled one"
    await memory.take("", 100, 60)


async def test_free_memory_is_granted_to_a_request_that_does_not_wait() -> None:
    memory = BodyMemory(100)
    await memory.take("", 60, 0)
    with pytest.raises(Busy):
        await memory.take("", 60, 0)
    await memory.take("", 40, 0)
    assert memory.held_bytes == 100


async def test_a_body_that_is_shorter_than_it_could_be_gives_memory_back() -> None:
    memory = BodyMemory(100)
    await memory.take("", 90, 60)
    memory.shrink("", 90, 20)
    await memory.take("", 80, 60)
    assert memory.held_bytes == 100
    memory.give_back("", 20)
    assert memory.held_bytes == 80
