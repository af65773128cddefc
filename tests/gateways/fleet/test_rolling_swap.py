"""Swaps over a fleet: node after node, no request fails, and a swap that fails is undone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from inferd import AsyncClient, Client
from inferd.backends.errors import LoadFailed, ModelNotFound
from inferd.daemon.models.swap import Mode
from inferd.ipc.messages import SwapResult
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.waiting import wait_until

CONFIG = "[daemon]\nswap_grace_s = 60\n" + echo_model("live", slots=4, step_ms=32)
NEW = echo_model("new", slots=4, step_ms=32, variant="new")
TIGHT = "[daemon]\nmemory_bytes = 100_000\nswap_grace_s = 60\n"
TIGHT += echo_model("live", slots=4, step_ms=32, weight_bytes=60_000)
TIGHT += echo_model("new", slots=4, step_ms=32, weight_bytes=50_000, variant="new")
BROKEN = '[models.new]\nfile = "no-such-file.gguf"\n'
NODES = ("a", "b", "c")
TALKS = 12
WATCH_S = 0.02
"""Between two requests of the models: a node's swap takes several times as long."""
STORY = "Once upon. "


def nodes_of(models: list[Any], name: str = "live") -> dict[str, Any]:
    """Return the entries of a model by node."""
    [found] = [model for model in models if model["name"] == name]
    return {entry["node"]: entry for entry in found["nodes"]}


async def swap_under_load(fleet: RunningFleet, mode: Mode) -> SwapResult:
    """Swap while clients open contexts and stream all the time; check every answer."""
    swapped, is_busy, turns = anyio.Event(), anyio.Event(), 0
    states: list[tuple[bool, ...]] = []

    async def talk(client: AsyncClient, number: int) -> None:
        nonlocal turns
        is_last = False
        while not is_last:
            is_last = swapped.is_set()
            async with client.session("live", raw=True) as session:
                for turn in range(2):
                    text = f"{number} {turn} {STORY}"
                    assert "".join([part async for part in session.stream(text)]) == text
                    turns += 1
                    if turns == TALKS:
                        is_busy.set()

    async def watch(client: AsyncClient) -> None:
        while not swapped.is_set():
            nodes = nodes_of(list(await client.models()))
            states.append(tuple(nodes[name]["swapped_to"] == "new" for name in NODES))
            await anyio.sleep(WATCH_S)

    async with AsyncClient(fleet.socket) as client, anyio.create_task_group() as group:
        for number in range(TALKS):
            group.start_soon(talk, client, number)
        group.start_soon(watch, client)
        await is_busy.wait()
        result = await client.swap("live", "new", mode=mode)
        swapped.set()
    rolling = [tuple(number < done for number in range(len(NODES))) for done in range(4)]
    assert states == sorted(states) and set(states) <= set(rolling), "node after node"
    assert len(set(states)) > 1
    return result


@pytest.mark.parametrize(("config", "mode"), [(CONFIG + NEW, "migrate"), (TIGHT, "drain")])
@pytest.mark.asyncio
async def test_no_request_fails_while_a_swap_rolls_over_three_nodes(
    tmp_path: Path, config: str, mode: Mode
) -> None:
    with running_fleet(tmp_path, config, *NODES) as fleet:
        await anyio.to_thread.run_sync(fleet.load, "live")
        result = await swap_under_load(fleet, mode)
        assert result.mode == mode and result.nodes == list(NODES)
        for daemon in fleet.daemons.values():
            async with AsyncClient(daemon.socket) as direct, direct.session("live") as session:
                await session.chat("hello")
                assert session.metadata["fingerprint"] == result.fingerprint


def test_a_swap_that_fails_on_a_node_is_undone_on_those_before(tmp_path: Path) -> None:
    old = echo_model("old", slots=4, variant="old")
    configs = {"a": CONFIG + NEW + old, "b": CONFIG + BROKEN + old, "c": CONFIG + NEW + old}
    with running_fleet(tmp_path, configs, *NODES) as fleet, Client(fleet.socket) as client:
        client.swap("live", "old")
        before = {name: daemon_model(fleet, name) for name in NODES}
        with client.session("live") as session:
            assert session.chat("before") == "before"
            with pytest.raises(LoadFailed) as caught:
                client.swap("live", "new")
            data = caught.value.data
            assert (data["node"], data["nodes_done"], data["nodes_undone"]) == ("b", [], ["a"])
            assert {name: daemon_model(fleet, name) for name in NODES} == before
            assert session.chat("after") == "after"


@pytest.mark.asyncio
async def test_new_contexts_prefer_nodes_that_do_not_swap_now(tmp_path: Path) -> None:
    config = CONFIG + echo_model("new", slots=4, variant="new", load_ms=3000)
    with running_fleet(tmp_path, config, "a", "b") as fleet:
        await anyio.to_thread.run_sync(fleet.load, "live")
        async with AsyncClient(fleet.socket) as client, anyio.create_task_group() as group:
            group.start_soon(client.swap, "live", "new")
            is_loading = lambda: "live (swap)" in fleet.daemons["a"].log  # noqa: E731
            await anyio.to_thread.run_sync(wait_until, is_loading)
            graph = await client.load_by_name("live")
            for _ in range(4):
                await client.init_execution_context(graph)
            assert nodes_of(list(await client.models()))["a"]["swapped_to"] == ""
            assert {session["node"] for session in await client.sessions()} == {"b"}
            group.cancel_scope.cancel()


def test_a_swap_names_the_nodes_that_keep_the_old_model(tmp_path: Path) -> None:
    with running_fleet(tmp_path, CONFIG + NEW, "a", "b") as fleet, Client(fleet.socket) as client:
        fleet.kill_relay("b")
        fleet.until_noted("node b is lost")
        result = client.swap("live", "new")
        assert (result.nodes, result.unreachable) == (["a"], ["b"])


def test_a_file_that_a_node_lacks_leaves_all_nodes_as_they_are(tmp_path: Path) -> None:
    configs = {"a": CONFIG + NEW, "b": CONFIG}
    with running_fleet(tmp_path, configs, "a", "b") as fleet, Client(fleet.socket) as client:
        with pytest.raises(ModelNotFound) as caught:
            client.swap("live", "new")
        assert caught.value.data["node"] == "b" and caught.value.data["nodes_done"] == []
        wait_until(lambda: daemon_model(fleet, "a")["swapped_to"] == "")


def daemon_model(fleet: RunningFleet, node: str) -> dict[str, Any]:
    """Return what a node's name stands for."""
    with Client(fleet.daemons[node].socket) as direct:
        [found] = [model for model in direct.models() if model["name"] == "live"]
    return {key: found[key] for key in ("swapped_to", "file", "backend")}
