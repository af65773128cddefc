"""The command of a node over failures of its child, of which a double behaves as a test needs."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from inferd.gateways.fleet.ray_cluster import node as ray_node
from inferd.gateways.fleet.ray_cluster import published as reporting_child
from inferd.gateways.fleet.ray_cluster.supervisor import NodePlan

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[4]
SERVES = "node a serves entries on 10.0.0.2:7878, supervised by Ray"


@pytest.fixture(autouse=True)
def child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ray_node, "CHILD_MODULE", "tests.gateways.fleet.ray_cluster.deploying_child"
    )
    monkeypatch.setattr(reporting_child, "RETRY_S_MIN", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


async def notes_of(behaviour: str, folder: Path, count: int) -> list[str]:
    """Run a node until it has printed *count* lines."""
    send, receive = anyio.create_memory_object_stream[str](100)
    plan = NodePlan("10.0.0.2:7878", {}, {})
    node = ray_node.RayNode("a", behaviour, plan, folder, send.send_nowait)
    with send, receive, anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(node.run)
            notes = [await receive.receive() for _ in range(count)]
            group.cancel_scope.cancel()
    return notes


def failure(cause: str) -> str:
    return f"Ray does not supervise node a: {cause}; trying again"


@pytest.mark.parametrize(
    ("behaviour", "cause"),
    [("ends", "its child process has ended"), ("silent", "no report within 0.2 s")],
)
def test_a_child_that_fails_is_noted_and_replaced(
    behaviour: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if behaviour == "silent":
        monkeypatch.setattr(ray_node, "SILENT_S_MAX", 0.2)
    notes = anyio.run(notes_of, behaviour, tmp_path, 4)
    assert notes == [SERVES, failure(cause)] * 2


def test_the_cause_that_a_child_reports_is_noted(tmp_path: Path) -> None:
    assert anyio.run(notes_of, "error", tmp_path, 1) == [failure("a is missing")]
