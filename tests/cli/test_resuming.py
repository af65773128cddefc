"""Daemons that are killed or restarted during `chat` and `run --session`: the answer continues."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from inferd.backends.errors import ConnectionLost, ShuttingDown
from inferd.cli.inference.answering import loss_text
from inferd.ipc.client import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import Terminal, inferd_process, on_terminal
from tests.echo import echo_model
from tests.waiting import wait_until

from .home import Home, home_of

CONFIG = "[daemon]\nshutdown_grace_s = 0.1\n" + echo_model("m", step_ms=20)
SLOW_LOAD = echo_model("m", step_ms=20, load_ms=300)
STORY = "Once upon a time — «über» the hills — there was a king who had three sons. " * 3 + "END"
WAITS = "waiting up to "


def kill(daemon: RunningDaemon) -> None:
    daemon.kill()
    daemon.start_again()


def restart(daemon: RunningDaemon) -> None:
    assert daemon.stop() == 0
    daemon.start_again()


ENDINGS = pytest.mark.parametrize("end", [kill, restart])


def sessions_of(daemon: RunningDaemon) -> list[str | None]:
    with Client(daemon.socket) as client:
        return [session["session_id"] for session in client.sessions(dormant=True)]


def type_story(terminal: Terminal) -> str:
    """Type the story in a chat, and return the beginning of its answer."""
    terminal.until(">>> ")
    terminal.type(f"{STORY}\n")
    terminal.until("END")  # as it was typed
    return terminal.until("upon")


@pytest.mark.parametrize(
    ("error", "seconds", "text"),
    [
        (ConnectionLost("it is lost"), 60.0, "it is lost; waiting up to 60 s for its return"),
        (ShuttingDown("it ends"), 5.0, "it ends; waiting up to 5 s for its return"),
        (ConnectionLost("it is lost"), 0.5, "it is lost; waiting up to 0.5 s for its return"),
    ],
)
def test_the_line_about_a_loss_has_its_reason_and_the_longest_wait(
    error: ConnectionLost | ShuttingDown, seconds: float, text: str
) -> None:
    line = loss_text(error, seconds)
    assert line.startswith(text) and "\n" not in line
    assert "Ctrl-C ends the wait" in line


@ENDINGS
def test_a_run_with_a_session_continues_over_several_losses(
    end: Callable[[RunningDaemon], None],
) -> None:
    with running_daemon(CONFIG) as daemon:
        command = ("run", "m", STORY, "--session", "tale")
        with inferd_process(*command, socket=daemon.socket) as process:
            assert process.stdout is not None
            text = b""
            for _ in range(3):
                text += process.stdout.read(20)
                end(daemon)
            more, errors = process.communicate(timeout=60)
        assert (process.returncode, (text + more).decode()) == (0, f"{STORY}\n")
        assert [line.count(WAITS) for line in errors.decode().splitlines()] == [1, 1, 1], errors


@ENDINGS
def test_a_chat_on_a_terminal_continues_and_prints_one_line(
    end: Callable[[RunningDaemon], None], tmp_path: Path
) -> None:
    with running_daemon(CONFIG) as daemon:
        home = {"XDG_STATE_HOME": str(tmp_path)}
        with on_terminal("chat", "m", socket=daemon.socket, **home) as terminal:
            shown = type_story(terminal)
            end(daemon)
            shown += terminal.until(">>> ").removesuffix(">>> ")
            lines = shown.lstrip("\r\n").splitlines()
            assert len([line for line in lines if WAITS in line]) == 1, shown
            assert "".join(line for line in lines if WAITS not in line) == STORY
            terminal.type("next\n")
            assert terminal.until(">>> ").count("next") == 2, "the conversation goes on"
            end(daemon)  # between two turns
            terminal.type("last\n")
            shown = terminal.until(">>> ")
            assert shown.count("last") == 2 and shown.count(WAITS) == 1, shown
            terminal.type("\x04")
            assert terminal.process.wait(60) == 0
        assert sessions_of(daemon) == [], "the session was only for the chat"


def test_a_chat_that_reads_a_pipe_continues_in_one_history() -> None:
    with running_daemon(CONFIG) as daemon:
        with inferd_process(
            "chat", "m", "--session", "diary", socket=daemon.socket, stdin=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b"one\n")
            process.stdin.flush()
            assert process.stdout.readline() == b"one\n"
            kill(daemon)
            out, errors = process.communicate(f"{STORY}\n".encode(), timeout=60)
        assert (process.returncode, out.decode()) == (0, f"{STORY}\n")
        assert errors.decode().count(WAITS) == 1
        with Client(daemon.socket) as client:
            contents = [m["content"] for m in client.history(session_id="diary").messages]
        assert contents == ["one", "one", STORY, STORY]


def test_the_wait_is_bounded() -> None:
    with running_daemon(CONFIG) as daemon:
        command = ("run", "m", STORY, "--session", "tale", "--resume-timeout", "0.2")
        with inferd_process(*command, socket=daemon.socket) as process:
            assert process.stdout is not None
            assert process.stdout.read(4) == b"Once"
            daemon.kill()
            out, errors = process.communicate(timeout=60)
        assert process.returncode == 3
        assert STORY.encode().startswith(b"Once" + out.rstrip(b"\n"))
        assert b"resume(" not in errors and b"resume=True" not in errors, "they are for programs"


def test_ctrl_c_ends_the_wait_of_a_run() -> None:
    with running_daemon(CONFIG) as daemon:
        command = ("run", "m", STORY, "--session", "tale")
        with inferd_process(*command, socket=daemon.socket) as process:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.read(4) == b"Once"
            daemon.kill()
            assert WAITS.encode() in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        assert process.returncode == 130


def test_ctrl_c_ends_the_wait_of_a_chat_and_a_line_names_its_session(tmp_path: Path) -> None:
    with running_daemon(CONFIG) as daemon:
        home = {"XDG_STATE_HOME": str(tmp_path)}
        with on_terminal("chat", "m", socket=daemon.socket, **home) as terminal:
            type_story(terminal)
            daemon.kill()
            terminal.until(WAITS)
            terminal.type("\x03")
            shown = terminal.until_end()
            assert terminal.process.wait(60) == 130
        daemon.start_again()
        [session_id] = sessions_of(daemon)
        assert session_id is not None and f"`inferd chat m --session {session_id}`" in shown
        command = ("chat", "m", "--session", session_id)
        with inferd_process(*command, socket=daemon.socket) as process:
            assert b"is continued" in process.communicate(timeout=60)[1]
        assert sessions_of(daemon) == [session_id], "it now has a name"


def test_a_chat_ends_if_the_daemon_that_returns_no_longer_has_it() -> None:
    with running_daemon(CONFIG) as daemon:
        with inferd_process("chat", "m", socket=daemon.socket, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{STORY}\nnever read\n".encode())
            process.stdin.flush()
            assert process.stdout.read(4) == b"Once"
            daemon.kill()
            shutil.rmtree(daemon.directory / "state")
            daemon.start_again()
            out, errors = process.communicate(timeout=60)
        assert process.returncode == 1 and b"never" not in out
        assert b"no longer has session" in errors and b"keeps the conversation" not in errors


@pytest.mark.parametrize("end", ["exit", "interrupt", "hangup", "terminate"])
def test_a_chat_without_a_name_leaves_no_session(end: str) -> None:
    with running_daemon(CONFIG) as daemon:
        with inferd_process("chat", "m", socket=daemon.socket, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{STORY}\n".encode())
            process.stdin.flush()
            assert process.stdout.read(4) == b"Once"
            if end == "exit":
                process.stdin.close()
                process.stdin = None
            else:
                numbers = {"interrupt": 2, "hangup": 1, "terminate": 15}
                process.send_signal(numbers[end])
            process.communicate(timeout=60)
        statuses = {"exit": 0, "interrupt": 130, "hangup": 129, "terminate": 143}
        assert process.returncode == statuses[end]
        wait_until(lambda: not sessions_of(daemon))


def test_a_model_that_loads_again_draws_no_bar_into_the_answer(tmp_path: Path) -> None:
    with running_daemon(SLOW_LOAD) as daemon:
        environ = {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}
        with on_terminal("run", "m", STORY, "--session", "s", socket=daemon.socket, **environ) as t:
            t.until("loading m")
            t.until("upon")
            kill(daemon)
            rest = t.until_end()
            assert t.process.wait(60) == 0
        assert "loading" not in rest and rest.count(WAITS) == 1


def test_a_crashed_daemon_that_commands_may_start_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with home_of(monkeypatch) as home:
        home.configure(echo_model("m", step_ms=20))
        _crash_and_continue(home)


def _crash_and_continue(home: Home) -> None:
    with inferd_process("run", "m", STORY, "--session", "tale") as process:
        assert process.stdout is not None
        text = process.stdout.read(30)
        [daemon] = home.daemons()
        os.kill(daemon.pid, signal.SIGKILL)
        more, errors = process.communicate(timeout=60)
    assert (process.returncode, (text + more).decode()) == (0, f"{STORY}\n")
    assert errors.decode().count(WAITS) == 1
    assert errors.decode().count("started a daemon (pid ") == 2, "before the run, and in it"
    assert len(home.daemons()) == 1
