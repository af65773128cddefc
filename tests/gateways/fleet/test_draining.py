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
from tests.waiting import wait_until

CONFIG = echo_model("echo", slots=4) + echo_model("slow", step_ms=20, slots=2)
TEXT = "a text that takes the slow model a second or two to echo"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A fleet for all tests; after each of them, all nodes are used and no session is left."""
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, "a", "b") as running:
        yield running


@pytest.fixture(autouse=True)
def clean(fleet: RunningFleet) -> Iterator[None]:
    yield
    fleet.clear()


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
            assert done.exit_code != 0 and "without an id" in done.stdout
        done = inferd("drain", "--node", node, "--undo", socket=fleet.socket)
        assert done.exit_code == 0
        assert not client.stats()["nodes"][node]["draining"]


def restart(fleet: RunningFleet, member: str, source: str) -> None:
    """Kill a member of the fleet by SIGKILL, and start it again."""
    if member == "entry":
        fleet.kill_entry()
        fleet.start_entry()
        return
    node = other(source) if member == "target" else source
    if member == "relay":
        fleet.kill_relay(node)
        fleet.until_noted(f"node {node} is lost")
        fleet.start_relay(node)
    else:
        fleet.daemons[node].kill()
        fleet.daemons[node].start_again()
    fleet.until_noted(f"node {node} serves")


def is_settled(fleet: RunningFleet) -> bool:
    """Return whether no daemon has a session that moves."""
    for daemon in fleet.daemons.values():
        with Client(daemon.socket) as direct:
            listed = direct.sessions(all_users=True, dormant=True)
            if any(s["transfer"] for s in listed if s["state"] != "copy"):
                return False
    return True


@pytest.mark.parametrize("member", ["source", "target", "relay", "entry"])
@pytest.mark.parametrize("released", [False, True])
def test_an_interrupted_move_ends_on_one_node(
    fleet: RunningFleet, released: bool, member: str
) -> None:
    with Client(fleet.socket) as client:
        write(client, "half", "first", "second")
        source = nodes_of(client)["half"]
    target = other(source)
    with (
        Client(fleet.daemons[source].socket) as here,
        Client(fleet.daemons[target].socket) as there,
    ):
        part = here.export_session("half", "t", peer=target)
        there.import_session("half", "t", part.data, part.size, peer=source)
        if released:
            here.end_transfer("t", "release")
        restart(fleet, member, source)
        wait_until(lambda: is_settled(fleet))
    with Client(fleet.socket) as client:
        assert nodes_of(client) == {"half": target if released else source}
        with client.session("echo", session_id="half", raw=True) as session:
            assert session.context.attached
            assert session.rewind(2).turns == 0, "both turns are there, once"


@pytest.mark.parametrize("member", ["source", "target", "relay", "entry"])
def test_a_kill_during_a_drain_loses_and_doubles_nothing(fleet: RunningFleet, member: str) -> None:
    names, source = [f"s{number}" for number in range(8)], "a"
    with Client(fleet.socket) as client:
        client.drain(node=other(source))
        for name in names:
            write(client, name, "first", "second")
        client.drain(node=other(source), undo=True)
        assert nodes_of(client) == dict.fromkeys(names, source)
    with RawClient(fleet.socket) as raw:
        raw.start_request("drain", node=source)
        with Client(fleet.daemons[source].socket) as direct:
            wait_until(lambda: len(direct.sessions(dormant=True)) < len(names))
        restart(fleet, member, source)
    with Client(fleet.socket) as client:
        while client.drain(node=source, wait=10).staying:
            pass
        wait_until(lambda: is_settled(fleet))
        assert nodes_of(client) == dict.fromkeys(names, other(source))
        for name in names:
            with client.session("echo", session_id=name, raw=True) as session:
                assert session.context.attached
                assert session.rewind(2).turns == 0, "both turns are there, once"
