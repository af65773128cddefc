"""`inferd start`: readiness, the log, several starts at once, failed and interrupted starts."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import psutil
import pytest

from inferd import Client
from inferd.daemon.config.sources import load_config
from inferd.daemon.service.background import LOG_LINES, serve_command
from inferd.testing import running_daemon
from tests.daemon.command_line import inferd_process

from .home import COMMAND_S_MAX, Home, home_of, wait_ended


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with home_of(monkeypatch) as found:
        yield found


def opened(process: psutil.Process, descriptor: int) -> str:
    return os.readlink(f"/proc/{process.pid}/fd/{descriptor}")


def test_it_returns_when_the_daemon_answers_and_says_where(home: Home) -> None:
    done = home.inferd("start")
    assert (done.status, done.stderr) == (0, "")
    [daemon] = home.daemons()
    assert done.stdout == (
        f"the daemon (pid {daemon.pid}) is ready at {home.socket}\nlog: {home.log}\n"
    )
    with Client(home.socket) as client:
        assert client.stats()["pid"] == daemon.pid


def test_the_daemon_has_its_own_session_and_no_terminal(home: Home) -> None:
    assert home.inferd("start").status == 0
    [daemon] = home.daemons()
    assert os.getsid(daemon.pid) == daemon.pid and daemon.terminal() is None
    assert [opened(daemon, n) for n in (0, 1, 2)] == ["/dev/null", str(home.log), str(home.log)]


def test_the_log_is_a_private_file_which_logs_shows_also_after_the_end(home: Home) -> None:
    assert home.inferd("start").status == 0
    assert stat.S_IMODE(home.log.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.state.stat().st_mode) == 0o700
    assert "daemon.ready" in home.inferd("logs").stdout
    [daemon] = home.daemons()
    assert home.inferd("stop").status == 0
    wait_ended(daemon)
    assert "daemon.stopped" in home.inferd("logs").stdout
    assert home.inferd("ps").status == 3


def test_a_running_daemon_is_named_and_another_is_not_started(home: Home) -> None:
    assert home.inferd("start").status == 0
    [daemon] = home.daemons()
    again = home.inferd("start")
    assert again.status == 0
    assert (
        again.stdout
        == f"the daemon (pid {daemon.pid}) already runs at {home.socket}\nlog: {home.log}\n"
    )
    assert home.daemons() == [daemon]


def test_of_starts_at_once_one_starts_the_daemon_and_all_succeed(home: Home) -> None:
    processes = [inferd_process("start", "--json") for _ in range(4)]
    outputs = [process.communicate(timeout=COMMAND_S_MAX) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    found = [json.loads(stdout) for stdout, _ in outputs]
    [daemon] = home.daemons()
    assert {document["pid"] for document in found} == {daemon.pid}
    assert sorted(document["started"] for document in found) == [False, False, False, True]


def test_it_passes_its_options_on(home: Home) -> None:
    done = home.inferd(
        *("start", "--state-dir", str(home.folder / "other"), "--log-level", "debug"),
        *("--set", "models.second.backend=echo"),
    )
    assert f"log: {home.folder}/other/inferd.log" in done.stdout, done
    assert home.inferd("run", "second", "hello").stdout == "hello\n"
    assert '"level": "debug"' in (home.folder / "other" / "inferd.log").read_text()


def test_a_configured_log_file_is_used(home: Home) -> None:
    file = home.folder / "mine.log"
    home.configure(f"[daemon]\nlog-file = '{file}'\n")
    assert f"log: {file}\n" in home.inferd("start").stdout
    assert "daemon.ready" in file.read_text() and not home.log.exists()


def test_the_log_is_bounded_unless_the_configuration_decides(home: Home) -> None:
    config = load_config({}, {})
    assert [a for a in serve_command((), config) if a.startswith("--set=log-file")] == [
        f"--set=log-file={config.state_dir}/inferd.log",
        "--set=log-file-bytes-max=16777216",
    ]
    bounded = load_config({"log-file-bytes-max": "1000"}, {})
    assert not [a for a in serve_command((), bounded) if "bytes-max" in a]
    filed = load_config({"log-file": "/var/log/mine"}, {})
    assert not [a for a in serve_command((), filed) if "log-file" in a]


def test_variables_of_the_starter_s_service_manager_are_not_passed_on(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(home.folder / "gone"))
    assert home.inferd("start").status == 0
    with Client(home.socket) as client:
        assert not [c for c in client.stats()["components"] if c["up"] is False]


def test_a_daemon_that_ends_soon_is_not_taken_for_a_running_one(home: Home) -> None:
    assert home.inferd("start").status == 0
    assert home.inferd("drain").status == 0
    done = home.inferd("start")
    assert done.status == 4 and "admits no new ones" in done.stderr and "stop" in done.stderr
    assert home.inferd("stop").status == 0
    assert "is ready at" in home.inferd("start").stdout


# Starts that fail.


def test_a_daemon_that_cannot_start_gives_its_reason(home: Home) -> None:
    home.socket.parent.mkdir()
    home.socket.write_text("not a socket")
    done = home.inferd("start")
    assert (done.status, done.stdout) == (1, "")
    assert done.stderr.startswith(f"inferd: {home.socket} exists and is not a socket\n  choose ")
    assert json.loads(home.inferd("start", "--json").stdout)["error"]["name"] == "InvalidArgument"
    assert home.daemons() == []
    assert f"{home.socket} exists and is not a socket" in home.inferd("logs").stdout


def test_a_daemon_with_another_socket_is_named(home: Home) -> None:
    assert home.inferd("start").status == 0
    done = home.inferd("start", "--socket", str(home.folder / "other.sock"))
    assert done.status == 4
    assert (
        f"which listens on {home.socket}" in done.stderr and "inferd stop --socket" in done.stderr
    )


def test_errors_of_the_configuration_are_reported_before_a_start(home: Home) -> None:
    home.configure("[daemon]\nsessions-max = 0\n")
    done = home.inferd("start")
    assert done.status == 2 and "sessions-max" in done.stderr
    assert not home.log.exists()


def test_a_state_directory_that_cannot_be_used_is_an_error_with_a_hint(home: Home) -> None:
    (home.folder / "file").touch()
    done = home.inferd("start", "--state-dir", str(home.folder / "file" / "state"))
    assert done.status == 1 and "--state-dir" in done.stderr and "inferd serve" in done.stderr


def test_the_log_may_not_be_a_link(home: Home) -> None:
    home.state.mkdir()
    home.log.symlink_to(home.folder / "target")
    done = home.inferd("start")
    assert done.status == 1 and f"the log {home.log} cannot be written" in done.stderr
    assert not (home.folder / "target").exists() and home.daemons() == []


def test_a_daemon_that_is_not_ready_in_time_is_ended(home: Home) -> None:
    done = home.inferd("start", "--wait", "0")
    assert done.status == 4
    assert "was not ready in time" in done.stderr and "--wait" in done.stderr
    assert home.daemons() == []


@contextmanager
def starting(home: Home) -> Iterator[tuple[subprocess.Popen[bytes], psutil.Process, BinaryIO]]:
    """Yield `inferd start`, its daemon, which waits for the number of earlier starts, and the pipe
    from which it reads the number.
    """
    home.state.mkdir(exist_ok=True)
    os.mkfifo(home.state / "starts")
    command = inferd_process("start")
    try:
        with (home.state / "starts").open("wb", buffering=0) as pipe:  # once the daemon reads it
            [daemon] = home.daemons()
            yield command, daemon, pipe
    finally:
        command.kill()
        command.communicate()


def test_ctrl_c_ends_the_daemon_that_was_being_started(home: Home) -> None:
    with starting(home) as (command, daemon, _):
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=COMMAND_S_MAX)
        assert command.returncode == 130
        assert not daemon.is_running()


def test_a_daemon_whose_starter_was_killed_ends_when_it_is_ready(home: Home) -> None:
    with starting(home) as (command, daemon, pipe):
        command.kill()
        command.wait()
        assert daemon.is_running()
        pipe.write(b"1")
    wait_ended(daemon)
    assert '"event": "daemon.starter_has_ended"' in home.log.read_text()
    assert not home.socket.exists()


def test_the_end_of_the_log_is_shown_for_a_daemon_that_crashes(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    home.state.mkdir()
    home.log.write_text("of an earlier daemon\n")
    with starting(home) as (command, daemon, _):
        daemon.send_signal(signal.SIGABRT)
        stderr = command.communicate(timeout=COMMAND_S_MAX)[1].decode()
    assert command.returncode == 1
    first, *shown, hint = stderr.splitlines()
    assert first == "inferd: the daemon ended by SIGABRT before it was ready:"
    assert hint == f"  its log: {home.log}"
    _, *written = home.log.read_text().splitlines()
    assert "Fatal Python error: Aborted" in written
    assert shown == [f"  {line}" for line in filter(None, written)][-LOG_LINES:]


def test_a_daemon_in_the_foreground_is_found_too(home: Home) -> None:
    with running_daemon() as daemon:
        done = home.inferd("start", "--socket", daemon.socket)
        assert (done.status, [d.pid for d in home.daemons()]) == (0, [daemon.pid])
        assert done.stdout == (
            f"the daemon (pid {daemon.pid}) already runs at {daemon.socket}\n"
            "log: `inferd logs` shows it\n"
        )


@pytest.mark.parametrize("number", ["2", "77"])
def test_a_descriptor_that_cannot_be_used_for_readiness_is_refused(home: Home, number: str) -> None:
    done = home.inferd("serve", "--ready-fd", number)
    assert done.status != 0 and "ready-fd" in done.stderr and "Traceback" not in done.stderr


def test_two_daemons_of_a_user_both_serve_their_metrics(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("INFERD_METRICS")
    other = home.folder / "run" / "other.sock"
    states = ("--state-dir", str(home.folder / "other"))
    assert home.inferd("start").status == 0
    assert home.inferd("start", "--socket", str(other), *states).status == 0
    for socket in (home.socket, other):
        with Client(socket) as client:
            stats = client.stats()
        at = stats["metrics_address"]
        assert at == str(socket).replace(".sock", "-metrics.sock")
        assert {c["component"]: c["up"] for c in stats["components"]}["metrics"]
        assert stat.S_ISSOCK(os.stat(at).st_mode)
