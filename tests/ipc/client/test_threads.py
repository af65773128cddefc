"""Threads that share one synchronous client: one of them reads, and hands out the answers."""

from __future__ import annotations

import _thread
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from anyio.from_thread import BlockingPortal

import inferd
from inferd import Client, ConnectionLost, InvalidArgument, Timeout
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.ipc.fake_server import FakeServer

CONFIG = echo_model("m", slots=8) + echo_model("slow", slots=8, step_ms=5)
THREADS = 8


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG) as daemon:
        yield daemon


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.path, timeout=30) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as pool:
        yield pool


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns far more often, so that each sees the others at any line."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_each_of_eight_threads_gets_its_own_answers(
    daemon: RunningDaemon, pool: ThreadPoolExecutor
) -> None:
    with Client(daemon.socket) as client:
        graph = client.load_by_name("m")
        start = threading.Barrier(THREADS)

        def call_often(number: int) -> None:
            start.wait()
            for call in range(50):
                text = f"{number}: {call} " * (1 + call % 50)
                assert bytes(client.tokenize(graph, text)) == text.encode()

        for done in [pool.submit(call_often, number) for number in range(THREADS)]:
            done.result()


def test_two_threads_stream_at_once(daemon: RunningDaemon, pool: ThreadPoolExecutor) -> None:
    """Each waits in the middle until the other is there too, so neither runs to its end first."""
    both = threading.Barrier(2)

    def stream(client: Client, letter: str) -> str:
        with client.session("slow", raw=True) as session:
            text = ""
            for number, piece in enumerate(session.stream(letter * 60)):
                if number == 20:
                    both.wait()
                text += piece
            return text

    with Client(daemon.socket) as client:
        texts = [pool.submit(stream, client, letter) for letter in "ab"]
        assert [text.result() for text in texts] == ["a" * 60, "b" * 60]


def test_a_stream_that_nobody_reads_blocks_no_other_call(
    daemon: RunningDaemon, pool: ThreadPoolExecutor
) -> None:
    text = "slowly read " * 30  # more events than the credit allows
    with Client(daemon.socket) as client, client.session("m", raw=True) as session:
        stream = session.stream(text)
        read = next(stream)
        graph = client.load_by_name("m")
        for _ in range(50):
            call = pool.submit(client.tokenize, graph, "x" * 500)
            assert len(call.result(timeout=60)) == 500
        assert read + "".join(stream) == text


def held(
    client: Client, pool: ThreadPoolExecutor, server: FakeServer, portal: BlockingPortal, count: int
) -> list[Future[Any]]:
    """Start calls that wait in as many threads; the first of them reads."""
    calls = []
    for number in range(count):
        calls.append(pool.submit(client.chat, 100 + number, "hold"))
        portal.call(server.await_call, "chat", number + 1)
    return calls


def test_the_next_thread_reads_when_the_reading_one_has_its_answer(
    client: Client, pool: ThreadPoolExecutor, server: FakeServer, portal: BlockingPortal
) -> None:
    calls = held(client, pool, server, portal, THREADS - 1)
    for number, call in enumerate(calls):
        assert client.stats()["waiting"] == 0
        assert client.cancel(request=number + 1)
        with pytest.raises(Exception, match="cancelled"):
            call.result(timeout=60)
        assert not any(later.done() for later in calls[number + 1 :])


def test_each_thread_times_out_at_its_own_deadline(
    client: Client, pool: ThreadPoolExecutor, server: FakeServer, portal: BlockingPortal
) -> None:
    """The reading thread has the latest deadline, then the earliest."""
    for first, second in ((30.0, 0.05), (0.05, 0.2)):
        server.calls.clear()
        leading = pool.submit(client.chat, 12, "hold", timeout=first)
        portal.call(server.await_call, "chat")
        with pytest.raises(Timeout):
            client.chat(13, "hold", timeout=second)
        portal.call(server.await_call, "cancel")
        if first < second:
            with pytest.raises(Timeout):
                leading.result(timeout=60)
        else:
            assert client.cancel(12)
            with pytest.raises(Exception, match="cancelled"):
                leading.result(timeout=60)
    assert client.chat(14, "next") == "next"


def test_closing_ends_the_calls_of_all_threads(
    client: Client, pool: ThreadPoolExecutor, server: FakeServer, portal: BlockingPortal
) -> None:
    calls = held(client, pool, server, portal, 3)
    client.close()
    for call in calls:
        with pytest.raises(ConnectionLost, match="closed"):
            call.result(timeout=60)


def test_no_more_requests_are_in_flight_than_the_daemon_allows(
    server: FakeServer, portal: BlockingPortal, pool: ThreadPoolExecutor
) -> None:
    assert server.hello is not None
    server.hello["limits"]["requests_max"] = 18
    with Client(server.path) as client:
        calls = held(client, pool, server, portal, 2)
        with pytest.raises(Timeout, match="2 earlier calls are in flight") as caught:
            client.stats(timeout=0.02)
        assert caught.value.data == {"timeout": "total"} and caught.value.retryable
        waiting = pool.submit(client.stats)
        assert "stats" not in server.names()
        portal.call(server.cancel_all)
        assert waiting.result(timeout=60)["waiting"] == 0
        for call in calls:
            with pytest.raises(Exception, match="cancelled"):
                call.result(timeout=60)


def test_a_daemon_that_does_not_read_gets_whole_frames_later(
    client: Client, server: FakeServer, portal: BlockingPortal, pool: ThreadPoolExecutor
) -> None:
    portal.call(server.stop_reading)
    calls = [pool.submit(client.set_input, 12, 0, bytes(1_000_000), timeout=0.1) for _ in "ab"]
    for call in calls:
        with pytest.raises(Timeout):
            call.result(timeout=60)
    waiting = pool.submit(client.chat, 12, "fine")
    portal.call(server.reading.set)
    assert waiting.result(timeout=60) == "fine"
    portal.call(server.await_call, "cancel", 2)
    sizes = [len(p["tensor"]["data"]) for n, p in server.calls if n == "set_input"]
    assert sizes == [1_000_000] * 2


def test_a_killed_daemon_ends_the_calls_of_all_threads(pool: ThreadPoolExecutor) -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        begun = threading.Barrier(4)

        def stream(number: int) -> None:
            with client.session("slow", raw=True) as session:
                stream = session.stream("word " * 200)
                next(stream)
                begun.wait()
                "".join(stream)

        streams = [pool.submit(stream, number) for number in range(3)]
        begun.wait()
        daemon.kill()
        for done in streams:
            with pytest.raises(ConnectionLost, match="tokens of the answer were read"):
                done.result(timeout=60)
        with pytest.raises(ConnectionLost):
            client.stats()
        assert not client.connected


# Interrupts.

INTERRUPTED = """
import sys
import inferd
from inferd import Client

with Client(sys.argv[1]) as client, client.session("slow", raw=True) as session:
    for call in (lambda: session.chat("x" * 1000), lambda: "".join(session.stream("x" * 1000))):
        print("calling", flush=True)
        try:
            call()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        print(session.chat("still usable"), flush=True)
"""


def test_a_real_ctrl_c_cancels_the_call_in_the_daemon_and_the_client_goes_on(
    daemon: RunningDaemon,
) -> None:
    words = [sys.executable, "-X", "dev", "-W", "error", "-c", INTERRUPTED, daemon.socket]
    with Client(daemon.socket) as watcher:
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for _ in range(2):
                assert process.stdout.readline() == "calling\n"
                await_tasks(watcher, 1)
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline() == "interrupted\n"
                assert process.stdout.readline() == "still usable\n"
        assert process.returncode == 0
        await_tasks(watcher, 0)


def await_tasks(client: Client, count: int) -> None:
    until = time.monotonic() + 20
    while len(client.queue(all_users=True)) != count:
        assert time.monotonic() < until


def kill_when(portal: BlockingPortal, *condition: Any) -> threading.Thread:
    """Start a thread that sends SIGINT to this process once the server's *condition* holds."""

    def interrupt() -> None:
        portal.call(*condition)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


def test_ctrl_c_also_interrupts_a_thread_that_waits_for_the_reading_one(
    client: Client, pool: ThreadPoolExecutor, server: FakeServer, portal: BlockingPortal
) -> None:
    [leading] = held(client, pool, server, portal, 1)
    thread = kill_when(portal, server.await_call, "chat", 2)
    with pytest.raises(KeyboardInterrupt):
        client.chat(12, "hold")
    thread.join()
    portal.call(server.await_call, "cancel")
    assert server.calls[-1] == ("cancel", {"request": 2})
    assert client.chat(13, "next") == "next"
    assert not leading.done()
    client.cancel(100)
    with pytest.raises(Exception, match="cancelled"):
        leading.result(timeout=60)


def test_ctrl_c_just_before_the_client_waits_interrupts_it(
    client: Client, server: FakeServer, portal: BlockingPortal
) -> None:
    def interrupt() -> None:
        portal.call(server.await_call, "chat")
        _thread.interrupt_main()  # a signal that does not interrupt a system call

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.chat(12, "hold", timeout=3600)
    thread.join()
    assert client.chat(13, "next") == "next"


def test_another_thread_reads_after_ctrl_c_in_the_reading_one(
    client: Client, pool: ThreadPoolExecutor, server: FakeServer, portal: BlockingPortal
) -> None:
    following: list[Future[Any]] = []

    def interrupt() -> None:
        portal.call(server.await_call, "chat")
        following.append(pool.submit(client.chat, 100, "hold", timeout=30))
        portal.call(server.await_call, "chat", 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        client.chat(12, "hold")
    thread.join()
    portal.call(server.await_call, "cancel")
    portal.call(server.cancel_all)
    with pytest.raises(Exception, match="cancelled"):
        following[0].result(timeout=60)


def test_a_signal_handler_that_calls_the_interrupted_client_gets_an_error(
    client: Client, server: FakeServer, portal: BlockingPortal
) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        client.stats()

    before = signal.signal(signal.SIGINT, handle)
    try:
        thread = kill_when(portal, server.await_call, "chat")
        with pytest.raises(InvalidArgument, match="signal handler"):
            client.chat(12, "hold")
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert client.chat(13, "next") == "next"


CLIENT = str(Path(inferd.__file__).parent / "ipc" / "client")
SAFE_LINES = ("with ", "try:", "self._waiters.remove(")
"""Python checks for signals after calls and at the ends of loops: never at the beginning of these
lines, when a block is left.
"""


class Interrupter:
    """Raises KeyboardInterrupt before a line of the client's code: the n-th that is executed."""

    def __init__(self, line: int):
        self.lines_left = line

    def run(self, call: Callable[[], object]) -> bool:
        """Return whether *call* was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if CLIENT not in frame.f_code.co_filename:
            return None
        if event == "line" and not _source_line(frame).startswith(SAFE_LINES):
            self.lines_left -= 1
            if not self.lines_left:
                raise KeyboardInterrupt
        return self._trace


def _source_line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


@pytest.mark.filterwarnings(  # of objects whose first line was not reached
    "ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("kind", ["chat", "stream"])
def test_an_interrupt_before_any_line_leaves_the_client_usable(
    kind: str, client: Client, server: FakeServer, portal: BlockingPortal
) -> None:
    def call() -> None:
        if kind == "chat":
            assert client.chat(12, "one two") == "one two"
        else:
            assert list(client.stream(12, "one two")) == ["one ", "two ", "."]

    line, interrupted = 0, True
    while interrupted:
        line += 1
        interrupted = Interrupter(line).run(call)
        assert client.chat(13, f"after {line}", timeout=5) == f"after {line}", line
        assert list(client.stream(13, "a b", timeout=5)) == ["a ", "b ", "."], line
    assert line > 100
    portal.call(server.await_idle)
    client.stats()
    assert "[0 requests in flight]" in repr(client._asynchronous._open_connection)
