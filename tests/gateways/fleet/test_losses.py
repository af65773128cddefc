"""The loss of a daemon, a relay and the entry under streams, by kill -9, and their return."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from inferd import Client, Session, Stream
from inferd.backends.errors import (
    Busy,
    ConnectionLost,
    SessionExpired,
    ShuttingDown,
    WorkerCrashed,
)
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.waiting import wait_until

CONFIG = echo_model("slow", step_ms=20, slots=2)
TEXT = "a text with more tokens than the credit of a stream, so that its turn ends once it is read"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A fleet for all tests, each of which restores what it kills."""
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, "a", "b") as running:
        yield running


class Streams:
    """A stream on each node, of sessions with an id."""

    def __init__(self, fleet: RunningFleet, client: Client):
        fleet.load("slow")
        self.sessions: dict[str, Session] = {}
        self.streams: dict[str, Stream] = {}
        while len(self.sessions) < len(fleet.daemons):
            session = client.session("slow", session_id=f"diary-{next(_numbers)}")
            session.__enter__()
            node = node_of(client, session)
            if node in self.sessions:  # chosen before the report of the other turn
                session.delete()
                session.__exit__(None, None, None)
                continue
            self.sessions[node] = session
            stream = self.streams[node] = session.stream(TEXT)
            next(iter(stream))


_numbers = itertools.count()


def node_of(client: Client, session: Session) -> str:
    """Return the node of an open session."""
    (found,) = [one for one in client.sessions() if one["context"] == session.context]
    return str(found["node"])


def check_loss_of(fleet: RunningFleet, client: Client, node: str, streams: Streams) -> str:
    """Check that all on *node* fails with typed errors, and the rest goes on; return its id."""
    other = "ab".replace(node, "")
    with pytest.raises(WorkerCrashed) as caught:
        list(streams.streams[node])
    assert caught.value.retryable and caught.value.data["node"] == node
    assert caught.value.data["cause"] == "node"
    line = fleet.until_noted(f"node {node} is lost")
    assert "1 open contexts were lost, and" in line and "sessions with an id wait for it" in line
    assert TEXT.endswith("".join(streams.streams[other])), "the other node's turn goes on"
    with pytest.raises(SessionExpired):
        client.get_output(streams.sessions[node].context)
    assert [session["node"] for session in client.sessions()] == [other]
    session_id = str(streams.sessions[node].session_id)
    with pytest.raises(Busy) as refused, client.session("slow", session_id=session_id):
        pass
    assert refused.value.data["node"] == node and refused.value.retry_after_s > 0
    with pytest.raises(Busy, match="may be on a node"), client.session("slow", session_id="new"):
        pass
    with client.session("slow") as session:
        assert node_of(client, session) == other, "sessions without an id open elsewhere"
    return session_id


def test_a_daemon_that_is_killed_comes_back_with_its_sessions(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        streams = Streams(fleet, client)
        before = streams.sessions["b"].context
        fleet.daemons["b"].kill()
        session_id = check_loss_of(fleet, client, "b", streams)
        fleet.daemons["b"].start_again()
        fleet.until_noted("node b serves")
        with client.session("slow", session_id=session_id) as session:
            assert session.context.attached
            assert session.context >> 32 != before >> 32, "its handles are those of a new start"
            assert TEXT.endswith("".join(session.resume()))


def test_a_relay_that_is_killed_comes_back_with_its_sessions(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        streams = Streams(fleet, client)
        before = streams.sessions["b"].context
        fleet.kill_relay("b")
        session_id = check_loss_of(fleet, client, "b", streams)
        with Client(fleet.daemons["b"].socket) as direct:
            wait_until(lambda: direct.queue(all_users=True) == [])
        fleet.start_relay("b")
        fleet.until_noted("node b serves")
        with client.session("slow", session_id=session_id) as session:
            assert session.context.attached
            assert session.context >> 32 == before >> 32, "the daemon is the same"
            assert TEXT.endswith("".join(session.resume()))


def test_a_stream_that_resumes_continues_when_its_node_is_back(fleet: RunningFleet) -> None:
    fleet.load("slow")
    with (
        Client(fleet.socket) as client,
        client.session("slow") as other,
        client.session("slow", session_id="resumed", resume=True) as session,
    ):
        node = node_of(client, session)
        stream = session.stream(TEXT)
        pieces = [next(iter(stream))]
        beside = None if node_of(client, other) == node else other.stream(TEXT)
        fleet.daemons[node].kill()
        fleet.daemons[node].start_again()
        pieces += stream
        assert "".join(pieces) == TEXT
        assert beside is None or "".join(beside) == TEXT
        assert session.chat("more") == "more", "its next turn runs as any other"
        fleet.daemons[node].kill()
        fleet.daemons[node].start_again()
        assert session.chat("again") == "again", "a loss between turns, too"
    fleet.until_noted(f"node {node} serves")
    fleet.until_noted(f"node {node} serves")


def test_an_entry_that_is_stopped_lets_its_turns_end_and_leaves_the_nodes(
    fleet: RunningFleet,
) -> None:
    with Client(fleet.socket) as client:
        streams = Streams(fleet, client)
        with inferd_process("stop", socket=fleet.socket) as stopping:
            wait_until(lambda: is_refused(client))
            for stream in streams.streams.values():
                assert TEXT.endswith("".join(stream))
            _, errors = stopping.communicate()
            assert stopping.returncode == 0, errors
    assert fleet.entry.wait() == 0
    fleet.kill_entry()  # closes its pipes
    for daemon in fleet.daemons.values():
        with Client(daemon.socket) as direct:
            assert not direct.stats()["draining"]
    fleet.start_entry()


def is_refused(client: Client) -> bool:
    try:
        client.models()
    except ShuttingDown:
        return True
    return False


def test_an_entry_that_is_killed_leaves_no_turn_and_finds_sessions_again(
    fleet: RunningFleet,
) -> None:
    with Client(fleet.socket) as client:
        streams = Streams(fleet, client)
        contexts = {session.context for session in streams.sessions.values()}
        starts = client.server.instance
        fleet.kill_entry()
        for stream in streams.streams.values():
            with pytest.raises(ConnectionLost):
                list(stream)
    for daemon in fleet.daemons.values():
        with Client(daemon.socket) as direct:
            wait_until(lambda d=direct: d.queue(all_users=True) == [])  # type: ignore[misc]
    fleet.start_entry()
    with Client(fleet.socket) as client:
        assert client.server.instance == starts + 1
        for node, before in streams.sessions.items():
            with client.session("slow", session_id=before.session_id) as session:
                assert node_of(client, session) == node
                assert session.context.attached and session.context not in contexts
                assert TEXT.endswith("".join(session.resume()))


@pytest.mark.parametrize("member", ["relay", "daemon"])
def test_a_member_that_hangs_is_lost_within_seconds(fleet: RunningFleet, member: str) -> None:
    hanging = fleet.relays["b"].process.pid if member == "relay" else fleet.daemons["b"].pid
    with Client(fleet.socket) as client:
        streams = Streams(fleet, client)
        os.kill(hanging, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerCrashed) as caught:
                list(streams.streams["b"])
            assert caught.value.data["node"] == "b"
            cause = "was silent for" if member == "relay" else "has not answered within"
            assert cause in fleet.until_noted("node b is lost")
            assert TEXT.endswith("".join(streams.streams["a"]))
        finally:
            os.kill(hanging, signal.SIGCONT)
        fleet.until_noted("node b serves")
        session_id = streams.sessions["b"].session_id
        with client.session("slow", session_id=session_id, resume=True) as session:
            assert node_of(client, session) == "b"


def test_without_a_node_the_fleet_is_busy(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        for name in fleet.daemons:
            fleet.kill_relay(name)
            fleet.until_noted(f"node {name} is lost")
        for call in (client.models, client.queue, lambda: client.load_by_name("slow")):
            with pytest.raises(Busy) as caught:
                call()
            assert caught.value.data["cause"] == "node"
        for name in fleet.daemons:
            fleet.start_relay(name)
            fleet.until_noted(f"node {name} serves")
        assert "slow" in [model["name"] for model in client.models()]


def test_a_client_that_vanishes_leaves_nothing(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        streams = Streams(fleet, client)
    assert streams.sessions.keys() == fleet.daemons.keys()
    for daemon in fleet.daemons.values():
        with Client(daemon.socket) as direct:
            wait_until(lambda d=direct: d.queue(all_users=True) == [])  # type: ignore[misc]
            wait_until(lambda d=direct: all(m["leases"] == 0 for m in d.models()))  # type: ignore[misc]
