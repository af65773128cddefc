"""The choice of a node by the memory that its daemon has for a load."""

from __future__ import annotations

from pathlib import Path

from inferd import Client
from inferd.testing import running_daemon
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

CONFIG = "[daemon]\nmemory_bytes = 100_000\n"
CONFIG += echo_model("big", weight_bytes=80_000, slots=1)
CONFIG += echo_model("other", weight_bytes=30_000, slots=1)


def loads_of(fleet: RunningFleet, node: str, model: str) -> int:
    """Return how many loads of a model a node has begun."""
    lines = fleet.daemons[node].log.splitlines()
    return sum("model.loading" in line and f"model={model}" in line for line in lines)


def free_bytes(fleet: RunningFleet, client: Client, node: str) -> int | None:
    """Return the memory for loads that a node has reported."""
    found: int | None = client.stats()["nodes"][node]["free_bytes"]
    return found


def test_a_node_without_memory_is_passed_over(tmp_path: Path) -> None:
    with running_fleet(tmp_path, CONFIG, "a", "b") as fleet, Client(fleet.socket) as client:
        with Client(fleet.daemons["a"].socket) as direct:
            with direct.session("big") as session:
                session.chat("the daemon knows its memory from now on")
            direct.pin("other")
            direct.unload(direct.load_by_name("other"), keep=True)
        wait_until(lambda: free_bytes(fleet, client, "a") == 70_000)
        before = loads_of(fleet, "a", "big")
        for _ in range(3):
            with client.session("big") as session:
                assert session.chat("hello") == "hello"
                assert [one["node"] for one in client.sessions()] == ["b"]
            client.unload_model("big", force=True)
        assert loads_of(fleet, "a", "big") == before, "the node was not even tried"
        with Client(fleet.daemons["a"].socket) as direct:
            direct.unpin("other")
            [big] = [model for model in direct.models() if model["name"] == "big"]
            assert big["need_bytes"] == 80_000
            assert direct.stats()["memory"]["load_evictable_bytes"] == 30_000


def test_the_need_of_a_file_is_known_before_its_first_load(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    file = write_tiny("llama", models)
    with running_daemon(models_dir=models) as daemon, Client(daemon.socket) as client:

        def need_bytes() -> int | None:
            [found] = [model for model in client.models() if model["name"] == file.stem]
            return found["need_bytes"]

        assert wait_until(need_bytes) > file.stat().st_size
