"""Titles, kept sessions, deletions with undo, and notes, through sockets and over restarts."""

from __future__ import annotations

import pytest

from inferd import AsyncClient, Client, InvalidArgument, NotFound, SessionInfo
from inferd.backends.errors import Busy, QuotaExceeded, SessionBusy
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.other_users import ADA, client_of, daemon_for_all
from tests.echo import echo_model
from tests.waiting import wait_until

CONFIG = "[daemon]\nkept_sessions_user_max = 2\n" + echo_model("m")


def chat(client: Client, name: str, text: str = "Why is the sky blue?") -> None:
    with client.session("m", session_id=name) as session:
        session.chat(text)


def entry(client: Client, name: str) -> SessionInfo:
    [found] = client.sessions(dormant=True, session_id=name)
    return found


def test_a_title_is_the_first_words_until_it_is_set(client: Client) -> None:
    chat(client, "sky")
    assert entry(client, "sky")["title"] == "Why is the sky blue?"
    assert client.update_session("sky", title="Sky")["title"] == "Sky"
    with client.session("m", session_id="sky") as session:
        assert client.update_session("sky", title="Blue")["title"] == "Blue"
        session.chat("And now?")
        [branch] = session.fork(session_ids=["branch"])
        assert entry(client, "branch")["title"] == "Why is the sky blue?"
        branch.delete()
    assert client.update_session("sky", title="")["title"] == "Why is the sky blue?"
    with pytest.raises(InvalidArgument, match="title of 201"):
        client.update_session("sky", title="x" * 201)
    with pytest.raises(NotFound):
        client.update_session("none", title="x")


def test_sessions_are_searched_by_title_and_first_message(client: Client) -> None:
    chat(client, "sea", "How deep is the sea?")
    chat(client, "river", "How long is the Rhine?")
    client.update_session("river", title="Geography")

    def found(search: str) -> set[object]:
        return {s["session_id"] for s in client.sessions(dormant=True, search=search)}

    assert found("DEEP") == {"sea"}
    assert found("geogr") == found("rhine") == {"river"}
    assert found("nothing of it") == set()
    with pytest.raises(InvalidArgument, match="201 characters"):
        client.sessions(search="x" * 201)


def test_parameters_and_priority_of_a_dormant_session_hold_for_its_next_turn(
    client: Client,
) -> None:
    chat(client, "short")
    client.update_session("short", options={"n-predict": 3}, priority="low")
    assert client.history(session_id="short").options["n-predict"] == 3
    with client.session("m", session_id="short", priority="low") as session:
        assert session.chat("abcdef") == "abc"
    client.update_session("short", unset=["n_predict"])
    with client.session("m", session_id="short") as session:
        assert session.chat("abcdef") == "abcdef"
    with pytest.raises(InvalidArgument, match="temperture"):
        client.update_session("short", title="changed", options={"temperture": 1})
    assert entry(client, "short")["title"] != "changed", "all or nothing"


def test_a_refused_change_changes_nothing(client: Client) -> None:
    for name in ("k1", "k2", "k3"):
        chat(client, name)
    client.update_session("k1", kept=True)
    client.update_session("k2", kept=True)
    with pytest.raises(QuotaExceeded) as caught:
        client.update_session("k3", kept=True, title="changed", options={"temp": 0.5})
    assert caught.value.data["bound"] == "kept-sessions-user-max"
    assert entry(client, "k3")["title"] != "changed"
    assert client.history(session_id="k3").options == {}
    for name in ("k1", "k2"):
        client.update_session(name, kept=False)


def test_a_deleted_session_is_restored_within_its_time(client: Client) -> None:
    chat(client, "oops")
    assert client.delete_session(session_id="oops", undo_s=60)
    assert client.sessions(dormant=True, session_id="oops") == []
    with pytest.raises(NotFound):
        client.history(session_id="oops")
    with pytest.raises(SessionBusy, match="can still be restored"):
        chat(client, "oops")
    assert client.restore_session("oops")["session_id"] == "oops"
    assert len(client.history(session_id="oops").messages) == 2
    assert client.delete_session(session_id="oops", undo_s=60)
    assert client.delete_session(session_id="oops"), "for good"
    with pytest.raises(NotFound):
        client.restore_session("oops")
    for undo_s in (-1, 3601, float("nan")):
        with pytest.raises(InvalidArgument):
            client.delete_session(session_id="oops", undo_s=undo_s)


def test_a_session_that_is_open_elsewhere_is_deleted_with_its_turn_and_restored(
    daemon: RunningDaemon, client: Client
) -> None:
    with Client(daemon.socket) as other, other.session("m", session_id="open") as session:
        session.chat("hi")
        assert client.delete_session(session_id="open", undo_s=60)
        wait_until(lambda: not client.sessions(session_id="open"))
    client.restore_session("open")
    assert client.history(session_id="open").messages[0]["content"] == "hi"


@pytest.mark.anyio
async def test_the_asynchronous_client_has_the_calls_too(daemon: RunningDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        async with client.session("m", session_id="async") as session:
            await session.chat("hi")
        assert (await client.update_session("async", kept=True))["kept"]
        assert await client.delete_session(session_id="async", undo_s=5)
        assert (await client.restore_session("async"))["kept"]
        assert await client.delete_session(session_id="async")
        assert await client.list_deletions() == []


@pytest.mark.parametrize("end", [RunningDaemon.kill, RunningDaemon.stop])
def test_titles_kept_sessions_and_deletions_outlive_the_daemon(end: object) -> None:
    with running_daemon(CONFIG) as daemon:
        with Client(daemon.socket) as client:
            for name in ("titled", "deleted", "gone", "plain"):
                chat(client, name)
            client.update_session("titled", title="Mine", kept=True, options={"seed": 7})
            client.delete_session(session_id="deleted", undo_s=600)
            client.delete_session(session_id="gone", undo_s=0.001)
        end(daemon)  # type: ignore[operator]
        daemon.start_again()
        with Client(daemon.socket) as client:
            found = entry(client, "titled")
            assert (found["title"], found["kept"], found["expires_s"]) == ("Mine", True, None)
            assert client.history(session_id="titled").options == {"seed": 7}
            assert 6 * 86_400 < float(str(entry(client, "plain")["expires_s"])) <= 7 * 86_400
            assert entry(client, "plain")["title"] == "Why is the sky blue?"
            names = {s["session_id"] for s in client.sessions(dormant=True)}
            assert names == {"titled", "plain"}
            assert client.restore_session("deleted")["title"] == "Why is the sky blue?"
            with pytest.raises(NotFound):
                client.restore_session("gone")


def test_notes_on_deleted_sessions_outlive_the_daemon_and_are_their_owners_alone() -> None:
    with running_daemon("[daemon]\ndormant_sessions_max = 1\n" + echo_model("m")) as daemon:
        with Client(daemon.socket, label="one") as client:
            chat(client, "first")
            chat(client, "second")
            wait_until(lambda: client.list_deletions())
            daemon.kill()
        daemon.start_again()
        with Client(daemon.socket, label="one") as client:
            [note] = client.list_deletions()
            assert (note["session_id"], note["reason"]) == ("first", "sessions")
            assert note["title"] == "Why is the sky blue?" and note["model"] == "m"
            with Client(daemon.socket, label="two") as other:
                assert other.list_deletions(clear=True) == []
            assert client.list_deletions(clear=True) == [note]
            assert client.list_deletions() == []
            result = client.list_sessions()
            assert (result.dormant_sessions, result.dormant_sessions_max) == (1, 1)
        assert daemon.stop() == 0
        daemon.start_again()
        with Client(daemon.socket, label="one") as client:
            assert client.list_deletions() == []


def test_a_session_that_is_being_moved_is_not_changed(client: Client) -> None:
    chat(client, "moving")
    client.export_session("moving", "a-transfer")
    for call in (
        lambda: client.update_session("moving", title="x"),
        lambda: client.delete_session(session_id="moving", undo_s=9),
    ):
        with pytest.raises(Busy, match="being moved"):
            call()
    client.end_transfer("a-transfer", "keep")
    assert client.update_session("moving", title="x")["title"] == "x"


def test_an_operator_neither_reads_nor_searches_the_titles_of_others() -> None:
    with daemon_for_all(echo_model("m")) as daemon:
        with client_of(daemon, ADA) as ada:
            graph = ada.call("load_by_name", name="m")["graph"]
            named = {"graph": graph, "session_id": "secret"}
            context = ada.call("init_execution_context_with_session_id", **named)["context"]
            ada.call("chat", context=context, prompt="Why is the sky blue?")
            found = ada.call("sessions", search="the SKY")["sessions"]
            assert [session["title"] for session in found] == ["Why is the sky blue?"]
        with Client(daemon.socket) as operator:
            found = operator.sessions(dormant=True, all_users=True)
            assert [(s["session_id"], s["title"]) for s in found] == [("secret", "")]
            assert operator.sessions(dormant=True, all_users=True, search="the sky") == []
