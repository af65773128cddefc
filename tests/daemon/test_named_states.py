"""Named states: sessions begin with them as if they were the saved session, restarts or not."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import (
    BackendError,
    Cancelled,
    ConnectionLost,
    InferdError,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    QuotaExceeded,
    SessionBusy,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.daemon.other_users import ADA, client_of, daemon_for_all
from tests.echo import echo_model
from tests.tiny_gguf import write_tiny
from tests.waiting import wait_until

STORY = "Once upon a time there was a king who had three sons and a golden bird. " * 4
KINDS = ("llama", "gemma3", "mamba", "lfm2")
GREEDY: dict[str, Any] = {"temp": 0, "n-predict": 12}
STATES_USER_MAX = 8


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("models")
    config = f"sessions-max = 200\nstates-user-max = {STATES_USER_MAX}\n[defaults]\nthreads = 1\n"
    for kind in KINDS:
        file = write_tiny(kind, folder)
        config += f'[models.{kind}]\nfile = "{file}"\nctx-size = 1024\nslots = 2\n'
    config += echo_model("e", slots=2) + echo_model("slow", slots=1, step_ms=200, batch_size=32)
    with daemon_for_all(config) as running:
        yield running


@pytest.fixture(autouse=True)
def no_states(client: Client) -> Iterator[None]:
    yield
    for state in client.list_states():
        client.delete_state(state["name"])


def kv_files(daemon: RunningDaemon) -> list[Path]:
    return [path for path in (daemon.directory / "state" / "kv").rglob("*") if path.is_file()]


def save(client: Client, model: str, name: str = "story", text: str = STORY) -> str:
    """Save a state after a turn on *text*; return how its session then continues."""
    with client.session(model, raw=True, options=GREEDY) as session:
        session.chat(text)
        saved = session.save_state(name)
        assert saved.stored_tokens == saved.tokens
        session.chat(" And then")
        return str(session.chat(" And so"))


def continued(client: Client, model: str, name: str = "story") -> tuple[str, int]:
    """Return how a session from a state continues, and how many tokens were cached at first."""
    with client.session(model, raw=True, from_state=name) as session:
        cached = session.chat(" And then").metadata["cached_tokens"]
        return str(session.chat(" And so")), cached


@contextmanager
def full_disk(pid: int) -> Iterator[None]:
    """Let a process write no byte more into files."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


# Sessions from a state.


@pytest.mark.parametrize("model", KINDS)
def test_a_session_from_a_state_continues_as_the_saved_one_did(client: Client, model: str) -> None:
    expected = save(client, model)
    [state] = client.list_states()

    text, cached = continued(client, model)

    assert text == expected
    assert cached >= state["tokens"] - 1
    assert state["model"] == model and state["kv_disk_bytes"] > 0
    assert continued(client, model)[0] == expected, "the first session has not changed the state"


def test_a_state_outlives_the_daemon_with_its_kv_state(tmp_path: Path) -> None:
    file = write_tiny("llama", tmp_path)
    with running_daemon(f'[models.llama]\nfile = "{file}"\nthreads = 1\nctx-size = 1024\n') as own:
        with Client(own.socket) as client:
            expected = save(client, "llama")
            before = client.list_states()
        own.stop()
        own.start_again()
        with Client(own.socket) as client:
            assert client.list_states() == before

            text, cached = continued(client, "llama")

            assert text == expected
            assert cached >= before[0]["tokens"] - 1
            assert client.delete_state("story") and not client.delete_state("story")
            assert not kv_files(own)


def test_a_session_with_an_id_keeps_its_own_history(client: Client) -> None:
    save(client, "e")
    with client.session("e", raw=True, session_id="diary", from_state="story") as session:
        first = session.chat(" And").metadata["input_tokens"]
    with client.session("e", raw=True, session_id="diary", from_state="story") as session:
        assert session.attached
        again = session.chat(" And").metadata
        assert first < again["cached_tokens"] + again["input_tokens"]
        session.delete()


def test_a_state_has_the_messages_and_the_options_of_its_session(client: Client) -> None:
    with client.session("llama", system="Be brief.", options=GREEDY) as session:
        session.save_state("brief")
        expected = session.chat("Who are you?")
    with client.session("llama", from_state="brief") as session:
        assert session.chat("Who are you?") == expected
    with client.session("llama", from_state="brief", options={"n-predict": 2}) as session:
        assert session.chat("Who are you?").metadata["output_tokens"] == 2
    with pytest.raises(InvalidArgument, match="takes no system prompt"):
        client.session("llama", from_state="brief", system="Be long.")


def test_the_models_own_defaults_hold_in_a_session_from_a_state(client: Client) -> None:
    with client.session("e", raw=True, config={"n-predict": 3, "temp": 0.5}) as session:
        session.chat(STORY)
        session.save_state("story")
    with client.session("e", raw=True, from_state="story", config={"temp": 0.25}) as session:
        values = {p["name"]: p["value"] for p in session.parameters()}
        assert (values["n-predict"], values["temp"]) == (3, 0.25)


def test_a_hundred_sessions_begin_with_a_state_at_once(client: Client) -> None:
    expected = save(client, "e")

    def begin(_: int) -> str:
        return continued(client, "e")[0]

    with ThreadPoolExecutor(100) as pool:
        assert set(pool.map(begin, range(100))) == {expected}


# Refusals.


def test_refusals_say_what_to_do(client: Client) -> None:
    save(client, "e")
    with pytest.raises(NotFound, match=r"no state 'storie' .*`inferd states` lists yours and"):
        client.session("e", from_state="storie").__enter__()
    with pytest.raises(InvalidArgument, match="has model 'e', not 'llama'"):
        client.session("llama", from_state="story").__enter__()
    with client.session("e", raw=True) as session:
        with pytest.raises(InvalidArgument, match="no history to save"):
            session.save_state("empty")
        session.chat(STORY)
        with pytest.raises(InvalidArgument, match="a state 'story' already"):
            session.save_state("story")
        for name in ("", "n" * 129):
            with pytest.raises(InvalidArgument, match="a state's name of"):
                session.save_state(name)
    with client.session("slow", raw=True) as session:
        stream = session.stream(STORY)
        next(iter(stream))
        with pytest.raises(SessionBusy):
            client.save_state(session.context, "early")
        session.cancel()
    assert [state["name"] for state in client.list_states()] == ["story"]


def test_a_user_has_a_bounded_number_of_states(client: Client) -> None:
    with client.session("e", raw=True) as session:
        session.chat(STORY)
        for number in range(STATES_USER_MAX):
            session.save_state(f"story {number}")
        with pytest.raises(QuotaExceeded) as caught:
            session.save_state("one more")
        assert caught.value.data["bound"] == "states-user-max" and not caught.value.retryable
        session.save_state("story 0", replace=True)


def test_a_replaced_state_leaves_nothing_of_the_old_one(
    daemon: RunningDaemon, client: Client
) -> None:
    save(client, "e")
    files = kv_files(daemon)
    with client.session("e", raw=True) as session:
        session.chat(STORY.upper())
        saved = session.save_state("story", replace=True)
    assert len(kv_files(daemon)) == len(files) and kv_files(daemon) != files
    assert [state["tokens"] for state in client.list_states()] == [saved.tokens]


def test_states_belong_to_their_user_alone(daemon: RunningDaemon, client: Client) -> None:
    save(client, "e")
    with client_of(daemon, ADA) as other:
        assert other.call("list_states") == {"states": []}
        assert other.call("delete_state", name="story") == {"deleted": False}
        graph = other.call("load_by_name", name="e")["graph"]
        with pytest.raises(NotFound):
            other.call("init_execution_context", graph=graph, from_state="story")
        context = other.call("init_execution_context", graph=graph)["context"]
        turn = other.call("chat", context=context, prompt=STORY, raw=True)
        assert turn["metadata"]["cached_tokens"] == 0
        other.call("save_state", context=context, name="story")
        assert other.call("delete_state", name="story") == {"deleted": True}
    assert client.list_states()


def test_labels_have_states_of_their_own(daemon: RunningDaemon, client: Client) -> None:
    with Client(daemon.socket, label="one") as one, Client(daemon.socket, label="two") as two:
        save(one, "e")
        assert not two.list_states() and not two.delete_state("story")
        assert [s["label"] for s in client.list_states()] == ["one"], "an owner sees all labels"
        assert one.delete_state("story")


def test_the_command_lists_and_deletes_states(daemon: RunningDaemon, client: Client) -> None:
    save(client, "e")
    shown = inferd("states", socket=daemon.socket).stdout
    assert "story" in shown and "NAME" in shown
    assert inferd("states", "delete", "story", socket=daemon.socket).stdout == "deleted\n"
    assert "no state 'story'" in inferd("states", "delete", "story", socket=daemon.socket).stdout


# Failures.


def test_a_state_that_cannot_be_written_is_refused_and_the_old_one_stays() -> None:
    with running_daemon(echo_model("e")) as own, Client(own.socket) as client:
        expected = save(client, "e")
        before = client.list_states()
        with client.session("e", raw=True) as session:
            session.chat(STORY.upper())
            with full_disk(own.pid):
                for name in ("story", "another"):
                    with pytest.raises(BackendError, match="cannot be written"):
                        session.save_state(name, replace=True)
            assert [s["tokens"] for s in client.list_states()] == [before[0]["tokens"]]
            assert continued(client, "e")[0] == expected
            session.save_state("another")
        own.kill()
        own.start_again()
        with Client(own.socket) as client:
            assert [s["name"] for s in client.list_states()] == ["another", "story"]
            assert continued(client, "e")[0] == expected


def test_a_kv_state_that_cannot_be_written_is_computed_again(client: Client) -> None:
    with client.session("e", raw=True) as session:
        session.chat(STORY)
        [worker] = [m["pid"] for m in client.models() if m["name"] == "e"]
        with full_disk(worker):
            assert session.save_state("story").stored_tokens == 0
        assert client.list_states()[0]["kv_disk_bytes"] == 0
    continued(client, "e")
    wait_until(lambda: client.list_states()[0]["kv_disk_bytes"] > 0)


def test_a_kill_in_the_middle_of_a_save_leaves_the_old_state() -> None:
    with running_daemon(echo_model("slow", step_ms=300, batch_size=32)) as own:
        with Client(own.socket) as client:
            with client.session("slow", raw=True, options={"n-predict": 1}) as session:
                session.chat("short")
                session.save_state("story")
            before = client.list_states()
            with client.session("slow", raw=True) as session:
                client.set_input(session.context, 0, STORY.encode())
                with ThreadPoolExecutor(1) as pool:
                    saving = pool.submit(session.save_state, "story", replace=True)
                    wait_until(lambda: [t for t in client.queue() if t["state"] == "running"])
                    with pytest.raises(SessionBusy):
                        client.delete_state("story")
                    own.kill()
                    with pytest.raises(ConnectionLost):
                        saving.result()
        own.start_again()
        with Client(own.socket) as client:
            assert client.list_states() == before


def test_a_save_that_is_cancelled_saves_nothing(daemon: RunningDaemon, client: Client) -> None:
    with client.session("slow", raw=True) as session:
        client.set_input(session.context, 0, STORY.swapcase().encode())
        with pytest.raises(InferdError) as caught:
            session.save_state("story", timeout=0.3)
        assert not isinstance(caught.value, Cancelled)
        assert not client.list_states()
        wait_until(lambda: not client.queue())


def test_a_state_outlives_its_model(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    with running_daemon(models_dir=tmp_path) as own:
        with Client(own.socket) as client:
            save(client, "tiny-llama")
        own.stop()
        os.remove(tmp_path / "tiny-llama.gguf")
        own.start_again()
        with Client(own.socket) as client:
            assert [s["model"] for s in client.list_states()] == ["tiny-llama"]
            with pytest.raises(ModelNotFound):
                client.session("tiny-llama", from_state="story").__enter__()
            assert client.delete_state("story")
            assert not kv_files(own)
