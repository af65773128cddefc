"""Sessions move between daemons by three calls, and are on exactly one of them after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

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
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.raw import RawClient

CONFIG = echo_model("echo", slots=2, **{"ctx-size": 250_000})
LONG = "a history of several parts " * 7000
ADA = "@ada"


class Daemons:
    """Two daemons, each with a client that moves sessions."""

    def __init__(self, stack: ExitStack, here: RunningDaemon, there: RunningDaemon):
        self.here, self.there = here, there
        self._stack = stack
        self.connect()

    def connect(self) -> None:
        """Connect anew, as another program that moves sessions."""
        self.source = self._stack.enter_context(Client(self.here.socket))
        self.target = self._stack.enter_context(Client(self.there.socket))

    def copy(self, transfer: str = "t1", *, label: str = "", user: str = "") -> None:
        """Copy the session `diary`, which then arrives at the target."""
        uid = self.uid_of(user, label)
        offset, size = 0, 1
        while offset < size:
            part = self.source.export_session(
                "diary", transfer, uid=uid, label=label, peer="there", offset=offset
            )
            assert part.on_behalf_of == user
            taken = self.target.import_session(
                "diary",
                transfer,
                part.data,
                part.size,
                on_behalf_of=user,
                label=label,
                peer="here",
                offset=offset,
            )
            offset, size = offset + len(part.data), taken.size

    def uid_of(self, user: str, label: str) -> int:
        [found] = [
            s
            for s in self.source.sessions(all_users=True, dormant=True)
            if (s["user"], s["label"], s["state"]) == (user, label, "dormant")
        ]
        return int(found["uid"])

    def move(self, transfer: str = "t1", *, label: str = "", user: str = "") -> None:
        self.copy(transfer, label=label, user=user)
        self.source.end_transfer(transfer, "release")
        self.target.end_transfer(transfer, "keep")
        self.source.end_transfer(transfer, "drop")


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[RunningDaemon, RunningDaemon]]:
    with running_daemon(CONFIG) as here, running_daemon(CONFIG) as there:
        yield here, there


@pytest.fixture
def daemons(running: tuple[RunningDaemon, RunningDaemon]) -> Iterator[Daemons]:
    """The daemons, without sessions."""
    with ExitStack() as stack:
        yield Daemons(stack, *running)
    for daemon in running:
        with Client(daemon.socket) as client:
            client.delete_session(session_id="diary")


def write_diary(path: str, *texts: str, label: str = "", user: str = "") -> None:
    """Write turns into the session `diary`."""
    with (
        Client(path, label=label, on_behalf_of=user) as client,
        client.session("echo", session_id="diary", raw=True) as session,
    ):
        for text in texts:
            assert text.startswith(session.chat(text, options={"n-predict": 50}).strip())


def tokens_of(path: str) -> int:
    """Return the tokens of the session `diary`, which is opened by its id; 0: it is new."""
    with Client(path) as client, client.session("echo", session_id="diary") as session:
        if not session.context.attached:
            session.delete()
            return 0
        [found] = client.sessions(session_id="diary")
        return int(found["tokens"])


def states_of(client: Client) -> dict[str, str]:
    """Return the states of all sessions by their ids."""
    return {str(s["session_id"]): s["state"] for s in client.sessions(all_users=True, dormant=True)}


def test_a_session_moves_with_its_history(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, LONG, "second")
    before = daemons.source.history(session_id="diary")
    daemons.move()
    assert states_of(daemons.source) == {}
    assert states_of(daemons.target) == {"diary": "dormant"}
    after = daemons.target.history(session_id="diary")
    assert (after.messages, after.turns) == (before.messages, before.turns)
    assert after.session["tokens"] == before.session["tokens"] > len(LONG)
    assert after.session["turns"] == 2
    with daemons.target.session("echo", session_id="diary", raw=True) as session:
        reply = session.chat("third")
        assert reply.metadata["input_tokens"] > before.session["tokens"]
        assert session.rewind(3).turns == 0, "its turns can be rewound"
    assert tokens_of(daemons.here.socket) == 0


def test_a_session_that_moves_is_opened_nowhere(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text")
    daemons.copy()
    assert states_of(daemons.source) == {"diary": "dormant"}
    assert states_of(daemons.target) == {"diary": "arriving"}
    for path in (daemons.here.socket, daemons.there.socket):
        with pytest.raises(SessionBusy, match="is being moved"):
            tokens_of(path)
    daemons.source.end_transfer("t1", "release")
    assert states_of(daemons.source) == {"diary": "departed"}
    for path, state in (
        (daemons.here.socket, "has moved"),
        (daemons.there.socket, "is being moved"),
    ):
        with pytest.raises(SessionBusy, match=state):
            tokens_of(path)
    daemons.target.end_transfer("t1", "keep")
    assert tokens_of(daemons.there.socket) > 0


def test_a_move_that_is_given_up_leaves_the_session(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text")
    daemons.copy()
    daemons.source.end_transfer("t1", "keep")
    with pytest.raises(NotFound):
        daemons.source.end_transfer("t1", "release")
    daemons.target.end_transfer("t1", "drop")
    assert states_of(daemons.target) == {}
    assert tokens_of(daemons.there.socket) == 0
    assert tokens_of(daemons.here.socket) > 0


def test_a_hold_ends_with_its_connection(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text")
    daemons.copy()
    daemons.source.close()
    write_diary(daemons.here.socket, "another")
    daemons.connect()
    with pytest.raises(NotFound):
        daemons.source.end_transfer("t1", "release")
    daemons.move("t2")
    assert tokens_of(daemons.there.socket) > len("another"), "the newer copy replaces the older one"


def test_a_newer_transfer_ends_an_older_one(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text")
    daemons.copy("old")
    older = daemons.source
    daemons.connect()
    daemons.copy("new")
    with pytest.raises(NotFound):
        older.end_transfer("old", "release")
    daemons.source.end_transfer("new", "release")
    with pytest.raises(NotFound):
        daemons.target.end_transfer("old", "keep")
    daemons.target.end_transfer("new", "keep")
    daemons.source.end_transfer("new", "drop")
    assert tokens_of(daemons.there.socket) > 0


@pytest.mark.parametrize("released", [False, True])
def test_a_kill_of_both_daemons_leaves_the_session_on_one(daemons: Daemons, released: bool) -> None:
    write_diary(daemons.here.socket, "text")
    daemons.copy()
    if released:
        daemons.source.end_transfer("t1", "release")
    for daemon in (daemons.here, daemons.there):
        daemon.kill()
        daemon.start_again()
    daemons.connect()
    [arriving] = daemons.target.sessions(all_users=True, dormant=True)
    assert arriving["state"] == "arriving"
    assert arriving["transfer"] == {"id": "t1", "peer": "here"}
    [here] = daemons.source.sessions(all_users=True, dormant=True)
    if released:
        transfer = here["transfer"] or {}
        assert here["state"] == "departed" and transfer["peer"] == "there"
        daemons.target.end_transfer("t1", "keep")
        daemons.source.end_transfer("t1", "drop")
    else:
        assert here["state"] == "dormant" and here["transfer"] is None
        daemons.target.end_transfer("t1", "drop")
    for daemon in (daemons.here, daemons.there):
        daemon.kill()
        daemon.start_again()
    has = [tokens_of(daemon.socket) > 0 for daemon in (daemons.here, daemons.there)]
    assert has == [not released, released]


def test_a_deletion_ends_a_move(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text")
    daemons.copy()
    assert daemons.source.delete_session(session_id="diary")
    assert daemons.target.delete_session(session_id="diary")
    with pytest.raises(NotFound):
        daemons.source.end_transfer("t1", "release")
    assert states_of(daemons.source) == states_of(daemons.target) == {}


def test_a_session_keeps_its_user_and_label(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text", user=ADA, label="home")
    daemons.here.kill()
    daemons.here.start_again()
    daemons.connect()
    daemons.move(user=ADA, label="home")
    with Client(daemons.there.socket, on_behalf_of=ADA, label="home") as client:
        [found] = client.sessions(dormant=True)
        assert found["session_id"] == "diary" and found["user"] == ADA
        assert client.delete_session(session_id="diary")


def test_an_open_session_is_not_exported(daemons: Daemons) -> None:
    with daemons.source.session("echo", session_id="diary"), pytest.raises(SessionBusy):
        daemons.source.export_session("diary", "t1")
    with pytest.raises(NotFound):
        daemons.source.export_session("no such", "t1")


def test_a_damaged_or_unfit_session_is_refused(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text")
    part = daemons.source.export_session("diary", "t1")
    for data in (b"\2\0\0\0no", part.data[:4] + b"\xc1" + part.data[5:]):
        with pytest.raises(InvalidArgument):
            daemons.target.import_session("diary", "t1", data, len(data))
    with pytest.raises(InvalidArgument, match="after 0 bytes"):
        daemons.target.import_session("diary", "t1", part.data, part.size + 1, offset=1)
    other = part.data.replace(b"\xa4echo", b"\xa4ohce", 1)
    with pytest.raises(ModelNotFound):
        daemons.target.import_session("diary", "t1", other, part.size)
    write_diary(daemons.there.socket, "text")
    with pytest.raises(SessionBusy, match="there is a session"):
        daemons.target.import_session("diary", "t1", part.data, part.size)


def test_a_daemon_takes_no_session_that_would_cost_another_one(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text")
    with (
        running_daemon(CONFIG + "[daemon]\ndormant-sessions-max = 1\n") as full,
        Client(full.socket) as client,
    ):
        with client.session("echo", session_id="own") as session:
            session.chat("text")
        part = daemons.source.export_session("diary", "t1")
        with pytest.raises(Busy) as caught:
            client.import_session("diary", "t1", part.data, part.size)
        assert caught.value.data["bound"] == "dormant-sessions-max"
        assert states_of(client) == {"own": "dormant"}


def test_only_managers_move_sessions(daemons: Daemons) -> None:
    write_diary(daemons.here.socket, "text", user=ADA)
    with RawClient(daemons.here.socket, on_behalf_of=ADA) as ada:
        for call, params in (
            ("export_session", {"session_id": "diary", "transfer": "t"}),
            ("import_session", {"session_id": "x", "transfer": "t", "data": b"x", "size": 1}),
            ("end_transfer", {"transfer": "t", "outcome": "keep"}),
        ):
            with pytest.raises(PermissionDenied):
                ada.call(call, **params)
        ada.call("delete_session", session_id="diary")
