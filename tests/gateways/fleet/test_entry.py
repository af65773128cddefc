"""An entry with two nodes: every kind of call, through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import (
    Busy,
    InferdError,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    SessionBusy,
    UnsupportedOperation,
)
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.raw import RawClient
from tests.waiting import wait_until

SESSIONS_MAX = 20
CONFIG = (
    f"[daemon]\nsessions-max = {SESSIONS_MAX}\n"
    + echo_model("echo")
    + echo_model("slow", step_ms=20, slots=2)
    + echo_model("rank", ranks=True)
)
TEXT = "a text that takes the slow model some seconds to echo, since each letter is a token of it. "
TEXT *= 2


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, "a", "b") as running:
        yield running


@pytest.fixture
def client(fleet: RunningFleet) -> Iterator[Client]:
    with Client(fleet.socket) as connected:
        yield connected


def node_of(handle: int) -> int:
    """Return the part of a handle that stands for its node's daemon."""
    return handle >> 32


def test_contexts_of_one_graph_are_on_all_nodes(client: Client, fleet: RunningFleet) -> None:
    fleet.load("slow")
    graph = client.load_by_name("slow")
    contexts = [client.init_execution_context(graph) for _ in range(4)]
    assert sorted(map(node_of, contexts)) == [1, 1, 2, 2]
    for name in fleet.daemons:
        with Client(fleet.daemons[name].socket) as direct:
            assert len(direct.sessions(all_users=True)) == 2
    client.unload(graph)
    for name in fleet.daemons:
        with Client(fleet.daemons[name].socket) as direct:
            wait_until(lambda d=direct: all(m["leases"] == 0 for m in d.models()))  # type: ignore[misc]


def test_chats_are_titled_kept_searched_deleted_and_restored_on_their_nodes(
    client: Client, fleet: RunningFleet
) -> None:
    fleet.load("echo")
    names = [f"chat-{number}" for number in range(4)]
    for name in names:
        with client.session("echo", session_id=name) as session:
            session.chat(f"question about {name}")
    updated = [client.update_session(name, title=name.upper(), kept=True) for name in names]
    assert {session["node"] for session in updated} <= {"a", "b"}
    assert {s["title"] for s in client.sessions(dormant=True, search="chat-")} == {
        name.upper() for name in names
    }
    assert client.list_sessions().dormant_sessions_max == 2 * 1000
    for name in names:
        assert client.delete_session(session_id=name, undo_s=60)
        assert client.sessions(dormant=True, session_id=name) == []
        assert client.restore_session(name)["title"] == name.upper()
        with client.session("echo", session_id=name) as session:
            assert session.attached, "it is still on its node"
        assert client.delete_session(session_id=name)
    assert client.list_deletions() == []
    with pytest.raises(NotFound):
        client.update_session("chat-0", title="x")


def test_each_load_is_a_graph_of_its_own(client: Client, fleet: RunningFleet) -> None:
    fleet.load("echo")
    first, second = client.load_by_name("echo"), client.load("echo", target="cpu")
    context = client.init_execution_context(second)
    client.set_input(context, 0, "hello")
    client.unload(first)
    client.compute(context)
    assert client.get_output(context) == b"hello"
    client.init_execution_context(second)
    with pytest.raises(UnsupportedOperation):
        client.load("echo", target="tpu")


def test_turns_run_on_all_nodes_at_once(client: Client, fleet: RunningFleet) -> None:
    fleet.load("slow")
    sessions = [client.session("slow") for _ in range(4)]
    streams = []
    for session in sessions:
        session.__enter__()
        streams.append(session.stream(TEXT))
        next(iter(streams[-1]))
    tasks = client.queue()
    assert sorted(task["node"] for task in tasks) == ["a", "a", "b", "b"]
    assert {task["state"] for task in tasks} == {"running"}
    assert {task["context"] for task in tasks} == {session.context for session in sessions}
    for session, stream in zip(sessions, streams, strict=True):
        stream.close()
        session.__exit__(None, None, None)


def test_a_session_is_continued_on_its_node(client: Client, fleet: RunningFleet) -> None:
    with client.session("echo", session_id="diary") as session:
        session.chat("one")
        home, tokens = node_of(session.context), client.sessions()[0]["tokens"]
    with Client(fleet.socket) as other, other.session("echo", session_id="diary") as session:
        assert node_of(session.context) == home
        assert session.context.attached
        (found,) = other.sessions()
        by_id = other.history(session_id="diary")
        assert by_id.messages == session.history().messages and len(by_id.messages) == 2
        assert by_id.session["context"] == session.history().session["context"] == session.context
        assert (found["session_id"], found["tokens"]) == ("diary", tokens)
        with pytest.raises(SessionBusy), client.session("echo", session_id="diary"):
            pass
    assert client.delete_session(session_id="diary")
    assert client.sessions(dormant=True) == []
    assert not client.delete_session(session_id="diary")
    with pytest.raises(InferdError):
        client.history(session_id="diary")


def test_one_new_session_id_that_two_open_at_once_is_one_session(fleet: RunningFleet) -> None:
    with RawClient(fleet.socket) as one, RawClient(fleet.socket) as two:
        started = []
        for raw in (one, two):
            graph = raw.call("load_by_name", name="echo")["graph"]
            call = "init_execution_context_with_session_id"
            started.append((raw, (call, {"graph": graph, "session_id": "both"})))
        numbers = [raw.start_request(call, **params) for raw, (call, params) in started]
        outcomes = []
        for (raw, _), number in zip(started, numbers, strict=True):
            try:
                outcomes.append(sorted(raw.wait_result(number)))
            except SessionBusy:
                outcomes.append(["busy"])
        assert sorted(outcomes) == [["busy"], ["context"]]
        assert one.call("delete_session", session_id="both")["deleted"]


def test_a_branch_with_an_id_is_continued_on_its_node(client: Client) -> None:
    with client.session("echo") as session:
        session.chat("one")
        branches = client.fork_session(session.context, session_ids=["branch"])
        home = node_of(session.context)
        assert node_of(branches.contexts[0]) == home
        client.finalize_execution_context(branches.contexts[0], keep=True)
    with client.session("echo", session_id="branch") as session:
        assert (node_of(session.context), session.context.attached) == (home, True)
    client.delete_session(session_id="branch")


def test_a_session_from_a_state_begins_on_its_node(client: Client) -> None:
    with client.session("echo") as session:
        session.chat("one")
        home = node_of(session.context)
        client.save_state(session.context, "start")
    try:
        (state,) = client.list_states()
        assert (state["name"], state["node"]) == ("start", "ab"[home - 1])
        for _ in range(3):
            with client.session("echo", from_state="start") as session:
                assert node_of(session.context) == home
    finally:
        assert client.delete_state("start")
    assert client.list_states() == []


def test_answers_are_cancelled_by_the_contexts_in_their_event(fleet: RunningFleet) -> None:
    with RawClient(fleet.socket) as raw, Client(fleet.socket) as other:
        graph = raw.call("load_by_name", name="slow")["graph"]
        context = raw.call("init_execution_context", graph=graph)["context"]
        number = raw.start_request("answers", context=context, prompt=TEXT, n=2)
        kind, request, event = raw.read_message()
        assert (kind, request, event["contexts"][0]) == (4, number, context)
        wait_until(lambda: other.cancel(event["contexts"][1]))  # it begins after the event
        answers = raw.wait_result(number)["answers"]
        assert [answer["error"] is None for answer in answers] == [True, False]


def test_a_turn_is_cancelled_from_another_connection(client: Client, fleet: RunningFleet) -> None:
    with client.session("slow") as session:
        stream = session.stream(TEXT)
        next(iter(stream))
        with Client(fleet.socket) as other:
            assert other.cancel(session.context)
        with pytest.raises(Exception, match="cancelled"):
            list(stream)


def test_models_are_listed_once_with_their_nodes(client: Client) -> None:
    with client.session("echo"):
        models: dict[str, Any] = {model["name"]: model for model in client.models()}
    assert sorted(models) == ["echo", "rank", "slow"]
    nodes = models["echo"]["nodes"]
    assert [entry["node"] for entry in nodes] == ["a", "b"]
    assert models["echo"]["leases"] == sum(entry["leases"] for entry in nodes) >= 1


def test_statistics_are_of_all_nodes(client: Client, fleet: RunningFleet) -> None:
    stats = client.stats()
    assert stats["sessions_max"] == 2 * SESSIONS_MAX
    assert set(stats["nodes"]) == {"a", "b"}
    assert stats["nodes"]["a"]["address"] == fleet.relays["a"].address
    assert {sample["node"] for sample in stats["metrics"]["slots"]} == {"a", "b"}
    assert client.server.limits.sessions_max == 2 * SESSIONS_MAX


def test_operations_on_a_model_reach_all_nodes(client: Client) -> None:
    client.pin("slow")
    models: list[Any] = client.models()
    (model,) = [model for model in models if model["name"] == "slow"]
    assert [entry["pinned"] for entry in model["nodes"]] == [True, True]
    client.unpin("slow")
    with pytest.raises(ModelNotFound):
        client.pin("missing")


def test_embeddings_and_tokens_come_from_any_node(client: Client) -> None:
    vectors = client.embed("echo", ["one", "two"])
    assert len(vectors) == 2
    graph = client.load_by_name("echo")
    assert client.detokenize(graph, client.tokenize(graph, "text")) == b"text"


def test_documents_are_ranked_by_any_node(client: Client) -> None:
    documents = [f"text {number}" for number in range(300)]
    ranking = client.rerank("rank", "a query", documents, top_n=5)
    assert [one.index for one in ranking] == [
        one.index for one in client.rerank("rank", "a query", documents)
    ][:5]
    with pytest.raises(UnsupportedOperation, match="ranks no documents"):
        client.rerank("echo", "a query", documents)


def test_a_full_fleet_is_busy_with_the_nodes_time_to_retry(client: Client) -> None:
    graph = client.load_by_name("echo")
    contexts = [client.init_execution_context(graph) for _ in range(2 * SESSIONS_MAX)]
    wait_until(lambda: all(n["sessions"] == SESSIONS_MAX for n in client.stats()["nodes"].values()))
    with pytest.raises(Busy) as caught:
        client.init_execution_context(graph)
    assert caught.value.data["sessions_max"] == SESSIONS_MAX, "it is the node's own error"
    assert caught.value.retry_after_s > 0
    with Client(client.path) as waiting:
        other = waiting.load_by_name("echo")
        with ThreadPoolExecutor(1) as pool:
            opened = pool.submit(waiting.init_execution_context, other, queue_timeout=30.0)
            wait_until(lambda: client.stats()["sessions_waiting"] == 1)
            waits_at = {n: s["sessions"] for n, s in client.stats()["nodes"].items()}
            assert sum(waits_at.values()) >= 2 * SESSIONS_MAX
            for context in contexts:
                client.finalize_execution_context(context)
            assert opened.result() >> 32 in (1, 2)


def test_what_does_not_exist_is_refused(client: Client) -> None:
    with pytest.raises(ModelNotFound) as caught:
        client.load_by_name("missing")
    assert "echo" in caught.value.data["models"]
    for handle in (0, 5, 1 << 32, (7 << 32) + 1, (1 << 64) - 1):
        with pytest.raises(InvalidArgument):
            client.get_output(handle)
        with pytest.raises(InvalidArgument):
            client.tokenize(handle, "text")


def shown(fleet: RunningFleet, *arguments: str) -> list[str]:
    """Return the lines that a command prints."""
    with inferd_process(*arguments, socket=fleet.socket) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    return str(output.decode()).splitlines()


def test_commands_show_all_nodes_and_one(client: Client, fleet: RunningFleet) -> None:
    fleet.load("slow")
    with client.session("slow") as one, client.session("slow", session_id="shown"):
        stream = one.stream(TEXT)
        next(iter(stream))
        (running,) = client.queue()
        lines = shown(fleet, "ps")
        assert lines[0].startswith("NODE   NAME") and {line[0] for line in lines[1:3]} <= {"a", "b"}
        assert shown(fleet, "queue")[1].split()[:2] == [running["node"], "slow"]
        idle = "ab".replace(running["node"], "")
        assert len(shown(fleet, "queue", "--node", idle)) == 1
        assert len(shown(fleet, "models")) == 7
        assert [line.split()[0] for line in shown(fleet, "models", "--node", "b")[1:]] == [
            "b",
            "b",
            "b",
        ]
        assert any("shown" in line for line in shown(fleet, "sessions"))
        top = shown(fleet, "top", "--once", "-n", "0.2")
        assert any(line.split()[:3] == [running["node"], "-", "running"] for line in top)
        assert {line.split()[0] for line in top if " ready " in line} == {"a", "b"}
        [own] = [shown(fleet, "top", "-n", "0.2", "--node", node) for node in idle]
        assert f", node {idle}, pid " in own[0] and "tasks     0 running" in own[2]
        assert not any(line.split()[:1] == [running["node"]] for line in own)
        stream.close()
    client.delete_session(session_id="shown")
    nodes = shown(fleet, "fleet", "nodes")
    assert [line.split()[:3] for line in nodes[1:]] == [
        [name, relay.address, "ready"] for name, relay in fleet.relays.items()
    ]
    assert any(line.startswith("slow") for line in shown(fleet, "stats", "--node", "a"))
    assert shown(fleet, "status")[0].startswith("inferd/")
    for command in ("ps", "stats", "top"):
        with inferd_process(command, "--node", "c", socket=fleet.socket) as process:
            _, errors = process.communicate()
        assert process.returncode == 1 and b"the nodes are a, b" in errors
