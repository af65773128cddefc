"""Bounds of a fleet's scrape: time, nodes at once, sizes, and one scrape for all who wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from inferd.backends.errors import BackendError, InferdError, UnsupportedOperation
from inferd.gateways.fleet.copies.copies import Copies
from inferd.gateways.fleet.entry.clients.client import FleetClient
from inferd.gateways.fleet.entry.config import read_config
from inferd.gateways.fleet.entry.nodes.nodes import Nodes
from inferd.gateways.fleet.metrics import scrape as module
from inferd.gateways.fleet.metrics.scrape import FleetMetrics
from inferd.gateways.fleet.routing.loads import NodeLoad
from tests.daemon.metrics.scraping import ScrapedMetrics
from tests.gateways.fleet.members import certificates

TEXT = "# TYPE inferd_cores gauge\ninferd_cores 2\n"
pytestmark = [pytest.mark.asyncio, pytest.mark.process]
Answer = Callable[[str], Awaitable[str]]


class Moves:
    under_way = interrupted = 0


class Operator:
    """The client of the entry on nodes that answer as *answer* does."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self.node = ""

    def upstream(self, node: str) -> Operator:
        found = Operator(self._answer)
        found.node = node
        return found

    async def call(self, call: str, params: dict[str, Any]) -> msgspec.Raw:
        assert (call, params) == ("metrics", {})
        return msgspec.Raw(msgspec.msgpack.encode({"text": await self._answer(self.node)}))


class Entry:
    """An entry whose nodes have reported, but without connections."""

    clients: Collection[FleetClient] = ()
    moves = Moves()
    connections, connections_max, is_stopping, ray_answers = 0, 8, False, None

    def __init__(self, folder: Path, answer: Answer, *nodes: str):
        certificates(folder / "keys")
        lines = [f'[nodes.{name}]\naddress = "127.0.0.1:1"\n' for name in nodes]
        file = folder / "fleet.toml"
        file.write_text('certificates = "keys"\nstate-dir = "state"\n' + "".join(lines))
        self.nodes = Nodes(read_config(file), lambda _: None, lambda _: None)
        for link in self.nodes.links.values():
            link.load = NodeLoad(instance=1)
        self.operator: Any = Operator(answer)
        fleet: Any = self
        self.copies = Copies(fleet, "sync", 10.0, folder, lambda _: None)


async def scraped(entry: Entry) -> ScrapedMetrics:
    metrics = FleetMetrics(entry)
    async with anyio.create_task_group() as group:
        await group.start(metrics.run)
        text = await metrics.text()
        group.cancel_scope.cancel()
    return ScrapedMetrics(text.decode())


def up(found: ScrapedMetrics, *nodes: str) -> list[float]:
    return [found("fleet_node_up", node=node) for node in nodes]


async def test_nodes_that_never_answer_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NODE_S_MAX", 0.05)

    async def answer(node: str) -> str:
        if node == "b":
            await anyio.sleep_forever()
        return TEXT

    assert up(await scraped(Entry(tmp_path, answer, "a", "b")), "a", "b") == [1, 0]


async def test_all_nodes_together_have_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NODES_S_MAX", 0.05)
    monkeypatch.setattr(module, "NODE_S_MAX", 1000.0)
    monkeypatch.setattr(module, "NODES_AT_ONCE", 1)

    async def answer(node: str) -> str:
        if node != "a":
            await anyio.sleep_forever()
        return TEXT

    assert up(await scraped(Entry(tmp_path, answer, "a", "b", "c")), *"abc") == [1, 0, 0]


async def test_only_so_many_nodes_are_asked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NODES_AT_ONCE", 2)
    now, most = 0, 0

    async def answer(node: str) -> str:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.lowlevel.checkpoint()
        now -= 1
        return TEXT

    names = [f"n{number}" for number in range(5)]
    assert up(await scraped(Entry(tmp_path, answer, *names)), *names) == [1.0] * 5
    assert most == 2


async def test_texts_beyond_the_size_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TEXTS_SIZE_MAX", 2 * len(TEXT))

    async def answer(node: str) -> str:
        return TEXT

    found = await scraped(Entry(tmp_path, answer, "a", "b", "c"))
    assert sum(up(found, "a", "b", "c")) == 2


@pytest.mark.parametrize("error", [UnsupportedOperation("an old node"), BackendError("a bug")])
async def test_a_node_that_fails_is_left_out(tmp_path: Path, error: InferdError) -> None:
    async def answer(node: str) -> str:
        if node == "b":
            raise error
        return TEXT

    assert up(await scraped(Entry(tmp_path, answer, "a", "b")), "a", "b") == [1, 0]


async def test_all_who_wait_get_one_scrape_also_if_the_first_leaves(tmp_path: Path) -> None:
    asked, release = [], anyio.Event()

    async def answer(node: str) -> str:
        asked.append(node)
        await release.wait()
        return TEXT

    metrics, texts = FleetMetrics(Entry(tmp_path, answer, "a")), []

    async def wait() -> None:
        texts.append(await metrics.text())

    async with anyio.create_task_group() as group:
        await group.start(metrics.run)
        with anyio.move_on_after(0):
            await metrics.text()
        async with anyio.create_task_group() as waiting:
            for _ in range(3):
                waiting.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            release.set()
        assert asked == ["a"] and len(texts) == 3 and len(set(texts)) == 1
        await metrics.text()
        assert asked == ["a", "a"], "a later one asks again"
        group.cancel_scope.cancel()


async def test_a_child_that_takes_too_long_is_an_error_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHILD_S_MAX", 0.0)

    async def answer(node: str) -> str:
        return TEXT

    entry = Entry(tmp_path, answer, "a")
    metrics = FleetMetrics(entry)
    async with anyio.create_task_group() as group:
        await group.start(metrics.run)
        with pytest.raises(BackendError, match="not ended within 0 s"):
            await metrics.text()
        monkeypatch.setattr(module, "CHILD_S_MAX", 20.0)
        assert up(ScrapedMetrics((await metrics.text()).decode()), "a") == [1]
        group.cancel_scope.cancel()
