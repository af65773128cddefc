"""First turns that wait on a node are sent to another one when that has a free slot."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from inferd import Client
from inferd.backends.errors import Cancelled, InferdError, WorkerCrashed
from inferd.backends.fd_frames import frame_of
from inferd.gateways.fleet.entry.client import (
    ClientConnection,
    ClientRequest,
    FleetClient,
    Withdrawal,
)
from inferd.gateways.fleet.frames import open_message
from inferd.gateways.fleet.routing.homes import FleetUser
from inferd.ipc.messages import CALLS, ClientHello, Kind
from inferd.ipc.names import Priority
from inferd.ipc.peer import peer_of
from inferd.ipc.server.descriptors import ClientDescriptors
from inferd.ipc.server.fairness import LoopTime, SharedLimit
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.raw import RawClient
from tests.waiting import wait_until

CONFIG = "[daemon]\nquantum-tokens = 100000\n" + echo_model(
    "slow", step_ms=20, slots=1, **{"ctx-size": 4096}
)
NODES = ("a", "b")
LONG = "a long text that the slow model repeats for a minute or so " * 50
TEXT = "a short text"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, *NODES) as running:
        running.load("slow")
        yield running


class Busy:
    """Nodes whose slots programs of their own have taken; `free` ends that on some of them."""

    def __init__(self, fleet: RunningFleet, priority: Priority):
        self._programs = {node: RawClient(fleet.daemons[node].socket) for node in NODES}
        for program in self._programs.values():
            graph = program.call("load_by_name", name="slow")["graph"]
            opened = program.call("init_execution_context", graph=graph, priority=priority)
            program.begin_stream(opened["context"], LONG)

    def free(self, *nodes: str) -> None:
        for node in nodes:
            self._programs[node].socket.close()


@contextmanager
def all_busy(fleet: RunningFleet, priority: Priority = "urgent") -> Iterator[Busy]:
    """Keep the slots of all nodes taken by turns of this class. A waiting turn of another label of
    their user would take a slot after a while, unless its class is lower.
    """
    with Client(fleet.socket) as client:
        busy = Busy(fleet, priority)
        try:
            wait_until(lambda: running(client) == 2)
            yield busy
        finally:
            busy.free(*NODES)
            wait_until(lambda: running(client) == 0)


def running(client: Client) -> int:
    """Return the number of turns of which the entry knows that they run."""
    nodes = client.stats()["nodes"].values()
    return sum(node.get("running", 1) for node in nodes)  # a lost one may still run it


def waiting_on(client: Client, count: int) -> list[str]:
    """Wait until turns of the client wait, and return their nodes."""

    def nodes() -> list[str]:
        return [task["node"] for task in client.queue() if task["state"] == "waiting"]

    wait_until(lambda: len(nodes()) == count)
    return nodes()


def other(node: str) -> str:
    return "ab".replace(node, "")


@pytest.mark.parametrize("priority", ["normal", "high"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_waiting_turn_goes_to_a_slot_that_becomes_free(
    fleet: RunningFleet, priority: Priority, streamed: bool
) -> None:
    with (
        all_busy(fleet) as busy,
        Client(fleet.socket, label="own") as client,
        client.session("slow", raw=True, priority=priority) as session,
        ThreadPoolExecutor() as pool,
    ):
        answer: Future[str]
        if streamed:
            answer = pool.submit(lambda: "".join(session.stream(TEXT)))
        else:
            answer = pool.submit(lambda: str(session.chat(TEXT)))
        [node] = waiting_on(client, 1)
        busy.free(other(node))
        assert answer.result(60) == TEXT
        assert [found["node"] for found in client.sessions()] == [other(node)]
        assert len(session.history().turns) == 1
        with Client(fleet.daemons[node].socket) as direct:
            assert len(direct.sessions(all_users=True)) == 1, "that of the long turn"


def test_one_free_slot_attracts_one_turn(fleet: RunningFleet) -> None:
    with (
        all_busy(fleet) as busy,
        Client(fleet.socket, label="own") as client,
        ExitStack() as stack,
        ThreadPoolExecutor() as pool,
    ):
        sessions = [stack.enter_context(client.session("slow", raw=True)) for _ in range(4)]
        answers = [
            pool.submit(session.chat, f"{TEXT} {number}") for number, session in enumerate(sessions)
        ]
        waiting_on(client, 4)
        busy.free("a")
        assert [answer.result(60) for answer in answers] == [f"{TEXT} {n}" for n in range(4)]


def test_a_waiting_turn_that_is_cancelled_is_not_sent_again(fleet: RunningFleet) -> None:
    with all_busy(fleet) as busy, RawClient(fleet.socket, label="own") as raw:
        context = raw.context("slow")
        turn = raw.start_request("chat", context=context, prompt=TEXT, raw=True)
        with Client(fleet.socket, label="own") as client:
            [node] = waiting_on(client, 1)
            raw.start_request("cancel", request=turn)
            busy.free(other(node))
            with pytest.raises(Cancelled):
                raw.wait_result(turn)
            assert client.queue() == []


def test_a_context_that_is_closed_meanwhile_stays_closed(fleet: RunningFleet) -> None:
    with all_busy(fleet) as busy, RawClient(fleet.socket, label="own") as raw:
        context = raw.context("slow")
        turn = raw.start_request("chat", context=context, prompt=TEXT, raw=True)
        with Client(fleet.socket, label="own") as client:
            [node] = waiting_on(client, 1)
            busy.free(other(node))
            raw.call("finalize_execution_context", context=context)
            with pytest.raises(InferdError):
                raw.wait_result(turn)
            wait_until(lambda: client.sessions() == [])
            with pytest.raises(InferdError):
                raw.call("chat", context=context, prompt=TEXT, raw=True)


def test_a_session_with_an_id_waits_on_its_node(fleet: RunningFleet) -> None:
    with (
        all_busy(fleet) as busy,
        Client(fleet.socket, label="own") as client,
        client.session("slow", session_id="s", raw=True) as session,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(session.chat, TEXT)
        [node] = waiting_on(client, 1)
        busy.free(other(node))
        wait_until(lambda: client.stats()["nodes"][other(node)]["running"] == 0)
        assert [task["node"] for task in client.queue()] == [node]
        busy.free(node)
        assert answer.result(60) == TEXT
        session.delete()


def test_a_turn_stays_in_its_queue_if_the_free_node_hangs(fleet: RunningFleet) -> None:
    assert any(hang_free_node(fleet) for _ in range(5)), "the turn was always sent there before"


def hang_free_node(fleet: RunningFleet) -> bool:
    """Check the answer of a turn that waits on one node while the other one, which is free, hangs;
    return False if it was sent there before that.
    """
    with (
        all_busy(fleet) as busy,
        Client(fleet.socket, label="own") as client,
        client.session("slow", raw=True) as session,
        ThreadPoolExecutor() as pool,
    ):
        answer = pool.submit(session.chat, TEXT)
        [node] = waiting_on(client, 1)
        pid = fleet.daemons[other(node)].pid
        busy.free(other(node))
        wait_until(lambda: client.stats()["nodes"][other(node)]["running"] == 0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with Client(fleet.daemons[node].socket) as direct:
                is_there = any(task["state"] == "waiting" for task in direct.queue())
            if is_there:
                busy.free(node)
                assert answer.result(60) == TEXT
        finally:
            os.kill(pid, signal.SIGCONT)
        if is_there:
            assert len(session.history().turns) == 1
        else:
            with suppress(WorkerCrashed):  # the node was lost for a moment
                answer.result(60)
        return is_there


@pytest.mark.asyncio
async def test_an_answer_that_was_held_back_is_sent_at_once() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    shared = SharedLimit(1 << 20)
    user = ClientDescriptors().of_user(0)
    connection = ClientConnection(ours, peer_of(ours), user, shared, LoopTime(), shared)
    fleet: Any = SimpleNamespace(
        nodes=None,
        incarnations=None,
        copies=SimpleNamespace(are_awaited=False),
        check_idle=lambda: None,
    )
    hello = ClientHello(protocol=(1, 0), software="test")
    client = FleetClient(fleet, connection, FleetUser("u", ""), hello, cast(Any, None))
    request = client.requests[1] = ClientRequest(1, "chat", CALLS["chat"])
    upstream: Any = SimpleNamespace(lost=None, node="a")
    request.upstream, request.withdrawal = upstream, Withdrawal()
    reply = msgspec.msgpack.encode([int(Kind.REPLY), 1, {"text": b"x"}])
    with theirs:
        client._pass_on(request, upstream, open_message(reply))
        connection.flush()
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
        client.pass_held(request)
        assert theirs.recv(1000) == frame_of(reply) and not client.requests
        connection.close()
