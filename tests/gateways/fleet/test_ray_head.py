"""The loss of the head of a Ray cluster under load, and its return, with its state or without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inferd import AsyncClient
from tests.echo import echo_model
from tests.gateways.fleet.ray_members import RAY_S_MAX, RayFleet, RayHead, nodes_of
from tests.gateways.fleet.test_audit import check_histories
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself has many
NAMES = ("a", "b")
SESSIONS = 40
CONFIG = echo_model("slow", step_ms=20, slots=8)
PLAIN = {"RAY_AUTH_MODE": "disabled"}


@contextmanager
def running_fleet(folder: Path, environment: dict[str, str]) -> Iterator[RayFleet]:
    """Run a head and a fleet of two nodes until the end of the block."""
    head = RayHead()
    try:
        head.start(environment)
        fleet = RayFleet(folder, CONFIG, head, NAMES)
        try:
            for name in NAMES:
                fleet.start_node(name)
            fleet.start_entry(f'ray = "{head.address}"\n')
            for name in NAMES:
                fleet.until_deployed(name)
            wait_until(lambda: nodes_of(fleet) == dict.fromkeys(NAMES, True), RAY_S_MAX)
            yield fleet
        finally:
            fleet.close()
    finally:
        head.close()


class Load:
    """Conversations until `end`, with the acknowledged turns of each."""

    def __init__(self, socket: str):
        self._socket = socket
        self.turns: list[list[str]] = [[] for _ in range(SESSIONS)]
        self.end = asyncio.Event()

    async def hold_conversations(self) -> None:
        """Converse until `end`."""
        async with AsyncClient(self._socket) as client, asyncio.TaskGroup() as group:
            for number, turns in enumerate(self.turns):
                group.create_task(self._converse(client, number, turns))

    async def _converse(self, client: AsyncClient, number: int, turns: list[str]) -> None:
        async with client.session("slow", session_id=f"audit-{number}", resume=True) as session:
            while not self.end.is_set():
                text = f"turn {len(turns)} of {number} "
                assert str(await session.chat(text)) == text
                turns.append(text)

    async def go_on(self) -> None:
        """Wait until each conversation has had another turn."""
        before = [len(turns) for turns in self.turns]
        await asyncio.to_thread(
            wait_until,
            lambda: all(len(t) > n for t, n in zip(self.turns, before, strict=True)),
            RAY_S_MAX,
        )


def processes_of(fleet: RayFleet, member: str) -> list[int | None]:
    """Return the daemons or the relays of all nodes."""
    return [fleet.process_of(name, member) for name in NAMES]


def replicas_of(fleet: RayFleet) -> list[int | None]:
    """Return the replicas of all nodes."""
    return [fleet.replica_of(name) for name in NAMES]


async def lose_head(fleet: RayFleet, environment: dict[str, str], *, has_state: bool) -> None:
    """Kill the head under load, start it again, and then lose a daemon of each node."""
    load = Load(fleet.socket)
    daemons, relays = processes_of(fleet, "daemon"), processes_of(fleet, "relay")
    replicas = replicas_of(fleet)
    async with asyncio.TaskGroup() as group:
        group.create_task(load.hold_conversations())
        await load.go_on()
        fleet.cluster.kill()
        await asyncio.to_thread(fleet.until_noted, "the fleet goes on with the 2 nodes")
        for name in NAMES:
            await asyncio.to_thread(fleet.until_printed, name, "Ray does not supervise")
        await load.go_on()
        await asyncio.to_thread(fleet.cluster.start, environment)
        for name in NAMES:
            await asyncio.to_thread(fleet.until_deployed, name)
        await load.go_on()
        assert processes_of(fleet, "daemon") == daemons, "the return ends none"
        assert (replicas_of(fleet) == replicas) is has_state
        for name in NAMES:
            await asyncio.to_thread(fleet.kill_member, name, "daemon")
            await load.go_on()
        load.end.set()
    assert nodes_of(fleet) == dict.fromkeys(NAMES, True)
    assert processes_of(fleet, "relay") == relays
    await check_histories(fleet.socket, load.turns)


@pytest.mark.timeout(300)
def test_nodes_join_a_head_that_begins_anew_and_no_turn_is_lost(tmp_path: Path) -> None:
    with running_fleet(tmp_path, PLAIN) as fleet:
        asyncio.run(lose_head(fleet, PLAIN, has_state=False))


@pytest.mark.timeout(300)
def test_a_head_with_its_state_keeps_the_replicas_and_no_turn_is_lost(tmp_path: Path) -> None:
    state = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tmp_path / "state-of-ray")}
    environment = PLAIN | state
    with running_fleet(tmp_path, environment) as fleet:
        asyncio.run(lose_head(fleet, environment, has_state=True))
