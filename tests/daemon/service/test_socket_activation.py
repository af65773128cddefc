"""Socket activation: a connection starts the daemon, and a restart refuses none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from inferd import Client
from inferd.backends.errors import InvalidArgument
from inferd.ipc.server.listener import inherited_listener
from tests.daemon.activated_daemon import ActivatedDaemon
from tests.daemon.command_line import inferd
from tests.fork_server import ForkedProcess
from tests.raw import RawClient
from tests.repetitions import repetitions
from tests.waiting import wait_until

CONFIG = """
[daemon]
shutdown_grace_s = 0.05
[models.m]
backend = "echo"
slots = 2
[models.m.echo]
step_ms = 2
"""
RESTARTS = repetitions(4)


def test_a_connection_starts_the_daemon_and_its_path_stays(tmp_path: Path) -> None:
    path = tmp_path / "inferd.sock"
    command = [sys.executable, "-m", "inferd", "serve", "--state-dir", str(tmp_path / "state")]
    names = [f"-E{name}" for name in ("PYTHONPATH", "VIRTUAL_ENV") if name in os.environ]
    process = subprocess.Popen(
        ["systemd-socket-activate", f"--listen={path}", *names, *command],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "Listening on" in process.stderr.readline()
        with Client(path, connect_timeout=30) as client, client.session("echo") as session:
            assert session.chat("hello") == "hello"
            stats = client.stats()
            assert stats["socket_activated"] is True and stats["pid"] == process.pid
        assert inferd("stop", socket=str(path)).exit_code == 0
        assert process.wait(60) == 0
        assert path.is_socket(), "it is systemd's"
    finally:
        process.kill()
        process.communicate()


def test_restarts_under_load_refuse_no_connection() -> None:
    with ActivatedDaemon(CONFIG) as daemon:
        over = threading.Event()
        failures: list[BaseException] = []
        done = [0, 0]

        def converse(number: int) -> None:
            text = f"{number} " * 20
            while not over.is_set():
                with (
                    Client(daemon.socket, connect_timeout=30) as client,
                    client.session("m", session_id=str(number), raw=True, resume=True) as session,
                ):
                    session.reset()
                    assert session.chat(text) == text
                    done[0] += 1

        def connect(_: int) -> None:
            while not over.is_set():
                with RawClient(daemon.socket, timeout_s=30.0) as client:
                    assert client.server_hello[1]["instance"] > 0
                    done[1] += 1

        def watched(work: object, number: int) -> None:
            try:
                work(number)  # type: ignore[operator]
            except BaseException as exc:
                failures.append(exc)
                raise

        threads = [threading.Thread(target=watched, args=(converse, n)) for n in range(3)]
        threads.append(threading.Thread(target=watched, args=(connect, 0)))
        for thread in threads:
            thread.start()
        instances = set()
        try:
            for _ in range(RESTARTS):
                before = list(done)
                while not failures and (done[0] == before[0] or done[1] == before[1]):
                    over.wait(0.005)
                assert not failures
                with RawClient(daemon.socket) as client:
                    instances.add(client.server_hello[1]["instance"])
                daemon.stop()
                daemon.start_again()
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert not failures
        assert len(instances) == RESTARTS


def test_a_client_that_connects_during_the_shutdown_is_served_by_the_next_daemon() -> None:
    config = CONFIG.replace("0.05", "20").replace("slots = 2", "slots = 1")
    with ActivatedDaemon(config) as daemon, RawClient(daemon.socket) as client:
        text = "finish me " * 30
        turn = client.begin_stream(client.context("m"), text)
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: client.call("stats")["stats"]["draining"])
        late = socket.socket(socket.AF_UNIX)
        late.connect(daemon.socket)
        client.wait_result(turn)
        assert client.streamed_text == text
        late.setblocking(False)
        with pytest.raises(BlockingIOError):
            late.recv(1)  # this daemon did not take it
        assert daemon.process is not None and daemon.process.wait(60) == 0
        daemon.start_again()
        late.settimeout(60)
        assert b"inferd/" in late.recv(4096)
        late.close()


def test_a_second_signal_leaves_the_path(tmp_path: Path) -> None:
    config = CONFIG.replace("0.05", "20")
    with ActivatedDaemon(config) as daemon, RawClient(daemon.socket) as client:
        client.start_request("stream", context=client.context("m"), prompt="x" * 2000, raw=True)
        client.events.append(client.read_message())
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: client.call("stats")["stats"]["draining"])
        assert daemon.stop() != 0
        assert Path(daemon.socket).is_socket()
        daemon.start_again()
        with RawClient(daemon.socket) as client:
            assert client.call("models")["models"]


def test_sockets_for_another_process_are_not_used() -> None:
    environment = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1", "KEPT": "x"}
    assert inherited_listener(environment) is None
    assert environment == {"KEPT": "x"}, "workers are not told"


@pytest.mark.parametrize(
    ("names", "kinds", "cause"),
    [
        (("x",), ("stream",), "other than a listening"),
        (("x",), ("tcp",), "AF_INET"),
        (("x",), ("closed",), "it is closed"),
        (("x", "y"), ("listening", "listening"), "2 sockets, 0 of them"),
        (("inferd", "inferd"), ("listening", "listening"), "2 sockets, 2 of them"),
    ],
)
def test_an_unsuitable_passed_socket_is_refused_with_a_hint(
    names: tuple[str, ...], kinds: tuple[str, ...], cause: str, tmp_path: Path
) -> None:
    """Run in another process, since descriptors 3 and 4 are in use here."""
    script = (
        "import os, socket, sys\n"
        "kinds, names = sys.argv[2].split(','), sys.argv[3]\n"
        "keep = []\n"
        "for number, kind in enumerate(kinds, 3):\n"
        "    family = socket.AF_INET if kind == 'tcp' else socket.AF_UNIX\n"
        "    sock = socket.socket(family)\n"
        "    if kind == 'listening':\n"
        "        sock.bind(f'{sys.argv[4]}/{number}')\n"
        "        sock.listen()\n"
        "    os.dup2(sock.fileno(), number + 20)\n"
        "    keep.append(sock)\n"
        "for number in range(3, 3 + len(kinds)):\n"
        "    os.dup2(number + 20, number)\n"
        "    if kinds[number - 3] == 'closed':\n"
        "        os.close(number)\n"
        "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': str(len(kinds)),\n"
        "    'LISTEN_FDNAMES': names}\n"
        "sys.argv = ['inferd', 'serve']\n"
        "from inferd.cli import main\n"
        "main()\n"
    )
    arguments = [sys.executable, "-c", script, "serve", ",".join(kinds), ":".join(names)]
    environment = {**os.environ, "INFERD_STATE_DIR": str(tmp_path / "state")}
    arguments.append(str(tmp_path))
    with ForkedProcess(
        arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        said = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 1
    assert cause in said
    assert "FileDescriptorName=inferd" in said or "systemd/user/inferd.socket" in said


def test_an_announced_but_missing_socket_is_refused() -> None:
    environment = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"}
    with pytest.raises(InvalidArgument, match="0 sockets"):
        inherited_listener(environment)
