"""A fleet in a Ray cluster: discovery, supervision, and the loss of every member by kill -9."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from inferd import AsyncClient, Client
from inferd.backends.errors import InferdError
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model
from tests.gateways.fleet.ray_members import (
    JOINING,
    NAMES,
    RAY_S_MAX,
    RayFleet,
    nodes_of,
    ray_fleet,
)
from tests.gateways.fleet.test_audit import check_histories
from tests.models import ONE_THREAD, short_smollm2
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
SESSIONS, CLIENTS = 300, 20
CONFIG = (
    f"[daemon]\nsessions-max = {SESSIONS}\n"
    + ONE_THREAD
    + '[models.smollm2]\nslots = 1\nctx-size = 256\nflash-attn = "on"\n'
    + echo_model("slow", step_ms=30, slots=8)
)
QUESTION, GREEDY = "The capital of France is", {"temp": 0, "n-predict": 40}
"""With flash attention, the logits of up to 63 tokens do not depend on the batch they are in."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    """A fleet for all tests, which run in their order: the head is killed at last."""
    folder = tmp_path_factory.mktemp("fleet")
    (folder / "models").mkdir()
    (folder / "models" / "smollm2.gguf").symlink_to(short_smollm2())
    with ray_fleet(folder, CONFIG) as running:
        yield running


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


class Audit:
    """Conversations over all losses, on few connections, with the acknowledged turns of each.

    Beside them, each loss has a turn of SmolLM2, whose text is to be that of a turn without one.
    """

    def __init__(self, fleet: RayFleet):
        self.fleet = fleet
        self.turns: list[list[str]] = [[] for _ in range(SESSIONS)]
        self.losses = [asyncio.Event() for _ in LOSSES]
        self.end = asyncio.Event()

    async def hold_conversations(self) -> None:
        """Converse until `end`, while members are lost."""
        async with (
            AsyncClient(self.fleet.socket) as client,
            client.session("smollm2", raw=True, options=GREEDY) as session,
        ):
            text = str(await session.chat(QUESTION))
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._converse(number))
            for number in range(len(LOSSES)):
                group.create_task(self._ask_real_model(number, text))
            try:
                await asyncio.to_thread(self._lose_members, asyncio.get_running_loop())
            finally:
                for event in (*self.losses, self.end):
                    event.set()

    async def _converse(self, client_number: int) -> None:
        async with AsyncClient(self.fleet.socket) as client, asyncio.TaskGroup() as group:
            for number in range(client_number, SESSIONS, CLIENTS):
                group.create_task(self._hold_conversation(client, number))

    async def _hold_conversation(self, client: AsyncClient, number: int) -> None:
        turns = self.turns[number]
        async with client.session("slow", session_id=f"audit-{number}", resume=True) as session:
            while not self.end.is_set():
                text = f"turn {len(turns)} of session {number} "
                assert str(await session.chat(text)) == text
                turns.append(text)

    async def _ask_real_model(self, number: int, text: str) -> None:
        async with (
            AsyncClient(self.fleet.socket) as client,
            client.session(
                "smollm2", session_id=f"real-{number}", raw=True, resume=True, options=GREEDY
            ) as session,
        ):
            await self.losses[number].wait()
            assert str(await session.chat(QUESTION)) == text

    def _lose_members(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lose the members one after the other, each while all the conversations go on."""
        self._await_turns()
        for event, lose in zip(self.losses, LOSSES, strict=True):
            loop.call_soon_threadsafe(event.set)
            lose(self.fleet)
            self._await_turns()

    def _await_turns(self) -> None:
        """Wait until each conversation has had another turn."""
        before = [len(turns) for turns in self.turns]
        wait_until(
            lambda: all(len(t) > n for t, n in zip(self.turns, before, strict=True)), RAY_S_MAX
        )


def lose_replica(fleet: RayFleet) -> None:
    members = [fleet.process_of("a", member) for member in ("daemon", "relay")]
    fleet.kill_replica("a")
    assert [fleet.process_of("a", member) for member in ("daemon", "relay")] == members


def lose_member(name: str, member: str, fleet: RayFleet) -> None:
    fleet.kill_member(name, member)
    wait_until(partial(serves, fleet, name), RAY_S_MAX)


def lose_entry(fleet: RayFleet) -> None:
    fleet.kill_entry()
    fleet.start_entry(f'ray = "{fleet.cluster.address}"\n')


def lose_head(fleet: RayFleet) -> None:
    fleet.kill_head()
    assert "the fleet goes on with the 3 nodes" in fleet.until_noted("Ray does not answer")


LOSSES: tuple[Callable[[RayFleet], None], ...] = (
    lose_replica,
    partial(lose_member, "a", "daemon"),  # under the second replica
    partial(lose_member, "b", "daemon"),
    partial(lose_member, "a", "relay"),
    partial(lose_member, "b", "relay"),
    lose_entry,
    lose_head,
)


async def audit(fleet: RayFleet) -> None:
    found = Audit(fleet)
    await found.hold_conversations()
    with Client(fleet.socket) as client:
        assert {session["node"] for session in client.sessions(dormant=True)} == set(NAMES)
    await check_histories(fleet.socket, found.turns)


@pytest.mark.timeout(400)
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
