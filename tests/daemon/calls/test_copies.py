"""Copies of sessions at another daemon have each acknowledged turn, and can take its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import (
    Busy,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    SessionBusy,
)
from inferd.ipc.messages import PART_BYTES
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.raw import RawClient

CONFIG = echo_model("echo", slots=2, **{"ctx-size": 250_000}) + echo_model("slow", step_ms=10)
ADA = "@ada"
LONG = "a history of several parts " * 30_000
WITH_ID = "init_execution_context_with_session_id"


class Follower:
    """A client of `here` that stores all changes of its session `diary` at `there`."""

    def __init__(self, stack: ExitStack, here: RunningDaemon, there: RunningDaemon, user: str = ""):
        self.here, self.there, self.user = here, there, user
        self.client = stack.enter_context(RawClient(here.socket, copies=True, on_behalf_of=user))
        self.target = stack.enter_context(Client(there.socket))
        self.context = 0

    def open(self, model: str = "echo") -> None:
        graph = self.client.call("load_by_name", name=model)["graph"]
        self.context = self.client.call(WITH_ID, graph=graph, session_id="diary")["context"]

    def chat(self, text: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.call(
            "chat", context=self.context, prompt=text, raw=True, options={"n-predict": 50}
        )
        return answer

    def take(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the requests of the changes so far, with these."""
        found = [(number, change) for _, number, change in self.client.changes]
        self.client.changes.clear()
        return found

    def store(self, change: dict[str, Any]) -> None:
        """Store a change at the other daemon."""
        data, offset = change["data"], 0
        while offset < len(data):
            part = data[offset : offset + PART_BYTES]
            self.target.store_copy(
                "diary",
                change["stream"],
                change["number"],
                part,
                size=len(data),
                on_behalf_of=self.user,
                peer="here",
                offset=offset,
            )
            offset += len(part)

    def store_all(self) -> str:
        """Store all changes so far; return their stream."""
        changes = [change for _, change in self.take()]
        for change in changes:
            self.store(change)
        return str(changes[-1]["stream"])

    def keep(self, stream: str) -> None:
        """Make the copy the session, after the loss of the first daemon."""
        self.target.end_transfer(stream, "keep")


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[RunningDaemon, RunningDaemon]]:
    with running_daemon(CONFIG) as here, running_daemon(CONFIG) as there:
        yield here, there


@pytest.fixture
def follower(running: tuple[RunningDaemon, RunningDaemon]) -> Iterator[Follower]:
    """A follower; both daemons have no session when it ends."""
    with ExitStack() as stack:
        yield Follower(stack, *running)
    for daemon in running:
        with Client(daemon.socket) as client:
            client.delete_session(session_id="diary")


def states_of(client: Client) -> dict[str, str]:
    return {str(s["session_id"]): s["state"] for s in client.sessions(all_users=True, dormant=True)}


def test_a_turn_is_in_its_changes_before_its_reply(follower: Follower) -> None:
    follower.open()
    follower.client.call("set_options", context=follower.context, options={"n-predict": 9})
    [(request, options)] = follower.take()
    assert request > 0 and options["number"] == 1, "it came before the reply"
    answer = follower.chat("first text")
    beginning, end = follower.take()
    assert beginning[0] == 0, "no reply acknowledges the beginning of a turn"
    assert end[0] > request
    assert [change["number"] for _, change in (beginning, end)] == [2, 3]
    for change in (options, beginning[1], end[1]):
        follower.store(change)
    assert states_of(follower.target) == {"diary": "copy"}
    follower.keep(end[1]["stream"])
    with follower.target.session("echo", session_id="diary", raw=True) as session:
        found = session.history()
        assert found.session["turns"] == 1
        assert session.chat("next").metadata["input_tokens"] > answer["metadata"]["input_tokens"]
        assert session.rewind(2).turns == 0


def test_a_turn_that_runs_continues_from_its_copied_beginning(follower: Follower) -> None:
    text = "a text that takes a while"
    follower.open("slow")
    follower.client.begin_stream(follower.context, text)
    read = follower.client.streamed_text
    [(request, change)] = follower.take()
    assert request == 0
    follower.store(change)
    follower.keep(change["stream"])
    with follower.target.session("slow", session_id="diary") as session:
        assert session.context.attached and not session.metadata
        tokens = [token for event in follower.client.events for token in event[2]["tokens"]]
        rest = "".join(session.resume(tokens, read))
        assert read + rest == text


def test_a_copy_is_on_disk_when_its_call_is_answered(follower: Follower) -> None:
    follower.open()
    follower.chat("first")
    follower.chat("second")
    stream = follower.store_all()
    follower.there.kill()
    follower.there.start_again()
    with Client(follower.there.socket) as target:
        [found] = target.sessions(all_users=True, dormant=True)
        assert found["state"] == "copy" and found["turns"] == 2
        assert found["transfer"] == {"id": stream, "peer": "here"}
        follower.target = target
        follower.chat("third")
        changes = [change for _, change in follower.take()]
        follower.store(changes[0])  # the history with the new prompt: it begins anew
        with pytest.raises(NotFound, match="lacks only this change"):
            follower.store({**changes[1], "number": changes[1]["number"] + 1})
        follower.store(changes[1])
        follower.store(changes[1])  # once more, as after a lost answer
        follower.keep(stream)
        follower.there.kill()
        follower.there.start_again()
    with (
        Client(follower.there.socket) as target,
        target.session("echo", session_id="diary") as session,
    ):
        assert session.history().session["turns"] == 3
        assert session.rewind(3).turns == 0


def test_a_copy_cannot_be_opened_or_read(follower: Follower) -> None:
    follower.open()
    follower.chat("text")
    stream = follower.store_all()
    target = follower.target
    assert target.sessions(dormant=True) == []
    with (
        pytest.raises(SessionBusy, match="is on another daemon"),
        target.session("echo", session_id="diary"),
    ):
        pass
    with pytest.raises(NotFound):
        target.history(session_id="diary")
    with (
        Client(follower.there.socket, on_behalf_of=ADA) as ada,
        ada.session("echo", session_id="diary") as session,
    ):
        assert not session.context.attached, "users have names of their own"
        session.delete()
    assert states_of(target) == {"diary": "copy"}
    with pytest.raises(InvalidArgument, match="cannot end with"):
        target.end_transfer(stream, "release")
    target.end_transfer(stream, "drop")
    assert states_of(target) == {}


def test_a_whole_session_replaces_a_copy(follower: Follower) -> None:
    follower.open()
    follower.chat("first")
    follower.store_all()
    follower.chat("second")
    follower.take()  # these changes are lost
    with Client(follower.here.socket) as direct:
        whole = direct.read_copy("diary")
        follower.store({"stream": whole.stream, "number": whole.number, "data": whole.data})
        follower.chat("third")
        stream = follower.store_all()
        assert stream == whole.stream, "its changes go on"
        follower.client.call("finalize_execution_context", context=follower.context, keep=True)
        assert follower.take() == [], "nothing is new"
        whole = direct.read_copy("diary")
        assert whole.stream != stream, "a dormant session has no stream"
        follower.store({"stream": whole.stream, "number": whole.number, "data": whole.data})
    follower.keep(whole.stream)
    with follower.target.session("echo", session_id="diary") as session:
        assert session.history().session["turns"] == 3


def test_deletions_and_branches_are_changes(follower: Follower) -> None:
    follower.open()
    follower.chat("text")
    follower.take()
    branches = follower.client.call(
        "fork_session", context=follower.context, n=1, session_ids=["branch"]
    )
    [(request, change)] = follower.take()
    assert change["session_id"] == "branch" and change["data"] and request > 0
    follower.client.call("delete_session", context=branches["contexts"][0])
    [(_, change)] = follower.take()
    assert (change["session_id"], change["state"]) == ("branch", "deleted")
    follower.client.call("finalize_execution_context", context=follower.context)
    [(_, change)] = follower.take()
    assert (change["session_id"], change["state"]) == ("diary", "deleted")


def test_a_large_session_is_copied_in_parts(follower: Follower) -> None:
    follower.open()
    follower.chat(LONG[: len(LONG) // 4])
    changes = follower.take()
    assert len(changes[0][1]["data"]) > PART_BYTES
    for _, change in changes:
        follower.store(change)
    follower.keep(changes[-1][1]["stream"])
    with follower.target.session("echo", session_id="diary") as session:
        assert session.history().session["turns"] == 1


def test_a_session_that_is_not_stored_is_not_copied(follower: Follower) -> None:
    graph = follower.client.call("load_by_name", name="echo")["graph"]
    opened = follower.client.call(WITH_ID, graph=graph, session_id="diary", persist=False)
    follower.context = opened["context"]
    follower.chat("text")
    assert follower.take() == []
    with Client(follower.here.socket) as direct, pytest.raises(NotFound):
        direct.read_copy("diary")


def test_a_daemon_keeps_at_most_as_many_copies_as_dormant_sessions(follower: Follower) -> None:
    config = CONFIG + "[daemon]\ndormant-sessions-max = 1\n"
    with running_daemon(config) as full, Client(full.socket) as target:
        follower.open()
        follower.chat("text")
        changes = [change for _, change in follower.take()]

        def store(name: str) -> None:
            stream, data = changes[0]["stream"] + name, changes[0]["data"]
            target.store_copy(name, stream, 1, data, peer="here")

        store("diary")
        store("diary")
        with pytest.raises(Busy) as caught:
            store("another")
        assert caught.value.data["bound"] == "dormant-sessions-max"
        assert states_of(target) == {"diary": "copy"}


def test_an_unfit_change_is_refused(follower: Follower) -> None:
    follower.open()
    follower.chat("text")
    change = follower.take()[0][1]
    for data in (b"\2\0\0\0no", change["data"][:-1]):
        with pytest.raises(InvalidArgument):
            follower.store({**change, "data": data})
    other = change["data"].replace(b"\xa4echo", b"\xa4ohce", 1)
    with pytest.raises(ModelNotFound):
        follower.store({**change, "data": other})
    with follower.target.session("echo", session_id="diary") as session:
        session.chat("own")
        with pytest.raises(SessionBusy, match="itself is here"):
            follower.store(change)


def test_an_arriving_session_replaces_its_copy(follower: Follower) -> None:
    follower.open()
    follower.chat("text")
    follower.store_all()
    follower.client.call("finalize_execution_context", context=follower.context, keep=True)
    with Client(follower.here.socket) as source:
        part = source.export_session("diary", "t", peer="there")
        follower.target.import_session("diary", "t", part.data, part.size, peer="here")
        assert states_of(follower.target) == {"diary": "arriving"}
        source.end_transfer("t", "release")
        follower.target.end_transfer("t", "keep")
        source.end_transfer("t", "drop")
    with follower.target.session("echo", session_id="diary") as session:
        assert session.context.attached


def test_copies_are_of_their_user(
    running: tuple[RunningDaemon, RunningDaemon], follower: Follower
) -> None:
    with ExitStack() as stack:
        own = Follower(stack, *running, user=ADA)
        own.open()
        own.chat("text")
        stream = own.store_all()
        for call, params in (
            ("read_copy", {"session_id": "diary"}),
            (
                "store_copy",
                {"session_id": "x", "stream": "t", "number": 1, "data": b"x", "size": 1},
            ),
        ):
            with pytest.raises(PermissionDenied):
                own.client.call(call, **params)
        [found] = own.target.sessions(all_users=True, dormant=True)
        assert found["user"] == found["on_behalf_of"] == ADA
        own.keep(stream)
        with Client(own.there.socket, on_behalf_of=ADA) as client:
            [found] = client.sessions(dormant=True)
            assert found["session_id"] == "diary"
            assert client.delete_session(session_id="diary")
        own.client.call("delete_session", context=own.context)
