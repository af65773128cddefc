"""A node is lost for good: its sessions continue from their copies, with each acknowledged turn."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from inferd import AsyncClient, Client, Graph
from inferd.backends.errors import Busy, ConnectionLost, NotFound, PermissionDenied, WorkerCrashed
from inferd.gateways.fleet.copies.copies import HOLD_S_MAX
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.repetitions import repetitions
from tests.waiting import wait_until

SESSIONS, TURNS = repetitions(8), 6
CONFIG = echo_model("slow", step_ms=5, slots=8)
FEW_SLOTS = echo_model("slow", step_ms=10, slots=SESSIONS // 2)
PAUSE_S = 0.05
"""Between two requests to a fleet that is busy."""
SOON = "follower-after = 0.5\n"


def states_at(fleet: RunningFleet, node: str) -> dict[str, str]:
    """Return the states of the sessions on a node by their ids."""
    with Client(fleet.daemons[node].socket) as client:
        return states_of(client)


def states_of(client: Client) -> dict[str, str]:
    """Return the states of the sessions on the node of a client."""
    listed = client.sessions(all_users=True, dormant=True)
    return {str(session["session_id"]): session["state"] for session in listed}


def until_states(fleet: RunningFleet, node: str, expected: dict[str, str]) -> None:
    """Wait until the sessions on a node are those that are *expected*."""
    with Client(fleet.daemons[node].socket) as client:
        wait_until(lambda: states_of(client) == expected)


def node_of(client: Client, session_id: str) -> str:
    """Return the node of an open session."""
    [found] = [s for s in client.sessions() if s["session_id"] == session_id]
    return str(found["node"])


def lose(fleet: RunningFleet, node: str) -> None:
    """Kill a node's relay and daemon."""
    fleet.kill_relay(node)
    fleet.daemons[node].kill()


def bring_back(fleet: RunningFleet, node: str) -> None:
    """Start the daemon and the relay of a lost node again."""
    fleet.daemons[node].start_again()
    fleet.start_relay(node)
    fleet.until_noted(f"node {node} serves")


def continued_on(client: Client, session_id: str, text: str) -> str:
    """Send a turn to a session whose node was lost, once it continues; return its node."""
    node = ""

    def continues() -> bool:
        nonlocal node
        try:
            with client.session("slow", session_id=session_id) as session:
                assert session.context.attached
                assert session.chat(text) == text
                node = node_of(client, session_id)
        except Busy as exc:
            time.sleep(min(exc.retry_after_s, PAUSE_S))
            return False
        return True

    wait_until(continues)
    return node


@pytest.mark.parametrize("member", ["node", "relay"])
def test_a_session_continues_on_another_node_after_the_loss_of_its_own(
    tmp_path: Path, member: str
) -> None:
    with (
        running_fleet(tmp_path, CONFIG, "a", "b", more=SOON) as fleet,
        Client(fleet.socket) as client,
    ):
        with client.session("slow", session_id="diary") as session:
            assert session.chat("first") == "first"
            home = node_of(client, "diary")
            other = "ab".replace(home, "")
            assert states_at(fleet, other) == {"diary": "copy"}
        if member == "node":
            lose(fleet, home)
        else:
            fleet.kill_relay(home)
        assert continued_on(client, "diary", "second") == other
        if member == "node":
            fleet.daemons[home].start_again()
        fleet.start_relay(home)
        fleet.until_noted(f"node {home} serves")
        with client.session("slow", session_id="diary") as session:
            assert node_of(client, "diary") == other
            assert session.history().session["turns"] == 2
            assert session.chat("third") == "third"
            until_states(fleet, home, {"diary": "copy"})


async def converse(fleet: RunningFleet, number: int, under_way: asyncio.Event) -> list[str]:
    """Hold a conversation over all losses; return the texts of its turns."""
    texts = [f"turn {turn} of session {number} " for turn in range(TURNS)]
    async with (
        AsyncClient(fleet.socket) as client,
        client.session("slow", session_id=f"audit-{number}", resume=True) as session,
    ):
        for turn, text in enumerate(texts):
            assert str(await session.chat(text)) == text
            if turn == TURNS // 3:
                under_way.set()
    return texts


async def audit(fleet: RunningFleet) -> None:
    under_way = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        talks = [group.create_task(converse(fleet, n, under_way)) for n in range(SESSIONS)]
        await under_way.wait()
        assert set((await asyncio.to_thread(states_at, fleet, "a")).values()) - {"copy"}
        await asyncio.to_thread(lose, fleet, "a")
    await check_histories(fleet, [talk.result() for talk in talks])


async def check_histories(fleet: RunningFleet, conversations: list[list[str]]) -> None:
    """Check that the history of each session has the texts of its turns once and in order."""
    async with AsyncClient(fleet.socket) as client:
        for number, texts in enumerate(conversations):
            async with client.session("slow", session_id=f"audit-{number}") as session:
                assert session.context.attached
                messages: list[dict[str, Any]] = (await session.history()).messages
                expected = [text for text in texts for _ in range(2)]
                assert [str(message["content"]) for message in messages] == expected


@pytest.mark.process
def test_no_acknowledged_turn_is_lost_with_a_node(tmp_path: Path) -> None:
    with running_fleet(tmp_path, FEW_SLOTS, "a", "b", "c", more=SOON) as fleet:
        asyncio.run(audit(fleet))
        states = {node: states_at(fleet, node) for node in "bc"}
        for number in range(SESSIONS):
            found = sorted(states[node].get(f"audit-{number}", "") for node in "bc")
            assert found == ["copy", "dormant"], (number, found)


def test_a_stream_that_resumes_continues_on_another_node(tmp_path: Path) -> None:
    text = "a text that takes the slow model a while to echo, and longer than its loss"
    with (
        running_fleet(tmp_path, CONFIG, "a", "b", more=SOON) as fleet,
        Client(fleet.socket) as client,
        client.session("slow", session_id="diary", resume=True) as session,
    ):
        stream = session.stream(text)
        pieces = [next(iter(stream))]
        home = node_of(client, "diary")
        lose(fleet, home)
        pieces += stream
        assert "".join(pieces) == text
        assert node_of(client, "diary") != home
        assert session.chat("more") == "more"
        contents = [message["content"] for message in session.history().messages]
        assert contents == [text, text, "more", "more"]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_copy_is_made_elsewhere_when_its_node_is_lost(tmp_path: Path, is_open: bool) -> None:
    with (
        running_fleet(tmp_path, CONFIG, "a", "b", "c", more=SOON) as fleet,
        Client(fleet.socket) as client,
    ):
        with client.session("slow", session_id="diary") as session:
            session.chat("first")
            home = node_of(client, "diary")
            [follower] = [node for node in "abc" if states_at(fleet, node) == {"diary": "copy"}]
            [third] = set("abc") - {home, follower}
            if is_open:
                lose(fleet, follower)
                session.chat("second")
                assert states_at(fleet, third) == {"diary": "copy"}, "before the answer"
        if not is_open:
            lose(fleet, follower)
            until_states(fleet, third, {"diary": "copy"})
        bring_back(fleet, follower)
        until_states(fleet, follower, {})
        lose(fleet, home)
        assert continued_on(client, "diary", "another") == third


def test_a_session_goes_on_without_a_copy_that_no_node_takes(tmp_path: Path) -> None:
    config = CONFIG + "[daemon]\ndormant-sessions-max = 1\n"
    with (
        running_fleet(tmp_path, config, "a", "b", more=SOON) as fleet,
        Client(fleet.socket) as client,
    ):
        for session_id in ("first", "second"):
            with client.session("slow", session_id=session_id) as session:
                assert session.chat("text") == "text"
            if session_id == "first":
                continue
            line = fleet.until_noted("goes on without a copy")
            assert "'second'" in line and "dormant-sessions-max is 1" in line


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process in the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it was killed in the block
            os.kill(pid, signal.SIGCONT)


def test_a_follower_that_hangs_is_replaced_within_seconds(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, CONFIG, "a", "b", "c", more=SOON) as fleet,
        Client(fleet.socket) as client,
        client.session("slow", session_id="diary") as session,
    ):
        session.chat("first")
        home = node_of(client, "diary")
        [follower] = [node for node in "abc" if states_at(fleet, node) == {"diary": "copy"}]
        [third] = set("abc") - {home, follower}
        begin = time.monotonic()
        with stopped(fleet.daemons[follower].pid):
            assert session.chat("second") == "second"
            assert time.monotonic() - begin < HOLD_S_MAX
            assert states_at(fleet, third) == {"diary": "copy"}
            fleet.until_noted(f"node {follower} is lost")  # its return is followed by a check
        until_states(fleet, follower, {})


def test_an_answer_that_neither_node_nor_copy_has_for_sure_is_not_passed_on(
    tmp_path: Path,
) -> None:
    with (
        running_fleet(tmp_path, CONFIG, "a", "b", more=SOON) as fleet,
        Client(fleet.socket) as client,
        client.session("slow", session_id="diary") as session,
        ThreadPoolExecutor() as pool,
    ):
        session.chat("first")
        home = node_of(client, "diary")
        other = "ab".replace(home, "")
        with stopped(fleet.daemons[other].pid):
            answer = pool.submit(session.chat, "second")
            with Client(fleet.daemons[home].socket) as direct:
                wait_until(lambda: contents_of(direct, "diary")[2:] == ["second", "second"])
                wait_until(lambda: direct.queue(all_users=True) == [])
            lose(fleet, home)
            with pytest.raises(WorkerCrashed) as caught:
                answer.result()
        assert caught.value.data["node"] == home


def contents_of(client: Client, session_id: str) -> list[str]:
    """Return the texts in the history of a session."""
    return [str(m["content"]) for m in client.history(session_id=session_id).messages]


def test_an_entry_that_is_killed_before_the_answer_repeats_no_turn(tmp_path: Path) -> None:
    with running_fleet(tmp_path, CONFIG, "a", "b", more=SOON) as fleet:
        with Client(fleet.socket) as client, ThreadPoolExecutor() as pool:
            session = client.session("slow", session_id="diary").__enter__()
            session.chat("first")
            home = node_of(client, "diary")
            other = "ab".replace(home, "")
            with (
                Client(fleet.daemons[home].socket) as direct,
                stopped(fleet.daemons[other].pid),
            ):
                answer = pool.submit(session.chat, "second")
                wait_until(lambda: contents_of(direct, "diary")[2:] == ["second", "second"])
                wait_until(lambda: direct.queue(all_users=True) == [])
                assert not answer.done(), "its copy lacks it"
                fleet.kill_entry()
                with pytest.raises(ConnectionLost):
                    answer.result()
        fleet.start_entry(SOON)
        with Client(fleet.socket) as client:
            with client.session("slow", session_id="diary") as session:
                assert node_of(client, "diary") == home
                session.chat("third")
            lose(fleet, home)
            assert continued_on(client, "diary", "fourth") == other
            expected = [t for t in ("first", "second", "third", "fourth") for _ in range(2)]
            assert contents_of(client, "diary") == expected


def test_an_entry_that_is_killed_in_a_promotion_ends_it_when_it_is_back(tmp_path: Path) -> None:
    records = tmp_path / "state" / "promotions.jsonl"
    with running_fleet(tmp_path, CONFIG, "a", "b", more=SOON) as fleet:
        with Client(fleet.socket) as client, ThreadPoolExecutor() as pool:
            graph = client.load_by_name("slow")
            with client.session("slow", session_id="diary") as session:
                session.chat("first")
                home = node_of(client, "diary")
            other = "ab".replace(home, "")
            lose(fleet, home)
            fleet.until_noted(f"node {home} is lost")
            with stopped(fleet.daemons[other].pid):
                opening = pool.submit(open_later, client, graph)
                wait_until(lambda: "diary" in records.read_text())
                fleet.kill_entry()
                with pytest.raises(ConnectionLost):
                    opening.result()
                fleet.daemons[other].kill()
        fleet.daemons[other].start_again()
        assert states_at(fleet, other) == {"diary": "copy"}, "it was not kept"
        fleet.daemons[home].start_again()
        fleet.start_relay(home)
        fleet.start_entry(SOON)
        with Client(fleet.socket) as client:
            wait_until(lambda: all("loaded" in n for n in client.stats()["nodes"].values()))
            with client.session("slow", session_id="diary") as session:
                assert session.context.attached
                assert session.chat("second") == "second"
                assert node_of(client, "diary") == other
            assert states_at(fleet, home) == {"diary": "copy"}
            assert states_at(fleet, other) == {"diary": "dormant"}
        assert "has_ended" in records.read_text()


def open_later(client: Client, graph: Graph) -> None:
    """Open a session whose node was lost."""
    while True:
        try:
            client.init_execution_context_with_session_id(graph, "diary")
        except Busy as exc:
            time.sleep(exc.retry_after_s)


def test_a_copy_follows_deletions_and_is_of_its_user(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, CONFIG, "a", "b", more=SOON) as fleet,
        Client(fleet.socket, on_behalf_of="@ada") as ada,
        Client(fleet.socket, on_behalf_of="@bob") as bob,
    ):
        with ada.session("slow", session_id="deleted") as session:
            session.chat("text")
            session.delete()
        with ada.session("slow", session_id="diary") as session:
            session.chat("first")
            session.chat("second")
            session.rewind(1)
            home = node_of(ada, "diary")
        other = "ab".replace(home, "")
        until_states(fleet, other, {"diary": "copy"})
        lose(fleet, home)
        fleet.until_noted(f"node {home} is lost")
        assert bob.sessions(dormant=True) == []
        with pytest.raises(PermissionDenied):
            bob.sessions(all_users=True)
        with pytest.raises((Busy, NotFound)):
            bob.history(session_id="diary")
        assert continued_on(ada, "diary", "third") == other
        assert contents_of(ada, "diary") == ["first", "first", "third", "third"]
        bring_back(fleet, home)
        with bob.session("slow", session_id="diary") as session:
            assert not session.context.attached


@pytest.mark.parametrize("mode", ["off", "async"])
def test_copies_can_be_off_or_follow_later(tmp_path: Path, mode: str) -> None:
    with (
        running_fleet(tmp_path, CONFIG, "a", "b", more=f'copies = "{mode}"\n') as fleet,
        Client(fleet.socket) as client,
        client.session("slow", session_id="diary") as session,
    ):
        assert session.chat("text") == "text"
        other = "ab".replace(node_of(client, "diary"), "")
        if mode == "async":
            until_states(fleet, other, {"diary": "copy"})
        else:
            assert states_at(fleet, other) == {}
