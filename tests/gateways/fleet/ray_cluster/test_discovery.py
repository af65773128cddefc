"""Discovery over failures of its child process, of which a double behaves as each test needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from inferd.gateways.fleet.link import NodeAddress
from inferd.gateways.fleet.ray_cluster import discovery
from inferd.gateways.fleet.ray_cluster import published as reporting_child
from inferd.gateways.fleet.ray_cluster.published import KnownNode, KnownNodes, PublishedFile

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[4]


class Recorder:
    """The tables and notes of a discovery."""

    def __init__(self) -> None:
        self.tables: list[dict[str, str | None]] = []
        self.notes: list[str] = []
        self.answers = [False]
        """Whether Ray answered at the begin and at the end."""
        self.news = anyio.Event()

    def publish(self, addresses: Mapping[str, NodeAddress | None]) -> None:
        table = {name: str(found) if found else None for name, found in addresses.items()}
        self.tables.append(table)
        self.news.set()

    async def wait_settled(self) -> None:
        """Every node is settled."""

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.news.set()

    async def until(self, text: str) -> None:
        """Wait until a note or a table has *text*."""
        while text not in f"{self.notes} {self.tables}":
            self.news = anyio.Event()
            with anyio.fail_after(60):
                await self.news.wait()


@pytest.fixture(autouse=True)
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "CHILD_MODULE", "tests.gateways.fleet.ray_cluster.ray_child")
    monkeypatch.setattr(reporting_child, "RETRY_S_MIN", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def follow(behaviour: str, folder: Path, text: str, known: KnownNodes) -> Recorder:
    recorder = Recorder()
    PublishedFile(folder).write(known)
    nodes: Any = recorder
    found = discovery.Discovery(f"{behaviour}:{folder}", folder, nodes, recorder.note)
    found.open()
    recorder.answers = [found.answers]
    async with anyio.create_task_group() as group:
        await group.start(found.run)
        await recorder.until(text)
        recorder.answers.append(found.answers)
        group.cancel_scope.cancel()
    return recorder


KNOWN = {"z": KnownNode("10.0.0.9:7878", "first")}


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [
        ("error", "the head is lost"),
        ("long", "its report is too long"),
        ("garbled", "Expected `object | null`"),
        ("invalid", "'10.0.0.2' is not an address"),
        ("silent", "no report within 0.5 s"),
    ],
)
def test_the_last_table_stays_when_the_child_fails(
    behaviour: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if behaviour == "silent":
        monkeypatch.setattr(discovery, "FIRST_S_MAX", 0.5)
    recorder = anyio.run(follow, behaviour, tmp_path, cause, KNOWN)
    assert recorder.tables == [{"z": "10.0.0.9:7878"}]
    assert "the fleet goes on with the 1 nodes" in recorder.notes[0]
    assert PublishedFile(tmp_path).read() == KNOWN
    assert recorder.answers == [False, False]


def test_a_child_is_started_again_and_a_new_head_adds_nodes(tmp_path: Path) -> None:
    recorder = anyio.run(follow, "restarts", tmp_path, "answers at", {})
    a, b = "10.0.0.2:7878", "10.0.0.3:7878"
    assert recorder.tables == [{}, {"a": a, "b": None}, {"a": a, "b": b}]
    assert "its child process has ended" in recorder.notes[0]
    assert recorder.answers == [False, True]
    assert PublishedFile(tmp_path).read() == {
        "a": KnownNode(a, "first"),
        "b": KnownNode(b, "second"),
    }
    assert (tmp_path / "starts").read_text() == ".."
