"""Daemons are killed and restarted under sessions that resume: their streams continue."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from inferd import AsyncClient, Client, ConnectionLost, InferdError, InvalidArgument, Session
from inferd.backends.errors import Cancelled, SessionExpired, ShuttingDown
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.lossy_path import LossyPath
from tests.models import short_smollm2
from tests.waiting import wait_until

ECHO = "[daemon]\nshutdown_grace_s = 0.1\n" + echo_model("m", slots=2, step_ms=5)
REAL = f"""
[daemon]
cores = 1
shutdown_grace_s = 0.1
[models.m]
file = "{short_smollm2()}"
ctx-size = 1024
slots = 1
flash-attn = "on"
"""
"""With flash attention, the logits of up to 63 tokens do not depend on the batch they are in."""
STORY = "Once upon a time — «über» the hills — there was a king who had three sons. " * 2
SHORT = "the end of a turn"
SESSIONS = 5
IDLE = ECHO.replace("shutdown_grace_s = 0.1", "idle_timeout_ms = 200")


def kill(daemon: RunningDaemon) -> None:
    daemon.kill()
    daemon.start_again()


def restart(daemon: RunningDaemon) -> None:
    assert daemon.stop() == 0
    daemon.start_again()


ENDINGS = pytest.mark.parametrize("end", [kill, restart])


class Interruptions:
    """Runs *actions* in order in a thread, each as soon as *pieces* more pieces were read."""

    def __init__(self, pieces: int, *actions: Callable[[], object]):
        self._every, self._actions = pieces, list(actions)
        self._pieces_missing = pieces
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def count_piece(self) -> None:
        """Count a piece that any reader has read."""
        with self._lock:
            self._pieces_missing -= 1
            if (
                self._pieces_missing > 0
                or not self._actions
                or (self._thread and self._thread.is_alive())
            ):
                return
            self._pieces_missing = self._every
            self._thread = threading.Thread(target=self._actions.pop(0))
            self._thread.start()

    def await_all(self) -> None:
        """Wait for the last action, and assert that all were run."""
        assert self._thread is not None and not self._actions, "the streams ended too soon"
        self._thread.join()


@pytest.mark.anyio
@ENDINGS
async def test_streams_continue_by_themselves_without_losing_or_repeating_a_token(
    end: Callable[[RunningDaemon], None],
) -> None:
    """Of five streams on two slots, some wait and some are parked when the daemon ends."""
    async with running_daemon(ECHO) as daemon, AsyncClient(daemon.socket) as client:
        interruptions = Interruptions(40, *[lambda: end(daemon)] * 3)

        async def stream_story(number: int) -> None:
            session = client.session("m", session_id=f"{number}", raw=True, resume=True)
            async with session:
                text, stream = "", session.stream(f"{number}: {STORY}")
                async for piece in stream:
                    text += piece
                    interruptions.count_piece()
                assert text == f"{number}: {STORY}"
                assert bytes(stream.tokens) == text.encode()
                assert stream.metadata["stop_reason"] == "eos"
                assert session.metadata["session_id"] == f"{number}"

        async with anyio.create_task_group() as group:
            for number in range(SESSIONS):
                group.start_soon(stream_story, number)
        await anyio.to_thread.run_sync(interruptions.await_all)


@ENDINGS
def test_streams_of_the_synchronous_client_continue_in_threads(
    end: Callable[[RunningDaemon], None],
) -> None:
    with running_daemon(ECHO) as daemon, Client(daemon.socket) as client, ExitStack() as stack:
        interruptions = Interruptions(40, *[lambda: end(daemon)] * 2)
        texts: dict[int, str] = {}

        def stream_story(number: int) -> None:
            with client.session("m", session_id=f"{number}", raw=True, resume=True) as session:
                for piece in session.stream(f"{number}: {STORY}"):
                    texts[number] = texts.get(number, "") + piece
                    interruptions.count_piece()

        for number in range(SESSIONS):
            thread = threading.Thread(target=stream_story, args=(number,))
            thread.start()
            stack.callback(thread.join)
        stack.close()
        interruptions.await_all()
        assert texts == {number: f"{number}: {STORY}" for number in range(SESSIONS)}


@pytest.mark.model
@pytest.mark.timeout(300)
def test_a_sampled_text_of_a_real_model_equals_that_of_an_uninterrupted_turn() -> None:
    options = {"seed": 7, "temp": 0.7, "n-predict": 36}
    question = "Write a story about a king and three sons."
    with running_daemon(REAL) as daemon, Client(daemon.socket) as client:
        with client.session("m", options=options) as session:
            whole = str(session.chat(question))
        with client.session("m", session_id="tale", options=options, resume=True) as session:
            interruptions = Interruptions(8, *[lambda: kill(daemon)] * 3)
            text, stream = "", session.stream(question)
            for piece in stream:
                text += piece
                interruptions.count_piece()
            interruptions.await_all()
            assert text == whole
            assert len(stream.tokens) == stream.metadata["output_tokens"] == 36


@ENDINGS
def test_a_chat_and_calls_after_a_restart_continue_too(
    end: Callable[[RunningDaemon], None],
) -> None:
    with (
        running_daemon(ECHO) as daemon,
        Client(daemon.socket) as client,
        Client(daemon.socket) as other,
        client.session("m", session_id="diary", resume=True, priority="high") as session,
    ):
        assert session.chat("hello") == "hello"
        [before] = other.sessions()
        end(daemon)
        session.set_options({"n-predict": 180})
        ending = threading.Thread(target=when_running, args=(daemon, end))
        ending.start()
        assert session.chat("x" * 200) == "x" * 180
        ending.join()
        with Client(daemon.socket) as other:
            [after] = other.sessions()
        assert (after["session_id"], after["priority"]) == ("diary", "high")
        assert after["tokens"] > before["tokens"] + 200, "the history has the question, once"
        assert after["tokens"] < before["tokens"] + 200 + 180 + 100


def when_running(daemon: RunningDaemon, end: Callable[[RunningDaemon], None]) -> None:
    """End the daemon once a turn has output tokens."""
    with Client(daemon.socket) as client:
        wait_until(lambda: any(task["output_tokens"] for task in client.queue()))
    end(daemon)


def interrupted(daemon: RunningDaemon, session: Session) -> tuple[str, InferdError]:
    """Kill the daemon during a stream; return the text that was read, and the error."""
    text = ""
    with session, pytest.raises(InferdError) as caught:
        for piece in session.stream(STORY):
            text += piece
            if len(text) == 9:
                daemon.kill()
    return text, caught.value


@pytest.mark.parametrize("session_id", [None, "diary"])
def test_without_resume_the_error_has_the_turns_progress(session_id: str | None) -> None:
    with running_daemon(ECHO) as daemon, Client(daemon.socket) as client:
        session = client.session("m", session_id=session_id, raw=True)
        text, error = interrupted(daemon, session)
        assert isinstance(error, ConnectionLost)
        assert error.data["text"] == text and STORY.startswith(text)
        assert bytes(error.data["tokens"]) == text.encode()
        assert f"{len(text.encode())} tokens of the answer were read" in error.message
        assert "resume=True" in error.hint


def test_after_a_stop_a_session_can_resume_by_hand_from_the_errors_progress() -> None:
    with running_daemon(ECHO) as daemon:
        text = ""
        with Client(daemon.socket) as client:
            session = client.session("m", session_id="diary", raw=True)
            with session, pytest.raises(ShuttingDown) as caught:
                for piece in session.stream(STORY):
                    text += piece
                    if len(text) == 9:
                        os.kill(daemon.pid, signal.SIGTERM)
        assert caught.value.data["text"] == text
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        daemon.start_again()
        with Client(daemon.socket) as client, client.session("m", session_id="diary") as session:
            assert text + "".join(session.resume(caught.value.data["tokens"], text)) == STORY


@pytest.mark.anyio
async def test_a_reader_that_does_not_wait_for_the_daemon_leaves_nothing_behind() -> None:
    async with (
        running_daemon(ECHO) as daemon,
        AsyncClient(daemon.socket) as client,
        client.session("m", session_id="diary", raw=True, resume=True) as session,
    ):
        begun = anyio.Event()

        async def read() -> None:
            async for _ in session.stream(STORY):
                begun.set()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await begun.wait()
            daemon.kill()
            await client._open_connection.wait_lost(math.inf)
            group.cancel_scope.cancel()
        await anyio.to_thread.run_sync(daemon.start_again)
        assert await session.chat("more") == "more"
        assert await client.queue() == []
        [found] = await client.sessions()
        assert (found["session_id"], found["turns"]) == ("diary", 2)


def leave(daemon: RunningDaemon) -> None:
    """Let the daemon go on."""


@pytest.mark.parametrize("end", [kill, restart, leave])
@pytest.mark.parametrize("read", [0, 3])
def test_the_rest_and_the_end_of_a_turn_that_ended_unread_are_read_once(
    end: Callable[[RunningDaemon], None], read: int, tmp_path: Path
) -> None:
    with (
        running_daemon(ECHO) as daemon,
        LossyPath(tmp_path, daemon.socket) as path,
        Client(path.path) as client,
        client.session("m", session_id="diary", raw=True, resume=True) as session,
        ThreadPoolExecutor() as threads,
    ):
        stream = session.stream(SHORT, options={"seed": 7})
        pieces = [next(stream) for _ in range(read)]
        path.lose_replies(None if read else b"stream")
        rest = threads.submit(list, stream)
        wait_until(lambda: b"stop_reason" in path.lost)
        end(daemon)
        path.cut()
        assert "".join(pieces + rest.result()) == SHORT
        assert bytes(stream.tokens) == SHORT.encode()
        metadata = session.metadata
        assert metadata == stream.metadata
        assert (metadata["stop_reason"], metadata["seed"]) == ("eos", 7)
        assert metadata["output_tokens"] == len(SHORT) + 1, "with the token that ends it"
        assert metadata["ttft_ms"] > 0
        [found] = client.sessions()
        assert found["turns"] == 1, "it was not computed again"
        assert session.chat("more") == "more"


@pytest.mark.parametrize("end", [kill, leave])
def test_the_error_of_a_turn_that_failed_unread_is_raised(
    end: Callable[[RunningDaemon], None], tmp_path: Path
) -> None:
    with (
        running_daemon(ECHO) as daemon,
        LossyPath(tmp_path, daemon.socket) as path,
        Client(path.path) as client,
        client.session("m", session_id="diary", raw=True, resume=True) as session,
        ThreadPoolExecutor() as threads,
    ):
        stream = session.stream(STORY)
        pieces = [next(stream) for _ in range(3)]
        path.lose_replies()
        rest = threads.submit(lambda: pieces.extend(stream))
        with Client(daemon.socket) as other:
            assert other.cancel(session.context)
        wait_until(lambda: b"Cancelled" in path.lost)
        end(daemon)
        path.cut()
        with pytest.raises(Cancelled) as caught:
            rest.result()
        output = caught.value.data["metadata"]["output_tokens"]
        assert output == len(stream.tokens) >= 3
        assert "".join(pieces).encode() == bytes(stream.tokens)
        assert session.chat("more") == "more"


def test_resuming_fails_if_no_daemon_returns_in_time() -> None:
    with (
        running_daemon(ECHO) as daemon,
        Client(daemon.socket, resume_timeout=0.3) as client,
    ):
        session = client.session("m", session_id="diary", raw=True, resume=True)
        text, error = interrupted(daemon, session)
        assert isinstance(error, ConnectionLost)
        assert (error.data["text"], bytes(error.data["tokens"])) == (text, text.encode())


@ENDINGS
def test_a_session_reports_each_loss_before_it_attaches_again(
    end: Callable[[RunningDaemon], None],
) -> None:
    losses: list[InferdError] = []
    with (
        running_daemon(ECHO) as daemon,
        Client(daemon.socket) as client,
        client.session("m", session_id="diary", resume=True, on_loss=losses.append) as session,
    ):
        interruptions = Interruptions(20, *[lambda: end(daemon)] * 2)
        for _ in session.stream(STORY):
            interruptions.count_piece()
        interruptions.await_all()
        assert len(losses) == 2
        assert all(isinstance(error, ConnectionLost | ShuttingDown) for error in losses)
        end(daemon)
        wait_until(lambda: not client.connected)
        assert len(session.history().messages) == 2, "it attaches again, too"
        assert len(losses) == 3


def test_a_lost_session_is_not_silently_replaced() -> None:
    with running_daemon(ECHO) as daemon, Client(daemon.socket) as client:

        def lose() -> None:
            daemon.kill()
            shutil.rmtree(daemon.directory / "state")
            daemon.start_again()

        interruptions = Interruptions(9, lose)
        text = ""
        with client.session("m", session_id="diary", raw=True, resume=True) as session:
            with pytest.raises(SessionExpired, match="'diary'") as caught:
                for piece in session.stream(STORY):
                    text += piece
                    interruptions.count_piece()
            interruptions.await_all()
            assert caught.value.data["text"] == text
            with pytest.raises(InvalidArgument, match="not open"):
                session.chat("more")


def test_a_session_that_was_idle_for_too_long_becomes_active_again() -> None:
    with (
        running_daemon(IDLE) as daemon,
        Client(daemon.socket) as client,
        client.session("m", session_id="diary", resume=True) as session,
    ):
        session.chat("one")
        with Client(daemon.socket) as other:
            wait_until(lambda: not other.sessions())
            assert session.chat("two") == "two"
            [found] = other.sessions()
        assert (found["session_id"], found["turns"]) == ("diary", 2)


def test_branches_with_an_id_continue_too() -> None:
    with (
        running_daemon(ECHO) as daemon,
        Client(daemon.socket) as client,
        client.session("m", session_id="trunk", resume=True) as session,
    ):
        session.chat("one")
        [branch] = session.fork(session_ids=["branch"])
        [nameless] = session.fork()
        kill(daemon)
        assert branch.chat("two") == "two"
        assert session.chat("three") == "three"
        with pytest.raises(ConnectionLost):
            nameless.chat("four")
        names = {s["session_id"]: s["turns"] for s in client.sessions()}
        assert names == {"trunk": 2, "branch": 1}
