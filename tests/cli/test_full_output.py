"""Commands whose standard output cannot be written, was closed, or lost its reader."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from inferd.cli.commands import COMMANDS
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model

CONFIG = echo_model("echo", tool_format="hermes") + echo_model("slow", step_ms=20)
PROGRAM = [sys.executable, "-c", "from inferd.cli import main; main()"]
FULL = Path("/dev/full")
SENTENCE = f"standard output cannot be written: {os.strerror(errno.ENOSPC)}"
NAMES = [name for names in COMMANDS.values() for name in names]
WITHOUT_DAEMON = ["--version", "--show-completion", "parameters", "doctor", "config show"]
WITHOUT_DAEMON += ["config schema", "gateway --new-key ada", "--json doctor", "--json parameters"]
WITH_DAEMON = [
    *("models", "ps", "sessions", "queue", "status", "stats", "states", "log-level"),
    *("show echo", "run echo hello", "embed echo hello", "template echo hello", "top --once"),
    *("load echo", "pin echo", "unpin echo", "unload echo", "stats --json", "ps --json"),
    *("run slow hello", "run echo hello --json"),
]


def run_to(output: Path, *arguments: str, socket: str = "") -> tuple[int, str]:
    """Return the exit status of a command and its text on standard error."""
    with (
        output.open("wb") as file,
        inferd_process(*arguments, socket=socket, stdout=file) as process,
    ):
        _, text = process.communicate(timeout=100)
    return int(process.returncode), text.decode()


def assert_reported(status: int, text: str) -> None:
    assert (status, text.count(SENTENCE)) == (1, 1), text
    assert "Traceback" not in text and "Exception ignored" not in text
    assert text.splitlines()[-1].startswith("  "), "the hint is the last line"


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in NAMES)])
def test_the_help_of_a_command_reports_a_full_output(arguments: list[str]) -> None:
    assert_reported(*run_to(FULL, *arguments))


@pytest.mark.parametrize("command", WITHOUT_DAEMON)
def test_a_command_without_a_daemon_reports_a_full_output(command: str) -> None:
    assert_reported(*run_to(FULL, *command.split(), socket="/nonexistent/inferd.sock"))


@pytest.mark.parametrize("command", WITH_DAEMON)
def test_a_command_reports_a_full_output(command: str, daemon: RunningDaemon) -> None:
    assert_reported(*run_to(FULL, *command.split(), socket=daemon.socket))


@pytest.mark.parametrize(
    ("command", "status", "output"),
    [
        ("run echo hello --stats", 0, b"hello\n"),
        ("run absent hello", 1, b""),
        ("chat echo --session s", 0, b""),
        ("no-such-command", 2, b""),
        ("run", 2, b""),
    ],
)
def test_messages_that_cannot_be_written_change_no_exit_status(
    command: str, status: int, output: bytes, daemon: RunningDaemon
) -> None:
    with (
        FULL.open("wb") as file,
        inferd_process(*command.split(), socket=daemon.socket, stderr=file) as process,
    ):
        text, _ = process.communicate(timeout=100)
    assert (process.returncode, text) == (status, output)


def test_a_chat_reports_a_full_output(daemon: RunningDaemon) -> None:
    with (
        FULL.open("wb") as file,
        inferd_process(
            "chat", "echo", socket=daemon.socket, stdin=subprocess.PIPE, stdout=file
        ) as process,
    ):
        _, text = process.communicate(b"hello\n", timeout=100)
    assert_reported(process.returncode, text.decode())


def test_an_error_and_a_full_output_are_both_reported() -> None:
    status, text = run_to(FULL, "ps", "--json", socket="/nonexistent/inferd.sock")
    assert "no daemon answers" in text
    assert_reported(status, text)


def test_a_file_that_may_not_grow_is_reported(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    with (tmp_path / "out").open("wb") as file:
        process = subprocess.run(
            [*PROGRAM, "parameters"],
            stdout=file,
            stderr=subprocess.PIPE,
            preexec_fn=limit,
            timeout=100,
            check=False,
        )
    says = f"standard output cannot be written: {os.strerror(errno.EFBIG)}"
    assert process.returncode == 1 and says in process.stderr.decode()


@pytest.mark.parametrize("command", ["--help", "parameters", "--json ps", "config show"])
def test_a_reader_that_leaves_ends_a_command_quietly(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with inferd_process(*command.split(), socket="/nonexistent/s", stdout=writer) as process:
        os.close(writer)
        _, text = process.communicate(timeout=100)
    own = "no daemon answers" in text.decode()
    assert process.returncode == 141 and own == (command == "--json ps")
    assert "Traceback" not in text.decode() and "cannot be written" not in text.decode()


def test_a_closed_output_is_no_failure() -> None:
    """As that of programs which a service manager starts without one."""
    closing = ["sh", "-c", 'exec "$0" "$@" >&-', *PROGRAM, "parameters"]
    done = subprocess.run(closing, capture_output=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
