"""Labels of programs over a real socket: fair shares, own sessions, and bounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import inferd
from inferd.backends.errors import InferdError, InvalidArgument, QuotaExceeded
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd as inferd_command
from tests.daemon.other_users import ADA, BOB, as_user, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import Closed, RawClient
from tests.waiting import wait_until

CONFIG = "quantum-tokens = 16\nlabels-user-max = 4\n" + echo_model("slow", slots=1, step_ms=2)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with daemon_for_all(CONFIG) as running:
        yield running


def labelled(daemon: RunningDaemon, label: str) -> RawClient:
    with as_user(ADA):
        return RawClient(daemon.socket, label=label)


def test_a_guest_with_many_contexts_does_not_delay_another_guest(daemon: RunningDaemon) -> None:
    with labelled(daemon, "crowd") as crowd, labelled(daemon, "single") as single:
        contexts = [crowd.context("slow") for _ in range(24)]
        context = single.context("slow")
        for one in contexts:
            crowd.start_request("stream", context=one, prompt="x" * 64, credit=1024)
        while len(crowd.call("queue")["tasks"]) < 24:
            pass  # each call is answered after the requests before it have begun
        single.call("stream", context=context, prompt="y" * 64, credit=1024)
        assert len(crowd.call("queue")["tasks"]) >= 16, "it was served in its turn"
        for one in contexts:
            crowd.call("cancel", context=one)


def test_a_label_sees_and_cancels_only_its_own_turns(daemon: RunningDaemon) -> None:
    with (
        labelled(daemon, "one") as one,
        labelled(daemon, "two") as two,
        client_of(daemon, ADA) as plain,
    ):
        context = one.context("slow")
        turn = one.start_request("stream", context=context, prompt="x" * 4000, credit=1)
        wait_until(lambda: one.call("queue")["tasks"])
        assert two.call("sessions")["sessions"] == two.call("queue")["tasks"] == []
        with pytest.raises(InvalidArgument):
            two.call("cancel", context=context)
        with pytest.raises(InvalidArgument):
            two.call("park", context=context)
        [task], [session] = (
            plain.call(c)[f] for c, f in (("queue", "tasks"), ("sessions", "sessions"))
        )
        assert task["label"] == session["label"] == "one", "without a label, all of the user's"
        assert plain.call("cancel", context=context) == {"cancelled": True}
        with pytest.raises(InferdError):
            one.wait_result(turn)


def test_a_session_belongs_to_its_label_also_after_a_restart() -> None:
    with running_daemon() as daemon:
        for label, text in (("one", "first"), ("two", "second"), ("", "third")):
            with (
                inferd.Client(daemon.socket, label=label) as client,
                client.session("echo", session_id="diary", raw=True) as session,
            ):
                session.chat(text)
        daemon.stop()
        daemon.start_again()
        with inferd.Client(daemon.socket, label="two") as two:
            assert [s["label"] for s in two.sessions(dormant=True)] == ["two"]
            assert two.delete_session(session_id="diary")
            assert not two.delete_session(session_id="diary")
        with inferd.Client(daemon.socket, label="three") as three:
            assert not three.delete_session(session_id="diary")
        with inferd.Client(daemon.socket) as plain:
            left = plain.sessions(dormant=True)
            assert sorted((s["label"], s["tokens"] > 0) for s in left) == [
                ("", True),
                ("one", True),
            ]
        with RawClient(daemon.socket, label="one") as one:
            graph = one.call("load_by_name", name="echo")["graph"]
            call = "init_execution_context_with_session_id"
            assert one.call(call, graph=graph, session_id="diary")["attached"]


def test_a_label_that_has_half_of_all_sessions_is_refused_with_the_bound_of_all() -> None:
    """Without a bound of its own, a user has that of all users together."""
    with daemon_for_all("sessions-max = 4\n") as daemon, labelled(daemon, "agent") as agent:
        for _ in range(2):
            agent.context("echo")
        with pytest.raises(QuotaExceeded) as caught:
            agent.context("echo")
    assert caught.value.message == (
        "you have 2 sessions open, 2 of them as 'agent'; the limit is 4"
    )
    assert caught.value.data["bound"] == "sessions-max"
    assert caught.value.data["sessions_max"] == 4


@pytest.mark.parametrize(
    "label", ["a/b", "a b", "\n", "x" * 65, "é", "-x", "..\0", "1000/guest", "\x1b[2J"]
)
def test_a_label_with_other_characters_is_refused(daemon: RunningDaemon, label: str) -> None:
    with labelled(daemon, label) as client:
        refusal = client.goodbye()
    assert isinstance(refusal, InvalidArgument) and refusal.hint
    assert refusal.data == {"label_characters_max": 64}
    with pytest.raises(InvalidArgument):
        inferd.Client(daemon.socket, label=label)


def test_a_refused_client_may_write_before_it_reads_the_reason(daemon: RunningDaemon) -> None:
    with labelled(daemon, "/") as client:
        assert isinstance(client.goodbye(), InvalidArgument)
        with pytest.raises(Closed):
            client.read_message()
        client.start_request("models")  # no BrokenPipeError


def test_the_labels_of_a_user_are_bounded_and_free_again_with_their_connections() -> None:
    with daemon_for_all("labels-user-max = 4\n") as daemon:
        clients = [labelled(daemon, f"agent{number}") for number in range(4)]
        for client in clients:
            client.call("models")
        with labelled(daemon, "agent4") as fifth:
            refusal = fifth.goodbye()
        assert isinstance(refusal, QuotaExceeded)
        data = refusal.data
        assert (data["bound"], data["labels"], data["labels_max"]) == ("labels-user-max", 4, 4)
        with labelled(daemon, "agent0") as again, client_of(daemon, ADA) as plain:
            again.call("models")
            [sample] = plain.call("stats")["stats"]["metrics"]["connection_labels"]
            assert sample["value"] == 4, "a label of two connections counts once"
        with client_of(daemon, BOB) as bob:
            bob.call("models")
        clients.pop().socket.close()
        with labelled(daemon, "agent0") as again:
            wait_until(lambda: again.call("stats")["stats"]["connections"] <= 4)
        with labelled(daemon, "agent4") as fifth:
            fifth.call("models")
        for client in clients:
            client.socket.close()


def test_commands_act_within_a_label_and_list_the_labels_of_a_user(daemon: RunningDaemon) -> None:
    def run(*arguments: str) -> str:
        result = inferd_command(*arguments, socket=daemon.socket)
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    assert run("run", "slow", "hi", "--raw", "--session", "notes", "--label", "cli-1").strip()
    run("run", "slow", "ho", "--raw", "--session", "notes", "--label", "cli-2")
    assert "cli-1" in run("sessions") and "cli-2" in run("sessions")
    one = run("sessions", "--label", "cli-1")
    assert "cli-1" in one and "cli-2" not in one and "LABEL" in one
    assert "no session" in run("rm-session", "notes", "--label", "cli-3")
    assert "deleted" in run("rm-session", "notes", "--label", "cli-1")
    assert "cli-2" in run("sessions") and "cli-1" not in run("sessions")
    assert "MODEL" in run("queue", "--label", "cli-1") or not run("queue", "--label", "cli-1")
    refused = inferd_command("sessions", "--label", "a/b", socket=daemon.socket)
    assert refused.exit_code == 1 and "label" in refused.output
