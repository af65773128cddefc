"""Replicas of a model by demand: loaded where waits would exceed a load, unloaded when idle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import anyio
import pytest

from inferd import AsyncClient, Client
from inferd.gateways.fleet.routing.loads import OPENED_S
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.waiting import wait_until

IDLE = "[daemon]\nkeep-alive-s = 0.5\n"
CONFIG = IDLE + echo_model("m", slots=2, step_ms=10, load_ms=100)
SLOW = IDLE + echo_model("m", slots=1, step_ms=300, load_ms=3000)
NODES = ("a", "b", "c")
TEXT = "a text of some tokens " * 3


def loaded(client: Client) -> list[str]:
    """Return the nodes that have the model in memory."""
    nodes = client.stats()["nodes"]
    return [name for name in NODES if "m" in nodes[name]["loaded"]]


def until_unloaded(fleet: RunningFleet, count: int = 0) -> list[str]:
    """Wait until *count* nodes have the model in memory."""
    with Client(fleet.socket) as client:
        wait_until(lambda: len(loaded(client)) == count)
        return loaded(client)


async def burst(client: AsyncClient, count: int) -> Counter[str]:
    """Hold *count* sessions at once, and return how many of them each node has had."""
    nodes = Counter[str]()
    opened, listed = anyio.Semaphore(0), anyio.Event()

    async def talk() -> None:
        async with client.session("m", raw=True) as session:
            opened.release()
            assert await session.chat(TEXT) == TEXT
            await listed.wait()

    async with anyio.create_task_group() as group:
        for _ in range(count):
            group.start_soon(talk)
        for _ in range(count):
            await opened.acquire()
        nodes.update(session["node"] for session in await client.sessions())
        listed.set()
    return nodes


@pytest.mark.asyncio
async def test_a_burst_spreads_and_idle_replicas_are_unloaded(tmp_path: Path) -> None:
    with running_fleet(tmp_path, CONFIG, *NODES) as fleet:
        for _ in range(2):
            async with AsyncClient(fleet.socket) as client:
                assert len(await burst(client, 2)) == 1, "its slots are enough"
                nodes = await burst(client, 12)
                assert set(nodes) == set(NODES), nodes
            await anyio.to_thread.run_sync(until_unloaded, fleet)


@pytest.mark.asyncio
async def test_a_node_is_warmed_up_before_a_request_needs_it(tmp_path: Path) -> None:
    config = echo_model("m", slots=4, step_ms=300, load_ms=3000)
    with running_fleet(tmp_path, config, *NODES) as fleet:
        async with AsyncClient(fleet.socket) as client, anyio.create_task_group() as group:
            graph = await client.load_by_name("m")
            for _ in range(2):
                context = await client.init_execution_context(graph)
                group.start_soon(client.run_inference, context, TEXT)
            await anyio.to_thread.run_sync(until_running, fleet, 2)
            await client.init_execution_context(graph)
            nodes = {session["node"] for session in await client.sessions()}
            assert len(nodes) == 1, "no context has waited for a load"
            assert len(await anyio.to_thread.run_sync(until_unloaded, fleet, 2)) == 2
            await client.init_execution_context(graph)
            assert len({session["node"] for session in await client.sessions()}) == 2
            group.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_a_graph_keeps_the_model_on_one_node_only(tmp_path: Path) -> None:
    with running_fleet(tmp_path, CONFIG, *NODES) as fleet:
        async with AsyncClient(fleet.socket) as client:
            graph = await client.load_by_name("m")
            contexts = [await client.init_execution_context(graph) for _ in range(9)]
            assert {session["node"] for session in await client.sessions()} == set(NODES)
            for context in contexts:
                await client.finalize_execution_context(context)
            [left] = await anyio.to_thread.run_sync(until_unloaded, fleet, 1)
            context = await client.init_execution_context(graph)
            assert [session["node"] for session in await client.sessions()] == [left]
            await client.finalize_execution_context(context)
            await client.unload(graph)
        await anyio.to_thread.run_sync(until_unloaded, fleet)


@pytest.mark.asyncio
async def test_a_context_that_waits_for_a_load_counts_as_long_as_it_takes(tmp_path: Path) -> None:
    """It counts longer than a context that is open and has no turn."""
    with running_fleet(tmp_path, SLOW, *NODES) as fleet:
        async with AsyncClient(fleet.socket) as client, anyio.create_task_group() as group:
            graph = await client.load_by_name("m")
            busy = await client.init_execution_context(graph)
            group.start_soon(client.run_inference, busy, TEXT)
            await anyio.to_thread.run_sync(until_running, fleet)
            group.start_soon(client.init_execution_context, graph)
            await anyio.sleep(2 * OPENED_S)
            await client.init_execution_context(graph)
            assert {found["node"] for found in await client.sessions()} == set(NODES)
            group.cancel_scope.cancel()


def until_running(fleet: RunningFleet, count: int = 1) -> None:
    """Wait until a node has reported *count* turns."""
    with Client(fleet.socket) as client:
        wait_until(lambda: any(n["running"] == count for n in client.stats()["nodes"].values()))
