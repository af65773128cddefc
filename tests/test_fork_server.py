"""Daemons and commands that are forked from a fork server."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests import fork_server
from tests.daemon.command_line import inferd_process
from tests.fork_server import ForkedProcess

pytestmark = pytest.mark.process
COMMAND = [sys.executable, "-c"]
SERVE = "serve"


@pytest.fixture(autouse=True)
def servers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the servers' environment, whatever other tests have left in this process's own."""
    for name in os.environ.keys() - fork_server._environment.keys():
        monkeypatch.delenv(name)
    for name, value in fork_server._environment.items():
        monkeypatch.setenv(name, value)


def run(code: str, command: str = SERVE, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """Run *code* in a process that is forked from the server of a command."""
    pipe = subprocess.PIPE
    with ForkedProcess([*COMMAND, code, command], stdout=pipe, stderr=pipe, **more) as process:
        output, errors = process.communicate()
    return subprocess.CompletedProcess(code, process.returncode, output, errors)


def is_forked(pid: int) -> bool:
    return "fork_server.py" in " ".join(psutil.Process(pid).cmdline())


def test_a_daemon_is_a_child_of_the_tests_and_has_no_other_descriptors() -> None:
    with running_daemon() as daemon, Client(daemon.socket) as client:
        process = psutil.Process(daemon.pid)
        assert is_forked(daemon.pid) and process.ppid() == os.getpid()
        with client.session("echo") as session:
            assert session.chat("hello") == "hello"
        files = [os.readlink(f"/proc/{daemon.pid}/fd/{fd}") for fd in range(3)]
    assert files == ["/dev/null", "/dev/null", str(daemon.directory / "log")]
    assert daemon.process is not None and daemon.process.returncode == 0


def test_a_worker_is_a_child_of_its_daemon_and_has_no_other_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for start in (ForkedProcess, subprocess.Popen):
        monkeypatch.setattr(RunningDaemon, "_start_process", start)
        with running_daemon() as daemon, Client(daemon.socket) as client:
            with client.session("echo") as session:
                assert session.chat("hello") == "hello"
            [worker] = psutil.Process(daemon.pid).children()
            assert is_forked(worker.pid) == (start is ForkedProcess)
            files = [os.readlink(path) for path in Path(f"/proc/{worker.pid}/fd").iterdir()]
            found.append(sorted(file.split(":")[0] for file in files))
            client.unload_model("echo")
            worker.wait(60)
            assert "worker.died" not in daemon.log
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("code", "status", "errors"),
    [
        ("", 0, b""),
        ("raise SystemExit(7)", 7, b""),
        ("import sys; sys.exit('no')", 1, b"no\n"),
        ("1 / 0", 1, b"ZeroDivisionError: division by zero\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2, b"KeyboardInterrupt\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, b""),
        ("import atexit, os; atexit.register(os.write, 2, b'end')", 0, b"end"),
        ("import os, threading as t; t.Timer(0.01, os.write, (2, b'end')).start()", 0, b"end"),
    ],
)
def test_it_ends_as_an_interpreter_does(code: str, status: int, errors: bytes) -> None:
    forked = run(code)
    assert (forked.returncode, forked.stderr.endswith(errors)) == (status, True)
    new = subprocess.run([*COMMAND, code], capture_output=True)
    assert (new.returncode, new.stderr.endswith(errors)) == (status, True)


def test_it_has_its_own_folder_environment_and_arguments(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd(), os.environ['TERM'], os.getenv('TERM'), *sys.argv)"
    environment = {**os.environ, "TERM": "other"}
    shown = run(code, cwd=tmp_path, env=environment).stdout.decode().split()
    assert shown == [str(tmp_path), "other", "other", "-c", SERVE]


def test_it_gets_the_descriptors_that_are_passed_and_no_others(tmp_path: Path) -> None:
    code = """
import os
for number in sorted(map(int, os.listdir("/proc/self/fd"))):
    if os.path.exists(path := f"/proc/self/fd/{number}"):
        print(number, os.readlink(path))
"""
    last = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / str(n)).open("w")) for n in range(3)]
        passed = [file.fileno() for file in files]
        os.dup2(passed[2], last)
        stack.callback(os.close, last)
        shown = run(code, pass_fds=[*reversed(passed), last]).stdout.decode().splitlines()
    expected = [f"{fd} {file.name}" for fd, file in zip(passed, files, strict=True)]
    assert shown[3:] == [*expected, f"{last} {files[2].name}"]
    assert [line.split()[0] for line in shown[:3]] == ["0", "1", "2"]


def test_descriptors_may_change_places(tmp_path: Path) -> None:
    code = """
import itertools, os, sys
from tests.fork_server import _place

standard, numbers = range(3), range(10, 13)
for own in itertools.product(numbers, repeat=3):
    for number in numbers:
        os.dup2(os.open(f"{sys.argv[1]}/{number}", os.O_CREAT), number)
    _place([*standard, *own], [*standard, *numbers])
    names = [int(os.path.basename(os.readlink(f"/proc/self/fd/{number}"))) for number in numbers]
    assert names == list(own), (names, own)
"""
    subprocess.run([*COMMAND, code, str(tmp_path)], check=True)


def test_another_environment_needs_a_new_interpreter() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    shown = run(
        "import sys; print(sys.flags.hash_randomization, 'asyncio' in sys.modules)", env=environment
    )
    assert shown.stdout.split()[1] == b"False"
    assert b"True" in run("import sys; print('asyncio' in sys.modules)").stdout


def test_commands_without_a_server_of_their_own_share_one() -> None:
    for arguments in (("--version",), ("logs", "--help")):
        with inferd_process(*arguments) as process:
            assert is_forked(process.pid)
            assert process.communicate()[0]


def test_only_commands_that_share_a_server_may_have_another_terminal() -> None:
    environment = {**os.environ, "NO_COLOR": "1"}
    code = "import os, sys; print(os.environ['NO_COLOR'], 'asyncio' in sys.modules)"
    assert run(code, env=environment).stdout.split() == [b"1", b"False"]
    assert run(code, "logs", env=environment).stdout.split() == [b"1", b"True"]


def test_all_may_have_another_users_folders(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    code = "import os, sys; print(os.environ['HOME'], 'asyncio' in sys.modules)"
    for command in (SERVE, "logs"):
        shown = run(code, command, env=environment).stdout.decode().split()
        assert shown == [str(tmp_path), "True"]


def test_another_program_is_started_as_usual() -> None:
    with ForkedProcess(["sleep", "60"]) as process:
        assert not is_forked(process.pid)
        process.kill()


def test_it_may_lead_a_session_of_its_own() -> None:
    code = "import os; print(os.getsid(0) == os.getpid())"
    assert run(code, start_new_session=True).stdout == b"True\n"
    assert run(code).stdout == b"False\n"


def test_random_values_differ_between_processes() -> None:
    code = "import random, uuid; print(random.random(), uuid.uuid4())"
    assert len({run(code).stdout for _ in range(3)}) == 3


def test_a_daemon_that_cannot_start_is_reported() -> None:
    with pytest.raises(RuntimeError, match="nonsense"), RunningDaemon("nonsense = 1"):
        pass


def test_where_forking_is_forbidden_a_new_interpreter_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.fork_server._Server.fork", lambda *_: -1)
    found = run("import sys; print(len(sys.modules) < 200)")
    assert (found.returncode, found.stdout) == (0, b"True\n")
