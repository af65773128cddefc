"""A fleet in a Ray cluster: discovery, supervision, and the loss of every member by kill -9."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

import pytest

from inferd import AsyncClient, Client
from inferd.backends.errors import Busy, InferdError
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model
from tests.gateways.fleet.ray_members import JOINING, NAMES, RAY_S_MAX, RayFleet, ray_fleet
from tests.gateways.fleet.test_audit import SESSIONS, check_histories
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
CONFIG = echo_model("slow", step_ms=5, slots=8)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    """A fleet for all tests, which run in their order: the head is killed at last."""
    with ray_fleet(tmp_path_factory.mktemp("fleet"), CONFIG) as running:
        yield running


def nodes_of(fleet: RayFleet) -> dict[str, bool]:
    """Return whether each node that the entry knows can be reached."""
    with Client(fleet.socket) as client:
        try:
            nodes = client.stats()["nodes"]
        except Busy:  # the entry knows no node that can be reached
            return {}
    return {name: node["reachable"] for name, node in nodes.items()}


def serves(fleet: RayFleet, name: str) -> bool:
    """Return whether a node's daemon answers, and the entry reaches it."""
    try:
        with Client(fleet.folder / name / "inferd.sock") as direct:
            direct.models()
    except InferdError:
        return False
    return nodes_of(fleet).get(name, False)


def test_the_entry_finds_nodes_that_join_and_drops_a_removed_one(fleet: RayFleet) -> None:
    for name in NAMES:
        assert "serves entries on 127.0.0.1:" in fleet.until_deployed(name)
    wait_until(lambda: nodes_of(fleet) == dict.fromkeys(NAMES, True), RAY_S_MAX)
    assert fleet.end_command("b") == 0
    assert fleet.runs("b"), "Ray supervises a member of the cluster without its command"
    with inferd_process("fleet", "remove", "b", "--ray", fleet.cluster.address) as removing:
        _, errors = removing.communicate()
        assert removing.returncode == 0, errors
    assert not fleet.runs("b"), "the removal from the cluster ends its processes"
    wait_until(lambda: nodes_of(fleet) == {"a": True, "c": True}, RAY_S_MAX)
    fleet.start_node("b")
    wait_until(lambda: nodes_of(fleet) == dict.fromkeys(NAMES, True), RAY_S_MAX)


async def converse(fleet: RayFleet, number: int, end: asyncio.Event) -> list[str]:
    """Hold a conversation until *end*, over all losses; return the texts of its turns."""
    texts: list[str] = []
    async with (
        AsyncClient(fleet.socket) as client,
        client.session("slow", session_id=f"audit-{number}", resume=True) as session,
    ):
        while not end.is_set():
            texts.append(f"turn {len(texts)} of session {number} ")
            assert str(await session.chat(texts[-1])) == texts[-1]
    return texts


def kill_members(fleet: RayFleet) -> None:
    """Kill a replica, a daemon, a relay and the head, one after the other."""
    members = [fleet.process_of("a", member) for member in ("daemon", "relay")]
    fleet.kill_replica("a")
    assert [fleet.process_of("a", member) for member in ("daemon", "relay")] == members
    for member in ("daemon", "relay"):
        for name in ("a", "b"):  # that of a under its second replica
            fleet.kill_member(name, member)
            wait_until(partial(serves, fleet, name), RAY_S_MAX)
    fleet.kill_head()
    assert "the fleet goes on with the 3 nodes" in fleet.until_noted("Ray does not answer")


async def audit(fleet: RayFleet) -> None:
    end = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        talks = [group.create_task(converse(fleet, number, end)) for number in range(SESSIONS)]
        try:
            await asyncio.to_thread(kill_members, fleet)
        finally:
            end.set()
    with Client(fleet.socket) as client:
        assert {session["node"] for session in client.sessions(dormant=True)} == set(NAMES)
    await check_histories(fleet.socket, [talk.result() for talk in talks])


def test_every_acknowledged_turn_is_there_once_after_all_kills(fleet: RayFleet) -> None:
    asyncio.run(audit(fleet))


def test_an_entry_without_the_head_begins_with_its_last_table(fleet: RayFleet) -> None:
    fleet.kill_entry()
    fleet.start_entry(f'ray = "{fleet.cluster.address}"\n')
    assert nodes_of(fleet) == dict.fromkeys(NAMES, True)
    with (
        Client(fleet.socket) as client,
        client.session("slow", session_id="audit-0") as session,
    ):
        assert session.context.attached
        assert session.chat("after the head") == "after the head"


def test_a_command_that_has_joined_ends_its_processes_and_the_node_stays_known(
    fleet: RayFleet,
) -> None:
    assert fleet.end_command(JOINING) == 0
    assert not fleet.runs(JOINING)
    wait_until(lambda: nodes_of(fleet) == {"a": True, "b": True, JOINING: False})
