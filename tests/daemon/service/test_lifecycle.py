"""Start and end of a daemon: signals, stale sockets, and the end of its workers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from inferd.backends.errors import InferdError, ShuttingDown
from inferd.daemon.workers.process import environment_of_workers
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.raw import Closed, RawClient
from tests.waiting import wait_until

SLOW = "[daemon]\nshutdown-grace-s = 20\n" + echo_model("slow", slots=1, step_ms=10)
SLOW += echo_model("loading", load_ms=20_000)


def worker_of(client: RawClient, model: str) -> psutil.Process:
    """Return a model's worker, once it is started."""

    def pid() -> int:
        return int(client.call("show", name=model)["models"][0]["pid"])

    return psutil.Process(wait_until(pid))


def state_of(client: RawClient) -> str:
    return str(client.call("show", name="echo")["models"][0]["state"])


def wait_exited(processes: list[psutil.Process], seconds: float = 60.0) -> None:
    """Wait until the processes have ended; an unreaped process counts as ended."""
    wait_until(lambda: all(map(ended, processes)), seconds)


def ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def text_of(client: RawClient) -> str:
    return b"".join(e[2].get("text", b"") for e in client.events).decode()


def test_sigterm_finishes_running_turns_fails_waiting_ones_and_removes_the_socket() -> None:
    text = "finish me " * 10
    with running_daemon(SLOW) as daemon, RawClient(daemon.socket) as client:
        running = client.begin_stream(client.context("slow"), text)
        waiting = client.start_request(
            "stream", context=client.context("slow"), prompt="x", raw=True
        )
        wait_until(lambda: client.call("stats")["stats"]["waiting"] >= 1)
        worker = worker_of(client, "slow")
        os.kill(daemon.pid, signal.SIGTERM)

        with pytest.raises(ShuttingDown):
            client.wait_result(waiting)
        client.wait_result(running)
        assert text_of(client) == text
        assert isinstance(client.goodbye(), ShuttingDown)
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        assert not Path(daemon.socket).exists()
        wait_exited([worker])


def test_a_draining_daemon_admits_nothing_new() -> None:
    with running_daemon(SLOW) as daemon, RawClient(daemon.socket) as client:
        context = client.context("slow")
        running = client.begin_stream(context, "x" * 100)
        other = client.context("slow")
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: client.call("stats")["stats"]["draining"])

        with pytest.raises(ShuttingDown):
            client.call("chat", context=other, prompt="new")
        with pytest.raises(ShuttingDown):
            client.call("load_by_name", name="echo")
        client.wait_result(running)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(second: signal.Signals) -> None:
    with running_daemon(SLOW) as daemon, RawClient(daemon.socket) as client:
        client.start_request("stream", context=client.context("slow"), prompt="x" * 1000, raw=True)
        client.events.append(client.read_message())
        worker = worker_of(client, "slow")
        started = time.monotonic()
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: client.call("stats")["stats"]["draining"])
        os.kill(daemon.pid, second)

        assert daemon.process is not None
        assert daemon.process.wait(60) != 0
        assert time.monotonic() - started < 15.0, "of the 20 s that turns have to end"
        assert not Path(daemon.socket).exists()
        wait_exited([worker])


def test_a_load_in_progress_does_not_delay_the_shutdown() -> None:
    with running_daemon(SLOW) as daemon, RawClient(daemon.socket) as client:
        number = client.start_request("load_by_name", name="loading", progress=True)
        client.read_message()
        started = time.monotonic()

        assert daemon.stop() == 0
        assert time.monotonic() - started < 15.0, "of the 20 s of the load"
        with pytest.raises((InferdError, Closed)):
            client.wait_result(number)


@pytest.mark.alone
def test_workers_die_with_a_daemon_that_is_killed_within_a_second() -> None:
    with running_daemon(SLOW) as daemon, RawClient(daemon.socket) as client:
        client.start_request("stream", context=client.context("slow"), prompt="x" * 1000, raw=True)
        client.events.append(client.read_message())
        client.start_request("load_by_name", name="loading", progress=True)
        while client.read_message()[0] != 4:
            pass
        workers = [worker_of(client, "slow"), worker_of(client, "loading")]
        daemon.kill()

        wait_exited(workers, 1.0)


def test_a_stopped_socket_of_a_killed_daemon_is_taken_over() -> None:
    with running_daemon() as daemon:
        daemon.kill()
        assert Path(daemon.socket).exists(), "a killed daemon leaves its socket"
        daemon.start_again()

        with RawClient(daemon.socket) as client:
            assert client.call("models")["models"]


def test_a_stale_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "run" / "inferd.sock"
    path.parent.mkdir()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    daemon = RunningDaemon()
    daemon.directory = tmp_path
    daemon.socket = str(path)
    (tmp_path / "config.toml").touch()
    (tmp_path / "models").mkdir()
    daemon.start_again()
    try:
        with RawClient(daemon.socket) as client:
            assert client.call("models")["models"]
    finally:
        daemon.stop()


def test_handles_differ_over_restarts() -> None:
    with running_daemon() as daemon:
        handles = []
        for _ in range(2):
            with RawClient(daemon.socket) as client:
                handles.append(client.call("load_by_name", name="echo")["graph"])
            daemon.stop()
            daemon.start_again()

    assert handles[0] >> 32 != handles[1] >> 32


def test_workers_ignore_the_signals_of_the_terminal_and_go_first_when_memory_is_short() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        context = client.context()
        worker = worker_of(client, "echo")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            worker.send_signal(number)

        assert client.call("chat", context=context, prompt="still", raw=True)["text"] == b"still"
        assert Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip() == "500"


class InFolder(RunningDaemon):
    """A daemon that is started in a folder, and imports nothing from there."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def _command(self) -> list[str]:
        python, *arguments = super()._command()
        return ["env", f"--chdir={self._folder}", python, "-P", *arguments]


def test_a_worker_imports_nothing_from_where_the_daemon_was_started(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(3)\n")
    with InFolder(tmp_path) as daemon, RawClient(daemon.socket) as client:
        assert client.call("load_by_name", name="echo")


def test_commands_that_the_workers_socket_does_not_take_at_once_arrive_whole() -> None:
    config = '[models.wide]\nbackend = "echo"\nctx-size = 1000000\n'
    with running_daemon(config) as daemon, RawClient(daemon.socket) as client:
        graph = client.call("load_by_name", name="wide")["graph"]
        text = "abcdefgh" * 100_000
        numbers = [client.start_request("tokenize", graph=graph, text=text) for _ in range(3)]
        for number in numbers:
            assert bytes(client.wait_result(number)["tokens"]) == text.encode()


def test_an_idle_model_is_unloaded_after_its_keep_alive() -> None:
    with running_daemon("[daemon]\nkeep-alive-s = 0.2\n") as daemon:
        with RawClient(daemon.socket) as client:
            client.context()
            worker = worker_of(client, "echo")
        wait_exited([worker])

        with RawClient(daemon.socket) as client:
            # Its process has ended, but perhaps the daemon has not noticed yet.
            wait_until(lambda: state_of(client) != "unloading")
            assert state_of(client) == "cold"


def test_an_idle_daemon_with_an_idle_worker_uses_no_cpu() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        client.context()
        processes = [psutil.Process(daemon.pid), worker_of(client, "echo")]

        def used_s() -> list[float]:
            before = [sum(p.cpu_times()[:2]) for p in processes]
            time.sleep(2.0)  # the passing of time is what is measured
            after = [sum(p.cpu_times()[:2]) for p in processes]
            return [b - a for a, b in zip(before, after, strict=True)]

        used = [used_s()]
        while max(used[-1]) > 0.021 and len(used) < 4:  # on a busy machine they become idle late
            used.append(used_s())
    assert used[-1] == pytest.approx([0, 0], abs=0.021), used


def test_the_daemon_without_workers_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an interpreter of its own: a forked one would also have the modules of workers."""
    monkeypatch.setattr(RunningDaemon, "_start_process", subprocess.Popen)
    with running_daemon() as daemon:
        assert psutil.Process(daemon.pid).memory_info().rss < 60e6


def test_sighup_reads_the_models_directory_again() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        (daemon.directory / "models" / "new.gguf").write_bytes(b"GGUF")
        os.kill(daemon.pid, signal.SIGHUP)

        assert "new" in [m["name"] for m in client.call("models")["models"]]


def test_a_state_directory_that_cannot_be_written_does_not_stop_the_daemon(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with running_daemon() as daemon:
        daemon.stop()
        environment = {**os.environ, "INFERD_STATE_DIR": str(tmp_path / "file" / "state")}
        process = subprocess.Popen(
            [sys.executable, "-m", "inferd", "serve", "--socket", daemon.socket],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            seen = ""
            for line in lines:
                seen += line
                if "daemon.ready" in line:
                    break
            assert "component.failing" in seen and "component=state" in seen
            with RawClient(daemon.socket) as client:
                assert client.call("models")["models"]
        finally:
            process.terminate()
            process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("variable", "value", "spins"),
    [("LANG", "C", "10000"), ("GOMP_SPINCOUNT", "77", "77"), ("OMP_WAIT_POLICY", "active", None)],
)
def test_how_a_workers_threads_wait_is_set_unless_the_operator_does(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, spins: str | None
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    environment = environment_of_workers()
    assert (environment.get("GOMP_SPINCOUNT"), environment[variable]) == (spins, value)


def test_a_worker_has_the_environment_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")  # a new interpreter: /proc shows its environment
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        client.context("echo")
        environment = worker_of(client, "echo").environ()
    assert environment["GOMP_SPINCOUNT"] == "77"
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
