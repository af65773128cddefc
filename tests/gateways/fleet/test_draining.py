"""`inferd drain --node`: sessions and open contexts go to other nodes, whatever dies meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from inferd import Client
from inferd.backends.errors import Busy, NotFound, PermissionDenied
from tests.daemon.command_line import inferd
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.raw import RawClient

CONFIG = echo_model("echo", slots=4) + echo_model("slow", step_ms=20, slots=2)
TEXT = "a text that takes the slow model a second or two to echo"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A fleet for all tests; each of them uses all nodes at its end, without sessions."""
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, "a", "b") as running:
        yield running


@pytest.fixture(autouse=True)
def clean(fleet: RunningFleet) -> Iterator[None]:
    yield
    with Client(fleet.socket) as client:
        for node in fleet.daemons:
            client.drain(node=node, undo=True)
        for session in client.sessions(dormant=True):
            if session["session_id"]:
                client.delete_session(session_id=session["session_id"])


def nodes_of(client: Client) -> dict[str, str]:
    """Return the node of each session with an id."""
    found = client.sessions(dormant=True)
    ids = [s["session_id"] for s in found if s["session_id"]]
    assert len(ids) == len(set(ids)), "a session is on one node"
    return {s["session_id"]: s["node"] for s in found if s["session_id"]}


def other(node: str) -> str:
    return "ab".replace(node, "")


def write(client: Client, session_id: str, *texts: str) -> None:
    with client.session("echo", session_id=session_id, raw=True) as session:
        for text in texts:
            assert session.chat(text) == text


def test_dormant_sessions_move_and_new_ones_open_elsewhere(fleet: RunningFleet) -> None:
    fleet.load("echo")
    with Client(fleet.socket) as client:
        for number in range(12):
            write(client, f"s{number}", "first", "second")
        before = nodes_of(client)
        source = before["s0"]
        tokens = {s["session_id"]: s["tokens"] for s in client.sessions(dormant=True)}
        result = client.drain(node=source)
        assert result.staying == []
        assert result.moved == list(before.values()).count(source) > 0
        assert set(nodes_of(client).values()) == {other(source)}
        with client.session("echo") as session:
            [found] = [s for s in client.sessions() if s["context"] == session.context]
            assert found["node"] == other(source)
        for number in range(12):
            with client.session("echo", session_id=f"s{number}", raw=True) as session:
                assert session.context.attached
                metadata = session.chat("third").metadata
                assert metadata["input_tokens"] > tokens[f"s{number}"]
        assert client.stats()["nodes"][source]["draining"]
        with Client(fleet.daemons[source].socket) as direct:
            assert direct.sessions(dormant=True, all_users=True) == []
            assert not direct.stats()["draining"], "the node's daemon goes on"


def test_an_open_context_goes_on_without_the_client(fleet: RunningFleet) -> None:
    with (
        Client(fleet.socket) as operator,
        Client(fleet.socket) as client,
        client.session("echo", session_id="open", raw=True) as session,
    ):
        handle = session.context
        assert session.chat("first") == "first"
        node = nodes_of(client)["open"]
        for _ in range(2):  # away, and back again
            assert operator.drain(node=node).moved == 1
            operator.drain(node=node, undo=True)
            node = other(node)
            assert nodes_of(client)["open"] == node
            before = client.history(handle).session["tokens"]
            assert session.chat("more").metadata["input_tokens"] > before
            [found] = client.sessions()
            assert found["context"] == session.context == handle
        assert session.rewind(3).turns == 0
        assert not client.cancel(handle)
    with Client(fleet.socket) as client, client.session("echo", session_id="open") as again:
        assert again.context.attached


def test_a_turn_under_way_ends_first(fleet: RunningFleet) -> None:
    with (
        Client(fleet.socket) as operator,
        Client(fleet.socket) as client,
        client.session("slow", session_id="turn", raw=True) as session,
    ):
        stream = session.stream(TEXT)
        pieces = [next(iter(stream))]
        node = nodes_of(operator)["turn"]
        [staying] = operator.drain(node=node).staying
        assert staying["session_id"] == "turn" and staying["error"]["name"] == "SessionBusy"
        with RawClient(fleet.socket) as raw:
            number = raw.start_request("drain", node=node, wait_s=30.0)
            pieces += stream
            assert raw.wait_result(number)["moved"] == 1
        assert "".join(pieces) == TEXT
        assert nodes_of(operator)["turn"] == other(node)
        assert session.chat("next") == "next"


def test_a_pulled_turn_is_not_cut(fleet: RunningFleet) -> None:
    with (
        Client(fleet.socket) as operator,
        Client(fleet.socket) as client,
        client.session("echo", session_id="pull", raw=True) as session,
    ):
        client.set_input(session.context, 0, "abc")
        client.compute_single(session.context)
        node = nodes_of(operator)["pull"]
        [staying] = operator.drain(node=node).staying
        assert staying["error"]["name"] == "SessionBusy"
        client.compute_single(session.context)
        assert client.get_output(session.context) == b"ab"


def test_a_session_that_no_node_takes_stays_and_goes_on(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        write(client, "stays", "text")
        node = nodes_of(client)["stays"]
        client.drain(node=other(node))
        [staying] = client.drain(node=node).staying
        assert staying["session_id"] == "stays" and staying["error"]["name"] == "Busy"
        assert nodes_of(client)["stays"] == node
        write(client, "stays", "more")
        with pytest.raises(Busy), client.session("echo", session_id="new"):
            pass


def test_only_operators_drain_nodes(fleet: RunningFleet) -> None:
    with Client(fleet.socket, on_behalf_of="@ada") as ada:
        with pytest.raises(PermissionDenied):
            ada.drain(node="a")
        with pytest.raises(PermissionDenied):
            ada.drain(node="a", undo=True)
    with Client(fleet.socket) as client, pytest.raises(NotFound):
        client.drain(node="c")


def test_sessions_keep_their_user_and_label(fleet: RunningFleet) -> None:
    with (
        Client(fleet.socket, on_behalf_of="@ada", label="home") as ada,
        Client(fleet.socket) as operator,
    ):
        write(ada, "diary", "text")
        node = nodes_of(ada)["diary"]
        assert operator.drain(node=node).staying == []
        assert nodes_of(ada) == {"diary": other(node)}
        write(ada, "diary", "more")
        assert ada.delete_session(session_id="diary")


def test_a_drain_holds_over_a_restart_of_the_entry(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        client.drain(node="a")
    fleet.kill_entry()
    fleet.start_entry()
    with Client(fleet.socket) as client:
        assert client.stats()["nodes"]["a"]["draining"]
        write(client, "one", "text")
        assert nodes_of(client) == {"one": "b"}


def test_the_command_drains_a_node_and_uses_it_again(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        write(client, "one", "text")
        node = nodes_of(client)["one"]
        done = inferd("drain", "--node", node, "--json", socket=fleet.socket)
        assert json.loads(done.stdout)["moved"] == 1
        with client.session("echo"):
            done = inferd("drain", "--node", other(node), "--wait", "0", socket=fleet.socket)
            assert done.returncode != 0 and "without an id" in done.stdout
        done = inferd("drain", "--node", node, "--undo", socket=fleet.socket)
        assert done.returncode == 0
        assert not client.stats()["nodes"][node]["draining"]
