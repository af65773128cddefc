"""Rules of access in a daemon that runs: who may call what, up to which class and how much.

Tests without a second user apply a rule to the daemon's own user.
"""

from __future__ import annotations

import grp
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from inferd.backends.errors import (
    Cancelled,
    InferdError,
    InvalidArgument,
    PermissionDenied,
    QuotaExceeded,
)
from inferd.cli.app import exit_code
from inferd.cli.options import EXIT_BUSY
from inferd.ipc.server.listener import UnixListener
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.manager import Manager, manager_of
from tests.daemon.other_users import ADA, BOB, as_user, client_of, daemon_for_all
from tests.daemon.service.test_reload import reload
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

MODELS = echo_model("slow", slots=1, step_ms=5)
STAFF = 4711
LONG = {"prompt": "z" * 2000, "raw": True}
"""Ten seconds of talk by the slow model."""
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "load_by_name": ("use", {"name": "echo"}),
    "unload_model": ("manage", {"name": "echo"}),
    "pin": ("manage", {"name": "echo"}),
    "unpin": ("manage", {"name": "echo"}),
    "swap": ("manage", {"name": "echo", "to": "slow"}),
    "add_adapter": ("manage", {"name": "echo", "adapter": "a", "file": "f"}),
    "remove_adapter": ("manage", {"name": "echo", "adapter": "a"}),
    "sessions": ("see-all", {"all": True}),
    "queue": ("see-all", {"all": True}),
}
"""By the right that they take: `drain` is asked for at the end."""


def mine(rule: str) -> str:
    """Return a configuration with a rule for the daemon's own user."""
    return f"{MODELS}\n[access.own]\nusers = [{os.getuid()}]\n{rule}\n"


@contextmanager
def ruled(rule: str) -> Iterator[tuple[RunningDaemon, RawClient]]:
    """Run a daemon with a rule for its own user, who is connected."""
    with running_daemon(mine(rule)) as daemon, RawClient(daemon.socket) as client:
        yield daemon, client


@contextmanager
def managed() -> Iterator[tuple[RunningDaemon, Manager, RawClient]]:
    """Run a daemon without a rule, whose configuration can be read again."""
    with (
        running_daemon(MODELS) as daemon,
        manager_of(daemon) as manager,
        RawClient(daemon.socket) as client,
    ):
        yield daemon, manager, client


def refusal_of(client: RawClient, call: str, **params: Any) -> InferdError | None:
    try:
        client.call(call, **params)
    except InferdError as exc:
        return exc
    return None


@pytest.mark.parametrize("right", ["use", "manage", "see-all", "drain"])
def test_a_rule_allows_what_it_says_and_nothing_else(right: str) -> None:
    with ruled(f"allow = ['{right}']") as (_, client):
        for call, (needs, params) in CALLS.items():
            error = refusal_of(client, call, **params)
            assert isinstance(error, PermissionDenied) is (needs != right), (call, error)
            if needs != right:
                assert isinstance(error, PermissionDenied)
                assert error.data == {"right": needs} and f"allow = ['{needs}']" in error.hint
        assert client.call("models")["models"] and client.call("stats")["stats"]
        assert client.call("sessions")["sessions"] == client.call("queue")["tasks"] == []
        refused = isinstance(refusal_of(client, "drain", stop=True), PermissionDenied)
        assert refused is (right != "drain")


def test_a_class_above_the_highest_is_refused_in_a_session_and_in_every_call() -> None:
    with (
        running_daemon(mine("priority-max = 'normal'")) as daemon,
        RawClient(daemon.socket) as client,
    ):
        graph = client.call("load_by_name", name="echo")["graph"]
        context = client.call("init_execution_context", graph=graph)["context"]
        here: dict[str, Any] = {"context": context, "priority": "high"}
        tensor = {"data": b"x", "dimensions": [1], "type": 3}
        for call, params in {
            "set_options": here,
            "compute": here,
            "compute_single": here,
            "prompt_compute": {**here, "prompt": "x"},
            "run_inference": {**here, "tensor": tensor},
            "stream": {**here, "prompt": "x"},
            "chat": {**here, "prompt": "x"},
            "answers": {**here, "prompt": "x"},
            "resume": here,
            "embed": {"graph": graph, "texts": ["x"], "priority": "urgent"},
            "rerank": {"graph": graph, "query": "x", "documents": ["y"], "priority": "urgent"},
        }.items():
            error = refusal_of(client, call, **params)
            assert isinstance(error, PermissionDenied), (call, error)
            assert error.hint.startswith("use normal, which is the highest"), call
            assert error.data == {"priority_max": "normal"}
        client.call("set_options", context=context, priority="low")
        said = client.call("chat", context=context, prompt="x", raw=True, priority="normal")
        assert said["text"] == b"x"
        with pytest.raises(InvalidArgument, match="there is no priority"):
            client.call("chat", context=context, prompt="x", priority="highest")


def test_a_session_with_a_class_from_before_is_refused_until_it_takes_another() -> None:
    with managed() as (daemon, manager, client):
        context = client.context()
        client.call("set_options", context=context, priority="urgent")
        reload(daemon, manager, mine("priority-max = 'high'"))
        error = refusal_of(client, "chat", context=context, prompt="x", raw=True)
        assert isinstance(error, PermissionDenied) and "use high" in error.hint
        client.call("set_options", context=context, priority="high")
        assert client.call("chat", context=context, prompt="x", raw=True)["text"] == b"x"


def test_a_running_turn_goes_on_past_the_tokens_of_a_minute_and_the_next_is_refused() -> None:
    text = "many words that are said to their very end " * 20
    turn: dict[str, Any] = {"prompt": text, "raw": True, "options": {"cache-prompt": False}}
    with managed() as (daemon, manager, client):
        metadata = client.call("chat", context=client.context(), **turn)["metadata"]
        took = metadata["input_tokens"] + metadata["output_tokens"]
        limit = took // 2
        reload(daemon, manager, mine(f"tokens-per-minute = {limit}"))
        context = client.context()
        assert client.call("chat", context=context, **turn)["text"].decode() == text
        for call in ("compute", "compute_single", "stream", "chat"):
            error = refusal_of(client, call, context=context)
            assert isinstance(error, QuotaExceeded), (call, error)
            assert error.data["bound"] == "access.own.tokens-per-minute"
            assert limit < error.data["tokens"] <= took
            assert error.retry_after_s == pytest.approx(
                (error.data["tokens"] + 1 - limit) * 60 / limit, rel=0.02
            )
        reload(daemon, manager, mine("sessions-max = 9"))
        assert client.call("chat", context=context, **turn)["text"].decode() == text


def test_embeddings_and_answers_count_and_a_call_is_admitted_as_a_whole() -> None:
    with (
        running_daemon(mine("tokens-per-minute = 60")) as daemon,
        RawClient(daemon.socket) as client,
    ):
        graph = client.call("load_by_name", name="echo")["graph"]
        texts = ["a text of several words, to be turned into a vector " * 4] * 40
        assert len(client.call("embed", graph=graph, texts=texts)["embeddings"]) == 40
        for call, params in {
            "embed": {"graph": graph, "texts": ["x"]},
            "answers": {"context": client.context(), "prompt": "x", "n": 2},
        }.items():
            error = refusal_of(client, call, **params)
            assert isinstance(error, QuotaExceeded) and error.retry_after_s > 1, call


def test_several_answers_are_one_call() -> None:
    with (
        running_daemon(mine("tokens-per-minute = 60")) as daemon,
        RawClient(daemon.socket) as client,
    ):
        context, text = client.context(), "said by each of them, word by word " * 10
        found = client.call("answers", context=context, prompt=text, n=4, raw=True)["answers"]
        assert [answer["text"].decode() for answer in found] == [text] * 4
        assert isinstance(refusal_of(client, "compute", context=context), QuotaExceeded)


def test_tasks_that_wait_are_bounded_by_the_rule() -> None:
    with (
        running_daemon(mine("tasks-waiting-max = 2")) as daemon,
        RawClient(daemon.socket) as client,
    ):
        contexts = [client.context("slow") for _ in range(4)]
        first = client.start_request(
            "stream", **LONG, context=contexts[0], priority="high", credit=1000
        )
        client.events.append(client.read_message())
        turns = [
            client.start_request("stream", context=c, prompt="z", raw=True) for c in contexts[1:3]
        ]
        wait_until(lambda: client.call("stats")["stats"]["waiting"] >= 2)
        error = refusal_of(client, "chat", context=contexts[3], prompt="z", raw=True)
        assert isinstance(error, QuotaExceeded)
        assert error.data["bound"] == "access.own.tasks-waiting-max"
        assert error.retry_after_s >= 0.1
        client.call("cancel", context=contexts[0])
        with pytest.raises(Cancelled):
            client.wait_result(first)
        for turn in turns:
            assert client.wait_result(turn)


def test_sessions_are_bounded_by_the_rule() -> None:
    with ruled("sessions-max = 2") as (daemon, client):
        first = client.context()
        with RawClient(daemon.socket) as other:
            other.context()
            error = refusal_of(client, "fork_session", context=first)
            assert isinstance(error, QuotaExceeded)
            assert error.data["bound"] == "access.own.sessions-max"
        # The daemon must have seen that the other connection is gone.
        wait_until(lambda: refusal_of(client, "fork_session", context=first) is None)
        client.call("finalize_execution_context", context=first)
        client.context()
        assert exit_code(error) == EXIT_BUSY


def test_a_rule_that_is_read_again_holds_for_connections_that_are_open() -> None:
    with managed() as (daemon, manager, client):
        context = client.context("slow")
        text = "goes on " * 20
        turn = client.start_request("stream", context=context, prompt=text, raw=True, credit=1000)
        client.events.append(client.read_message())
        reload(daemon, manager, mine("allow = ['see-all']"))
        assert isinstance(refusal_of(client, "load_by_name", name="echo"), PermissionDenied)
        client.wait_result(turn)
        said = b"".join(event[2].get("text", b"") for event in client.events)
        assert said.decode() == text, "a running turn is not cut"
        wrong = mine("allow = ['manag']")
        assert "config" in reload(daemon, manager, wrong)
        assert isinstance(refusal_of(client, "load_by_name", name="echo"), PermissionDenied)
        assert client.call("sessions", all=True)["sessions"]
        client.call("cancel", context=context)  # giving up takes no right
        client.call("finalize_execution_context", context=context)
        reload(daemon, manager, MODELS)
        assert refusal_of(client, "load_by_name", name="echo") is None


# Other users.


@contextmanager
def shared(rules: str = "") -> Iterator[RunningDaemon]:
    with daemon_for_all(MODELS + rules) as daemon:
        yield daemon


def test_without_rules_members_use_models_up_to_high_and_the_daemons_user_may_everything() -> None:
    with shared() as daemon, client_of(daemon, ADA) as ada, RawClient(daemon.socket) as own:
        for call, (needs, params) in CALLS.items():
            error = refusal_of(ada, call, **params)
            assert isinstance(error, PermissionDenied) is (needs != "use"), (call, error)
            assert not isinstance(refusal_of(own, call, **params), PermissionDenied)
        context = ada.context("slow")
        said = ada.call("chat", context=context, prompt="x", raw=True, priority="high")
        assert said["text"] == b"x"
        error = refusal_of(ada, "chat", context=context, prompt="x", raw=True, priority="urgent")
        assert isinstance(error, PermissionDenied) and "use high" in error.hint
        assert own.call("chat", context=own.context(), prompt="x", raw=True, priority="urgent")
        assert isinstance(refusal_of(ada, "drain", stop=True), PermissionDenied)


RULES = f"""
[access.staff]
groups = [{STAFF}]
allow = ["use", "manage"]
[access.bob]
users = [{BOB}]
sessions-max = 1
[access.others]
allow = []
"""


def test_groups_are_those_that_the_kernel_reports_for_the_connection() -> None:
    with shared(RULES) as daemon:
        with client_of(daemon, ADA, [7, STAFF]) as ada, client_of(daemon, STAFF) as by_its_own:
            for client in (ada, by_its_own):
                assert refusal_of(client, "pin", name="echo") is None
        with client_of(daemon, BOB, [STAFF]) as bob:
            assert isinstance(refusal_of(bob, "pin", name="echo"), PermissionDenied)
            bob.context()
            assert isinstance(refusal_of(bob, "load_by_name", name="echo"), type(None))
            with pytest.raises(QuotaExceeded):
                bob.context()
        with as_user(ADA, [7]), RawClient(daemon.socket, hello=False) as stranger:
            error = stranger.goodbye()
        assert isinstance(error, PermissionDenied)
        assert error.message == f"user {ADA} may do nothing here"


def test_more_groups_than_can_be_asked_for_are_those_of_the_user() -> None:
    groups = range(STAFF, STAFF + 300)
    with (
        shared(RULES) as daemon,
        as_user(ADA, groups),
        RawClient(daemon.socket, hello=False) as nameless,
    ):
        assert isinstance(nameless.goodbye(), PermissionDenied)


# The socket.


def test_the_socket_has_its_mode_and_its_group() -> None:
    config = f"[daemon]\nsocket-mode = '0660'\nsocket-group = '{group_of_root()}'\n"
    with running_daemon(config) as daemon:
        status = os.stat(daemon.socket)
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, os.getgid())
        assert stat.S_IMODE(os.stat(os.path.dirname(daemon.socket)).st_mode) == 0o755
        with RawClient(daemon.socket) as client:
            assert client.call("models")["models"]
    with running_daemon() as daemon:
        assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(daemon.socket)).st_mode) == 0o700


def group_of_root() -> str:
    return grp.getgrgid(os.getgid()).gr_name


def test_whom_the_mode_leaves_out_cannot_connect() -> None:
    with daemon_for_all(mode="0660") as daemon:
        with (
            socket.socket(socket.AF_UNIX) as refused,
            as_user(ADA),
            pytest.raises(PermissionError),
        ):
            refused.connect(daemon.socket)
        with client_of(daemon, ADA, [os.getgid()]) as member:
            assert member.call("models")["models"]


def test_a_group_that_the_daemon_may_not_set_is_reported_at_the_start() -> None:
    with tempfile.TemporaryDirectory(prefix="inferd-") as folder:
        os.chmod(folder, 0o777)
        path = f"{folder}/s"
        with as_user(ADA):
            listener = UnixListener(path, 0o660, STAFF)
            with pytest.raises(InvalidArgument, match=f"to the group {STAFF}") as caught:
                listener.bind()
            assert "socket-group" in caught.value.hint
            assert not os.path.exists(path), "half open it is not left behind"
            listener.close()
