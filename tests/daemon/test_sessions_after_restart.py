"""Sessions with an id outlive the daemon: real kills, real restarts, full disks, damaged files."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd import Client
from inferd.backends.errors import Cancelled, InvalidArgument, ShuttingDown, Timeout
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.journal_versions import mark_version
from tests.models import short_smollm2
from tests.raw import Closed, RawClient
from tests.waiting import wait_until

SECRET = "the cat is called Fluffington"
ECHO = """
[daemon]
shutdown_grace_s = 0.1
[models.m]
backend = "echo"
slots = 2
[models.slow]
backend = "echo"
[models.slow.echo]
step_ms = 10
"""
REAL = f"""
[daemon]
cores = 1
shutdown_grace_s = 0.1
[defaults]
ctx-size = 256
[models.m]
file = "{short_smollm2()}"
"""
QUESTION = "Tell me a story about a king and his three sons. " * 2
GREEDY = {"temp": 0, "n-predict": 12}
BOTH = pytest.mark.parametrize(
    "config", [ECHO, pytest.param(REAL, marks=pytest.mark.model)], ids=["echo", "smollm2"]
)


@contextmanager
def attached(
    daemon: RunningDaemon, session_id: str = "diary", model: str = "m", **params: Any
) -> Iterator[tuple[RawClient, dict[str, Any]]]:
    """Open a session by its id on a connection of its own."""
    with RawClient(daemon.socket, timeout_s=100.0) as client:
        graph = client.call("load_by_name", name=model)["graph"]
        call = "init_execution_context_with_session_id"
        yield client, client.call(call, graph=graph, session_id=session_id, **params)


def chat(client: RawClient, context: int, prompt: str, **options: Any) -> tuple[str, Any]:
    result = client.call("chat", context=context, prompt=prompt, options=GREEDY | options)
    return bytes(result["text"]).decode(), result["metadata"]


def journal(daemon: RunningDaemon) -> Path:
    return daemon.directory / "state" / "sessions.db"


def written(daemon: RunningDaemon) -> bytes:
    """Return all bytes below the state directory."""
    files = (p for p in (daemon.directory / "state").rglob("*") if p.is_file())
    return b"".join(path.read_bytes() for path in files)


def tokens_of(daemon: RunningDaemon, session_id: str = "diary", model: str = "m") -> int:
    """Return the number of the session's tokens."""
    with attached(daemon, session_id, model) as (client, opened):
        assert opened.get("attached"), "the session was not restored"
        [session] = client.call("sessions")["sessions"]
        return int(session["tokens"])


@BOTH
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_a_conversation_continues_after_a_restart(config: str, ending: str) -> None:
    questions = ("What is the capital of France?", "And of Italy?", "Say both again.")
    with running_daemon(config) as daemon:
        with attached(daemon, "whole") as (client, opened):
            expected = [chat(client, opened["context"], q) for q in questions]
        with attached(daemon) as (client, opened):
            first = [chat(client, opened["context"], q)[0] for q in questions[:2]]
            if ending == "kill":
                daemon.kill()
            else:
                assert daemon.stop() == 0
        daemon.start_again()

        with attached(daemon) as (client, opened):
            assert opened["attached"]
            text, metadata = chat(client, opened["context"], questions[2])

        assert [*first, text] == [text for text, _ in expected]
        assert metadata["input_tokens"] == expected[2][1]["input_tokens"]
        assert metadata["durable"] is True
        if ending == "stop":
            history = metadata["input_tokens"] - metadata["cached_tokens"]
            whole = expected[2][1]["input_tokens"] - expected[2][1]["cached_tokens"]
            assert history <= whole + 1, "only what is new was computed"


def test_an_answered_input_and_options_survive_a_kill() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon) as (client, opened):
            context = opened["context"]
            client.set_input(context, b"hello")
            client.set_input(context, b'{"n-predict": 2, "temp": 200}', index=1)
            client.call("set_options", context=context, priority="high", note=b"mine")
            adjusted = client.metadata(context)["adjusted"]
            assert "200 is outside 0 … 100" in adjusted["temp"]
            daemon.kill()
        daemon.start_again()
        with attached(daemon) as (client, opened):
            assert client.metadata(opened["context"])["adjusted"] == adjusted
            client.call("compute", context=opened["context"])
            assert client.output(opened["context"]) == b"he"
            assert client.metadata(opened["context"])["adjusted"] == adjusted
            [session] = client.call("sessions")["sessions"]
            assert session["priority"] == "high"
            assert client.call("history", session_id="diary")["note"] == b"mine"


@pytest.mark.parametrize(
    "options", [{"lora": {"missing": 1.0}}, {"stop-tokens": [10_000]}], ids=["daemon", "worker"]
)
def test_a_refused_turn_leaves_nothing_in_the_journal(options: dict[str, Any]) -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon) as (client, opened):
            context = opened["context"]
            chat(client, context, "first")
            [session] = client.call("sessions")["sessions"]
            with pytest.raises(InvalidArgument):
                chat(client, context, "refused", **options)
            daemon.kill()
        daemon.start_again()
        with attached(daemon) as (client, opened):
            [after] = client.call("sessions")["sessions"]
            assert (after["tokens"], after["turns"]) == (session["tokens"], 1)
            chat(client, opened["context"], "next")
            assert client.output(opened["context"]) == b"next"


def occupy_slot(client: RawClient) -> int:
    """Begin a long turn to which turns of a lower class yield; return its context."""
    context = client.context("slow")
    client.call("set_options", context=context, priority="high")
    client.begin_stream(context, "x" * 1000)
    return context


def test_a_turn_refused_in_the_queue_of_a_stopping_daemon_leaves_nothing() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon, model="slow") as (client, opened):
            with RawClient(daemon.socket) as other:
                for _ in range(4):
                    occupy_slot(other)
                number = client.start_request("chat", context=opened["context"], prompt="waits")
                wait_until(
                    lambda: (
                        opened["context"]
                        in [
                            task["context"]
                            for task in other.call("queue")["tasks"]
                            if task["state"] == "waiting" and task["position"] == 1
                        ]
                    )
                )
                os.kill(daemon.pid, signal.SIGTERM)
                with pytest.raises(ShuttingDown):
                    client.wait_result(number)
            daemon.stop()
        daemon.start_again()
        assert tokens_of(daemon, model="slow") == 0


def test_a_resumption_that_is_refused_can_be_repeated() -> None:
    config = ECHO.replace("[models.slow.echo]", "slots = 1\n[models.slow.echo]")
    with running_daemon(config) as daemon:
        with attached(daemon, model="slow") as (client, opened):
            client.set_input(opened["context"], b"abcdefghij")
            client.start_request("stream", context=opened["context"], credit=1)
            read_tokens(client, 1)  # it does not end before its reader leaves
        with attached(daemon, model="slow") as (client, opened), RawClient(daemon.socket) as other:
            context = occupy_slot(other)
            params = {"context": opened["context"]}
            with pytest.raises(Timeout):
                client.call("resume", queue_timeout_s=0.05, **params)
            for token in (-1, -2, -(1 << 31), 259):
                with pytest.raises(InvalidArgument):
                    client.call("resume", tokens=[ord("a"), token], text=b"ab", **params)
            assert client.metadata(opened["context"])["stop_reason"] == "detached"
            other.call("cancel", context=context)
            assert client.call("resume", **params)["metadata"]["stop_reason"] == "eos"
            assert client.output(opened["context"]) == b"abcdefghij"


def test_the_last_of_reset_rewind_and_fork_survives_a_kill() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon) as (client, opened):
            context = opened["context"]
            for prompt in ("one", "two"):
                chat(client, context, prompt)
            client.call("fork_session", context=context, n=2, session_ids=["a", "b"])
            left = client.call("rewind", context=context, turns=1).get("tokens", 0)
            whole = client.call("sessions")["sessions"][-1]["tokens"]
            daemon.kill()
        daemon.start_again()
        assert tokens_of(daemon) == left
        assert tokens_of(daemon, "a") == tokens_of(daemon, "b") == whole > left
        with attached(daemon) as (client, opened):
            client.call("reset", context=opened["context"])
            daemon.kill()
        daemon.start_again()
        assert tokens_of(daemon) == 0


def read_tokens(client: RawClient, count: int) -> list[int]:
    """Return the tokens of a stream's next events, until there are *count*."""
    tokens: list[int] = []
    while len(tokens) < count:
        message = client.read_message()
        assert message[0] == 4, message
        tokens += message[2]["tokens"]
    return tokens


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_an_interrupted_turn_keeps_its_text(ending: str) -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon, model="slow") as (client, opened):
            context = opened["context"]
            client.set_input(context, b"abcdefghijklmnopqrstuvwxyz")
            prompt = client.metadata(context)["input_tokens"]
            client.start_request("stream", context=context, credit=20)
            tokens = read_tokens(client, 20)
            if ending == "kill":
                # Once this call is answered, all earlier input is written.
                client.call("set_options", context=context, options={"n-predict": 100})
                daemon.kill()
            else:
                daemon.stop()
        daemon.start_again()

        with attached(daemon, model="slow") as (client, opened):
            metadata = client.metadata(opened["context"])
            assert metadata["stop_reason"] == "detached"
            assert (metadata["input_tokens"], metadata["output_tokens"]) == (prompt, len(tokens))
            assert client.call("rewind", context=opened["context"], turns=1) == {}


def test_at_most_the_last_group_of_a_turn_is_lost() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon, model="slow") as (client, opened):
            context = opened["context"]
            client.set_input(context, b"x" * 200)
            prompt = client.metadata(context)["input_tokens"]
            for _ in range(40):  # a token each 10 ms: several groups
                client.call("compute_single", context=context)
            daemon.kill()
        daemon.start_again()

        stored = tokens_of(daemon, model="slow") - prompt
        assert 0 < stored <= 40


def test_a_reader_that_disconnects_detaches_its_turn() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon, model="slow") as (client, opened):
            client.set_input(opened["context"], b"abcdefghijklmnopqrstuvwxyz")
            client.start_request("stream", context=opened["context"], credit=3)
            read_tokens(client, 3)
        with attached(daemon, model="slow") as (client, opened):
            assert client.metadata(opened["context"])["stop_reason"] == "detached"


def test_a_stopping_daemon_reports_that_and_not_a_detached_session() -> None:
    with running_daemon(ECHO) as daemon, attached(daemon, model="slow") as (client, opened):
        client.set_input(opened["context"], b"abcdefghijklmnopqrstuvwxyz")
        turn = client.start_request("stream", context=opened["context"], credit=3)
        read_tokens(client, 3)
        daemon.stop()
        with pytest.raises(ShuttingDown):
            client.wait_result(turn)


@pytest.mark.parametrize("way", ["delete", "delete by id", "close", "persist"])
def test_a_deleted_session_is_in_no_file_and_cannot_be_restored(way: str) -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon, "other") as (client, opened):
            chat(client, opened["context"], "something else")
        with attached(daemon) as (client, opened):
            chat(client, opened["context"], SECRET, **{"n-predict": 60})
        daemon.stop()
        assert SECRET.encode() in written(daemon)
        daemon.start_again()

        with attached(daemon, persist=way != "persist") as (client, opened):
            if way == "delete":
                client.call("delete_session", context=opened["context"])
            elif way == "delete by id":
                client.call("delete_session", session_id="diary")
            elif way == "close":
                client.call("close_execution_context", context=opened["context"])
            assert SECRET.encode() not in written(daemon)
            daemon.kill()
        assert SECRET.encode() not in written(daemon)
        daemon.start_again()
        with attached(daemon) as (_, opened):
            assert not opened.get("attached")
        assert tokens_of(daemon, "other")


def test_a_dormant_session_is_deleted_by_its_id_before_it_is_opened() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon) as (client, opened):
            chat(client, opened["context"], SECRET)
        daemon.stop()
        daemon.start_again()
        with RawClient(daemon.socket) as client:
            assert client.call("delete_session", session_id="diary") == {"deleted": True}
        assert SECRET.encode() not in written(daemon)


def limit_files(daemon: RunningDaemon, size: int) -> None:
    """Let no file of the daemon grow past *size* bytes: its writes fail as on a full disk."""
    _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size, hard))


def test_a_full_disk_is_reported_once_and_service_continues() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon) as (client, opened):
            context = opened["context"]
            assert chat(client, context, "x" * 200, **{"n-predict": 300})[1]["durable"] is True
            limit_files(daemon, len(daemon.log) + 4096)
            for _ in range(3):
                text, metadata = chat(client, context, "full")
                assert (text, metadata["durable"]) == ("full", False)
            state = client.call("stats")["stats"]["journal"]
            assert state["state"] == "failing" and state["cause"]
            assert daemon.log.count("journal.not_written") == 1

            limit_files(daemon, resource.RLIM_INFINITY)
            _, metadata = chat(client, context, "room")
            assert metadata["durable"] is True
            assert client.call("stats")["stats"]["journal"]["state"] == "written"
            assert daemon.log.count("journal.recovered") == 1
            [session] = client.call("sessions")["sessions"]
            daemon.kill()
        daemon.start_again()
        assert tokens_of(daemon) == session["tokens"], "of the full disk, too"


def test_a_damaged_journal_is_set_aside_and_reported() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon) as (client, opened):
            chat(client, opened["context"], "hello")
        daemon.stop()
        data = journal(daemon).read_bytes()
        journal(daemon).write_bytes(data[:5000] + b"\0" * len(data[5000:]))
        daemon.start_again()

        with attached(daemon) as (client, opened):
            assert not opened.get("attached")
            state = client.call("stats")["stats"]["journal"]
            aside = Path(state["moved_to"])
            assert aside.parent == journal(daemon).parent
            assert aside.read_bytes()[:5000] == data[:5000]
            assert "journal.set_aside" in daemon.log
            assert f"set aside as {aside}" in inferd("status", socket=daemon.socket).stdout
            assert chat(client, opened["context"], "anew")[1]["durable"] is True


def test_a_journal_of_a_newer_version_is_left_alone_and_reported() -> None:
    with running_daemon(ECHO) as daemon:
        daemon.stop()
        mark_version(journal(daemon), 1000)
        before = journal(daemon).read_bytes()
        daemon.start_again()

        with attached(daemon) as (client, opened):
            assert chat(client, opened["context"], "hello")[1]["durable"] is False
            state = client.call("stats")["stats"]["journal"]
            assert state["state"] == "refused"
            assert "newer version of inferd" in state["cause"]
            assert "are not stored on disk: " in inferd("status", socket=daemon.socket).stdout
        daemon.stop()
        assert journal(daemon).read_bytes() == before
        assert "journal.refused" in daemon.log


def test_the_journal_is_its_owners_alone() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon) as (client, opened):
            chat(client, opened["context"], "hello")
        modes = {p.name: p.stat().st_mode & 0o777 for p in journal(daemon).parent.glob("*.db*")}
        files = ("sessions.db", "sessions.db-wal", "states.db", "states.db-wal")
        assert modes == dict.fromkeys(files, 0o600)


def test_a_cancelled_turn_is_not_an_interrupted_one() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon, model="slow") as (client, opened):
            client.set_input(opened["context"], b"abcdefghijklmnopqrstuvwxyz")
            turn = client.start_request("stream", context=opened["context"], credit=3)
            read_tokens(client, 3)
            assert client.call("cancel", context=opened["context"])["cancelled"]
            with pytest.raises((Cancelled, Closed)):
                client.wait_result(turn)
            daemon.kill()
        daemon.start_again()
        with attached(daemon, model="slow") as (client, opened):
            assert client.metadata(opened["context"])["stop_reason"] == "Cancelled"
            with pytest.raises(Cancelled) as caught:
                client.call("resume", context=opened["context"])
            assert caught.value.data["metadata"]["output_tokens"] == 3
            [(_, _, event)] = client.events
            assert event["text"] == b"abc"


def test_sessions_are_listed_with_dormant_ones_and_whether_they_are_stored() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon) as (client, opened):
            chat(client, opened["context"], "hello")
            [before] = client.call("sessions")["sessions"]
        daemon.stop()
        daemon.start_again()
        with attached(daemon, "quiet", persist=False) as (client, opened):
            live, asleep = client.call("sessions", dormant=True, all=True)["sessions"]
            assert len(client.call("sessions")["sessions"]) == 1
            assert (live["session_id"], live["persisted"]) == ("quiet", None)
            same = ("session_id", "uid", "model", "tokens", "turns", "persisted", "priority")
            assert {k: asleep[k] for k in same} == {k: before[k] for k in same}
            assert (asleep["context"], asleep["state"]) == (None, "dormant")
            assert asleep["persisted"] is True and asleep["tokens"] > 5


WHOLE = {"temp": 0, "n-predict": 80}
"""More tokens than a stream has credit for: it stands still until they are read."""


@BOTH
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ending", ["stop", "kill", "leave"])
def test_an_interrupted_answer_is_resumed_where_its_reader_is(config: str, ending: str) -> None:
    with running_daemon(config) as daemon:
        whole = None
        if config == ECHO:  # a real model's logits move a little with the shape of the batch
            with Client(daemon.socket) as client, client.session("m", options=WHOLE) as session:
                whole = str(session.chat(QUESTION))
        with Client(daemon.socket) as client:
            session = client.session("m", session_id="diary", options=WHOLE)
            seen = ""
            with session, session.stream(QUESTION) as stream:
                for piece in stream:
                    seen += piece
                    if len(stream.tokens) >= 9:
                        break
                tokens = list(stream.tokens)
                if ending == "kill":
                    daemon.kill()
                elif ending == "stop":
                    daemon.stop()
        if ending != "leave":
            daemon.start_again()

        with Client(daemon.socket) as client, client.session("m", session_id="diary") as session:
            assert session.attached
            metadata = msgspec.json.decode(client.get_output(session.context, 1))
            assert metadata["stop_reason"] == "detached"
            stream = session.resume(tokens, seen)
            rest = "".join(stream)

            everything = client.detokenize(session.graph, tokens + stream.tokens)
            assert everything.decode() == seen + rest
            assert whole is None or seen + rest == whole
            assert stream.metadata["stop_reason"] == "length"
            assert stream.metadata["output_tokens"] == 80


def test_tokens_that_the_client_lacks_are_sent_first() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon, model="slow") as (client, opened):
            client.set_input(opened["context"], b"abcdefghij")
            client.start_request("stream", context=opened["context"], credit=4)
            assert read_tokens(client, 4) == list(b"abcd")
        with attached(daemon, model="slow") as (client, opened):
            params = {"context": opened["context"], "tokens": list(b"ab"), "text": b"ab"}
            result = client.call("resume", **params)
            first, *others = [event for _, _, event in client.events]
            assert first == {"tokens": list(b"cd"), "text": b"cd", "offset": 2}
            assert [e["offset"] for e in others] == list(range(4, 10))
            assert b"".join(e["text"] for e in others) == b"efghij"
            assert result["metadata"]["stop_reason"] == "eos"
            with pytest.raises(InvalidArgument, match="no turn of this session"):
                client.call("resume", **params)


def resume_ended_turn(client: RawClient, context: int, text: bytes, read: int, end: Any) -> None:
    """Read the rest of a turn that answered *text*, after its first *read* tokens, and its end."""
    [before] = client.call("sessions")["sessions"]
    assert client.metadata(context) == end["metadata"]
    seen = {"tokens": list(text[:read]), "text": text[:read]}
    result = client.call("resume", context=context, **seen)
    missed: dict[str, Any] = {"tokens": list(text[read:]), "text": text[read:]}
    missed |= {"offset": read} if read else {}
    assert [event for _, _, event in client.events] == ([missed] if read < len(text) else [])
    assert result == {"metadata": end["metadata"]}
    [after] = client.call("sessions")["sessions"]
    assert (after["turns"], after["tokens"]) == (1, before["tokens"]), "no other turn"
    for other in ({"tokens": [0]}, {"text": text + b"k"}):
        with pytest.raises(InvalidArgument, match="differ from those"):
            client.call("resume", context=context, **other)


@pytest.mark.parametrize("ending", ["stop", "kill", "leave"])
def test_the_rest_and_the_end_of_a_turn_that_has_ended_are_read_again(ending: str) -> None:
    """By three sessions, whose readers have nothing, a part and all of it."""
    text, reads, ends = b"abcdefghij", (0, 3, 10), {}
    with running_daemon(ECHO) as daemon:
        with ExitStack() as stack:
            for read in reads:
                client, opened = stack.enter_context(attached(daemon, f"read-{read}"))
                client.set_input(opened["context"], text)
                options = {"n-predict": 10, "seed": 7}
                turn = client.start_request("stream", context=opened["context"], options=options)
                ends[read] = client.wait_result(turn)
            if ending == "kill":
                daemon.kill()
            elif ending == "stop":
                daemon.stop()
        if ending != "leave":
            daemon.start_again()
        for read in reads:
            for _ in range(2):  # its reader may lose it again
                with attached(daemon, f"read-{read}") as (client, opened):
                    resume_ended_turn(client, opened["context"], text, read, ends[read])
            with attached(daemon, f"read-{read}") as (client, opened):
                client.set_input(opened["context"], b"more")
                with pytest.raises(InvalidArgument, match="no turn of this session"):
                    client.call("resume", context=opened["context"])


def test_an_invalid_credit_is_refused() -> None:
    with running_daemon(ECHO) as daemon, attached(daemon) as (client, opened):
        for credit in (0, 1025):
            with pytest.raises(InvalidArgument, match="the credit"):
                client.call("resume", context=opened["context"], credit=credit)


def test_a_turn_that_continued_in_another_worker_is_stored_as_one() -> None:
    with running_daemon(ECHO) as daemon:
        with attached(daemon, model="slow") as (client, opened):
            client.set_input(opened["context"], b"abcdefghijklmnopqrstuvwxyz")
            prompt = client.metadata(opened["context"])["input_tokens"]
            turn = client.start_request("stream", context=opened["context"], credit=64)
            seen = read_tokens(client, 5)
            [model] = [x for x in client.call("models")["models"] if x["name"] == "slow"]
            os.kill(model["pid"], signal.SIGKILL)
            client.wait_result(turn)
            events = [event for _, number, event in client.events if number == turn]
            seen += [token for event in events for token in event["tokens"]]
            assert seen == list(b"abcdefghijklmnopqrstuvwxyz")
            daemon.kill()
        daemon.start_again()
        assert tokens_of(daemon, model="slow") == prompt + 26
