"""New contexts go to the node that has computed the beginning of their prompt."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from inferd import Client, Session
from inferd.backends.errors import Busy, InvalidArgument
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.raw import RawClient
from tests.waiting import wait_until

CONFIG = echo_model("echo", slots=4, **{"ctx-size": 8192}) + echo_model(
    "slow", step_ms=20, slots=2, **{"ctx-size": 8192}
)
NODES = ("a", "b", "c")
SYSTEM = "You answer in few words, and you never guess. " * 60
SHORT = {"max-tokens": 4}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, *NODES) as running:
        for model in ("echo", "slow"):
            running.load(model)
        yield running


@pytest.fixture
def client(fleet: RunningFleet) -> Iterator[Client]:
    with Client(fleet.socket, label="second") as running:
        yield running


def prime(fleet: RunningFleet, text: str, model: str = "echo") -> str:
    """Have a node compute a prompt, and return its name."""
    with (
        Client(fleet.socket, label="first") as client,
        client.session(model, raw=True, options=SHORT) as session,
    ):
        session.chat(text)
        return node_of(client, session)


def node_of(client: Client, session: Session | int) -> str:
    context = session if isinstance(session, int) else session.context
    [found] = [s for s in client.sessions() if s["context"] == context]
    return str(found["node"])


@contextmanager
def avoiding(client: Client, node: str) -> Iterator[None]:
    """Have contexts open on other nodes than *node*, in the `with` block."""
    client.drain(node=node)
    yield
    client.drain(node=node, undo=True)


@contextmanager
def elsewhere(client: Client, node: str, **keywords: Any) -> Iterator[Session]:
    """Open a session on another node than *node*."""
    with ExitStack() as stack:
        with avoiding(client, node):
            keywords = {"model": "echo", "options": SHORT, **keywords}
            session = stack.enter_context(client.session(**keywords))
        assert node_of(client, session) != node
        yield session


def test_a_context_goes_to_the_node_that_has_computed_the_beginning(
    fleet: RunningFleet, client: Client
) -> None:
    node = prime(fleet, SYSTEM + "one question")
    with elsewhere(client, node, raw=True) as session:
        reply = session.chat(SYSTEM + "another question")
        assert node_of(client, session) == node
        assert reply.metadata["cached_tokens"] >= len(SYSTEM)
        assert session.chat("further") == "furt"
        assert node_of(client, session) == node
    wait_until(lambda: client.sessions() == [])


def test_a_short_common_beginning_is_not_worth_it(fleet: RunningFleet, client: Client) -> None:
    node = prime(fleet, "short: " + SYSTEM[:400])
    with elsewhere(client, node, raw=True) as session:
        before = node_of(client, session)
        session.chat("short: " + SYSTEM[:400])
        assert node_of(client, session) == before


@pytest.mark.parametrize("session_id", [None, "prepared"])
def test_what_has_prepared_the_context_holds_there(
    fleet: RunningFleet, client: Client, session_id: str | None
) -> None:
    system = f"{session_id}. {SYSTEM}"
    with (
        Client(fleet.socket, label="first") as first,
        first.session("echo", system=system, options=SHORT) as session,
    ):
        session.chat(SYSTEM + "one question")
        node = node_of(first, session)
    options = SHORT | {"seed": 7}
    opened = elsewhere(client, node, session_id=session_id, system=system, options=options)
    with opened as session:
        reply = session.chat(SYSTEM + "another question")
        assert node_of(client, session) == node
        assert reply.metadata["cached_tokens"] >= len(SYSTEM), "echo ignores system prompts"
        assert reply.metadata["output_tokens"] == 4
        messages = session.history().messages
        assert [m["role"] for m in messages] == ["system", "user", "assistant"]
        assert messages[0]["content"] == system
        values = {p["name"]: p["value"] for p in session.parameters()}
        assert values["seed"] == 7


def test_a_session_with_an_id_is_on_one_node_and_keeps_its_turns(
    fleet: RunningFleet, client: Client
) -> None:
    node = prime(fleet, "id: " + SYSTEM + "one question")
    with elsewhere(client, node, session_id="s", raw=True) as session:
        session.chat("id: " + SYSTEM + "another question")
        session.chat("further")
        assert node_of(client, session) == node
    assert [s["node"] for s in client.sessions(dormant=True) if s["session_id"] == "s"] == [node]
    with client.session("echo", session_id="s", raw=True) as session:
        assert session.context.attached and len(session.history().turns) == 2


def test_a_state_or_an_existing_session_stays_on_its_node(
    fleet: RunningFleet, client: Client
) -> None:
    node = prime(fleet, "old: " + SYSTEM)
    with elsewhere(client, node, session_id="old", raw=True) as session:
        session.chat("first")
        before = node_of(client, session)
    with client.session("echo", session_id="old", raw=True) as session:
        session.chat("old: " + SYSTEM)
        assert node_of(client, session) == before


def test_a_node_whose_slots_are_mostly_busy_is_not_preferred(
    fleet: RunningFleet, client: Client
) -> None:
    node = prime(fleet, "busy: " + SYSTEM, "slow")
    wait_until(lambda: client.stats()["nodes"][node]["running"] == 0)
    text = "a long text that the slow model repeats for a while " * 4
    with elsewhere(client, node, model="slow", raw=True) as session:
        before = node_of(client, session)
        with Client(fleet.daemons[node].socket) as direct, direct.session("slow", raw=True) as own:
            stream = own.stream(text)
            next(stream)
            wait_until(lambda: client.stats()["nodes"][node]["running"] == 1)
            session.chat("busy: " + SYSTEM)
            assert node_of(client, session) == before
            stream.close()


def test_requests_that_are_sent_at_once_keep_their_order(fleet: RunningFleet) -> None:
    text = "order: " + SYSTEM
    node = prime(fleet, text)
    with (
        Client(fleet.socket, label="second") as observer,
        RawClient(fleet.socket, label="second") as client,
    ):
        graph = client.call("load_by_name", name="echo")["graph"]
        with avoiding(observer, node):
            context = client.call("init_execution_context", graph=graph)["context"]
        tensor = {"data": text.encode(), "dimensions": [len(text)], "type": "u8"}
        inputs = {"context": context, "index": 0, "tensor": tensor}
        first = client.start_request("set_input", **inputs)
        second = client.start_request("compute", context=context)
        assert client.wait_result(first) == {}
        client.wait_result(second)
        assert client.output(context).decode() == text
        assert [found["node"] for found in client.call("sessions")["sessions"]] == [node]


def test_a_node_that_does_not_answer_is_not_waited_for(fleet: RunningFleet, client: Client) -> None:
    """The context stays, and its turn is computed where it is."""
    node = prime(fleet, "frozen: " + SYSTEM)
    with elsewhere(client, node, raw=True) as session:
        before = node_of(client, session)
        pid = fleet.daemons[node].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            assert session.chat("frozen: " + SYSTEM) == "froz"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert node_of(client, session) == before
        wait_until(lambda: len(client.sessions()) == 1)  # what it has opened late is closed


def test_the_client_may_vanish_meanwhile(fleet: RunningFleet, client: Client) -> None:
    text = "gone: " + SYSTEM
    node = prime(fleet, text)
    pid = fleet.daemons[node].pid
    with RawClient(fleet.socket, label="second") as raw:
        graph = raw.call("load_by_name", name="echo")["graph"]
        with avoiding(client, node):
            context = raw.call("init_execution_context", graph=graph)["context"]
        os.kill(pid, signal.SIGSTOP)
        raw.start_request("chat", context=context, prompt=text, raw=True)
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: client.sessions() == [])


def test_credit_that_is_granted_while_the_context_moves_holds(
    fleet: RunningFleet, client: Client
) -> None:
    text = "credit: " + SYSTEM
    node = prime(fleet, text)
    with RawClient(fleet.socket, label="second") as raw:
        graph = raw.call("load_by_name", name="echo")["graph"]
        with avoiding(client, node):
            context = raw.call("init_execution_context", graph=graph)["context"]
        options = {"max-tokens": 8}
        turn = raw.start_request(
            "stream", context=context, prompt=text, raw=True, credit=1, options=options
        )
        raw.write([5, turn, 1000])
        raw.wait_result(turn)
        assert raw.streamed_text == text[:8]
        assert [found["node"] for found in raw.call("sessions")["sessions"]] == [node]


def test_a_request_that_its_node_refuses_has_one_answer(fleet: RunningFleet) -> None:
    with RawClient(fleet.socket, label="second") as raw:
        context = raw.context("echo")
        turn = raw.start_request("chat", context=context, prompt=SYSTEM, raw=True, priority=5)
        with pytest.raises(InvalidArgument):
            raw.wait_result(turn)
        assert raw.call("sessions")["sessions"] and not raw.has_answer(turn)


def is_deleted(client: Client, session_id: str) -> bool:
    """Delete a session, unless its move has not ended yet."""
    try:
        return client.delete_session(session_id=session_id)
    except Busy:
        return False


@pytest.mark.alone
@pytest.mark.parametrize("leaves", [False, True])
def test_a_session_waits_a_few_seconds_at_most_for_a_node_that_hangs(
    fleet: RunningFleet, client: Client, leaves: bool
) -> None:
    text = f"hangs, {leaves}: {SYSTEM}"
    node = prime(fleet, text)
    pid = fleet.daemons[node].pid
    with RawClient(fleet.socket, label="second", timeout_s=5) as raw:
        graph = raw.call("load_by_name", name="echo")["graph"]
        with avoiding(client, node):
            opened = raw.call(
                "init_execution_context_with_session_id", graph=graph, session_id="hangs"
            )
        os.kill(pid, signal.SIGSTOP)
        try:
            turn = raw.start_request(
                "chat", context=opened["context"], prompt=text, raw=True, options=SHORT
            )
            if leaves:
                raw.socket.close()
            else:
                assert raw.wait_result(turn)["text"] == text[:4].encode()
        finally:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: all(s["state"] == "dormant" for s in client.sessions(dormant=True)))
    found = [s for s in client.sessions(dormant=True) if s["session_id"] == "hangs"]
    assert len(found) == 1
    wait_until(partial(is_deleted, client, "hangs"))
