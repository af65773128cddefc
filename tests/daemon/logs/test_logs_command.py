"""`inferd logs`: the daemon's log for people and for programs, from its file or the journal."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import NotFound, PermissionDenied
from inferd.cli.operations.logs_command import format_line
from inferd.daemon.logs.log_lines import (
    SystemdJournal,
    last_lines,
    open_log,
    systemd_journal_lines,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd, inferd_process
from tests.daemon.manager import serving
from tests.daemon.other_users import ADA

from .test_destinations import filed, journal_of_log, say

JOURNALCTL = """#!/bin/sh
echo "$@" >> "$0.asked"
echo 'Started inferd.'
echo '{"timestamp": "t", "level": "warning", "logger": "llama", "event": "llama.output",' \\
    '"text": "a b"}'
"""


def write_events(path: Path, *levels: str) -> None:
    lines = [{"timestamp": "t", "level": v, "logger": "daemon", "event": f"e{n}"}
             for n, v in enumerate(levels)]  # fmt: skip
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def names_in(text: str) -> list[str]:
    return [msgspec.json.decode(line)["event"] for line in text.splitlines()]


def test_the_last_lines_of_the_file_are_shown() -> None:
    with filed() as daemon:
        say(daemon)
        text = inferd("logs", socket=daemon.socket).stdout
        assert len(text.splitlines()) == len(daemon.file.read_bytes().splitlines())
        [ready] = [line for line in text.splitlines() if "daemon.ready" in line]
        assert "info    [daemon]    daemon.ready socket=" in ready and f"pid={daemon.pid}" in ready
        last = inferd("logs", "-n", "1", socket=daemon.socket).stdout
        assert "log.levels" in last and last.count("\n") == 1
        assert inferd("logs", "-n", "0", socket=daemon.socket).stdout == ""
        whole = inferd("logs", "--json", socket=daemon.socket).stdout
        assert whole.encode() == daemon.file.read_bytes()


def test_only_events_from_a_level_on_are_shown() -> None:
    with filed() as daemon:
        write_events(daemon.file, "error", *["info"] * 300, "warning", "debug", "info")
        seen = inferd("logs", "--level", "warning", "--json", socket=daemon.socket).stdout
        assert names_in(seen) == ["e0", "e301"]
        seen = inferd("logs", "--level", "info", "-n", "2", "--json", socket=daemon.socket).stdout
        assert names_in(seen) == ["e301", "e303"]
        assert inferd("logs", "--level", "loud", socket=daemon.socket).exit_code == 2


class FollowingCommand:
    """A running `inferd logs -f`, line by line."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.process = process
        self._lines: Queue[bytes] = Queue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def next(self) -> dict[str, Any]:
        event: dict[str, Any] = msgspec.json.decode(self._lines.get(timeout=60))
        return event

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._thread.join()


@contextmanager
def following(daemon: RunningDaemon, *arguments: str) -> Iterator[FollowingCommand]:
    follower = FollowingCommand(
        inferd_process("logs", "-f", "--json", *arguments, socket=daemon.socket)
    )
    try:
        yield follower
    finally:
        follower.close()


def append(path: Path, event: str, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.write(msgspec.json.encode({"event": event, "level": "info"}).decode() + "\n")


def test_new_events_are_shown_at_once_even_after_a_rotation() -> None:
    with filed() as daemon:
        write_events(daemon.file, "info", "info")
        with following(daemon, "-n", "1") as follower:
            assert follower.next()["event"] == "e1"
            append(daemon.file, "next")
            assert follower.next()["event"] == "next"
            old = daemon.file.with_suffix(".1")
            daemon.file.rename(old)
            append(old, "last of the old file")
            assert follower.next()["event"] == "last of the old file"
            append(old, "really the last")
            append(daemon.file, "first of the new")
            assert follower.next()["event"] == "really the last"
            assert follower.next()["event"] == "first of the new"
            daemon.file.unlink()
            append(daemon.file, "removed and made anew")
            assert follower.next()["event"] == "removed and made anew"
            os.truncate(daemon.file, 0)
            append(daemon.file, "short")
            assert follower.next()["event"] == "short"
            folder, aside = daemon.file.parent, daemon.directory / "aside"
            folder.rename(aside)
            folder.touch()
            append(aside / daemon.file.name, "in a folder that was moved")
            assert follower.next()["event"] == "in a folder that was moved"
            folder.unlink()
            folder.mkdir()
            append(daemon.file, "and made anew")
            assert follower.next()["event"] == "and made anew"


def test_ctrl_c_ends_it_as_it_ends_other_commands() -> None:
    with filed() as daemon, following(daemon, "-n", "1") as follower:
        follower.next()
        follower.process.send_signal(2)
        assert follower.process.wait(60) == 130


def test_the_log_of_a_daemon_that_has_exited_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with filed() as daemon:
        daemon.stop()
        monkeypatch.setenv("INFERD_CONFIG", str(daemon.directory / "config.toml"))
        seen = inferd("logs", "-n", "1", "--json", socket=daemon.socket).stdout
        assert names_in(seen) == ["daemon.stopped"]
        daemon.file.unlink()
        result = inferd("logs", socket=daemon.socket)
        assert (
            result.exit_code == 1
            and f"the daemon's log file {daemon.file} does not exist" in result.stderr
        )


def test_without_a_daemon_and_a_file_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("INFERD_CONFIG", os.devnull)
    monkeypatch.setenv("INFERD_STATE_DIR", str(tmp_path))
    result = inferd("logs")
    assert result.exit_code == 3 and "no daemon answers" in result.stderr


def test_a_log_without_file_and_journal_is_an_error_with_a_hint() -> None:
    with running_daemon() as daemon:
        result = inferd("logs", socket=daemon.socket)
        assert result.exit_code == 1 and result.stdout == ""
        assert f"pid {daemon.pid}" in result.stderr and "--set log-file=" in result.stderr
        assert "log: standard error" in inferd("status", socket=daemon.socket).stdout


def test_the_journal_is_queried_with_journalctl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "journalctl"
    program.write_text(JOURNALCTL)
    program.chmod(0o700)
    with running_daemon() as daemon:
        daemon.stop()
        with serving(daemon, {"JOURNAL_STREAM": journal_of_log(daemon)}) as process:
            monkeypatch.setenv("PATH", os.devnull)
            missing = inferd("logs", socket=daemon.socket)
            assert missing.exit_code == 1 and "journalctl" in missing.stderr
            monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
            seen = inferd("logs", "-n", "7", "-f", "--level", "error", socket=daemon.socket).stdout
            assert seen.splitlines() == ["Started inferd."], "and no warning"
            seen = inferd("logs", socket=daemon.socket).stdout
            assert seen.splitlines()[1] == 't warning [llama]     llama.output text="a b"'
            asked = program.with_suffix(".asked").read_text().splitlines()
            asked = [line for line in asked if "--lines=1 " not in line]  # the checks for access
            assert "--output=cat --lines=7 --priority=err" in asked[0] and "--follow" in asked[0]
            assert "--lines=100 --priority=debug" in asked[1] and "--follow" not in asked[1]
            assert all(f"_PID={process.pid}" in line or "--unit=" in line for line in asked)
            program.write_text("#!/bin/sh\nexit 3\n")
            failed = inferd("logs", socket=daemon.socket)
            assert failed.exit_code == 1 and "status 3" in failed.stderr


def test_a_user_to_whom_the_journal_shows_nothing_gets_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\ncase "$*" in *--follow*) exec sleep 1000;; esac\n')
    program.chmod(0o755)
    with running_daemon() as daemon:
        daemon.stop()
        with serving(daemon, {"JOURNAL_STREAM": journal_of_log(daemon)}):
            monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
            for follow in ((), ("-f",)):
                with inferd_process("logs", *follow, socket=daemon.socket) as process:
                    stdout, stderr = process.communicate(timeout=60)
                assert (process.returncode, stdout) == (1, b"")
                assert b"the systemd journal has no line of" in stderr


def test_only_other_users_are_sent_to_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "journalctl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(os, "geteuid", lambda: ADA)
    system, own = SystemdJournal("inferd.service"), SystemdJournal("inferd.service", user=True)
    with pytest.raises(PermissionDenied) as refused:
        next(systemd_journal_lines(system, 1, "debug", follow=True))
    assert "sudo inferd logs" in refused.value.hint
    with pytest.raises(NotFound, match=r"has no line of inferd\.service"):
        next(systemd_journal_lines(own, 1, "debug", follow=True))


def test_an_unreadable_file_is_an_error_with_a_hint() -> None:
    with filed() as daemon:
        daemon.file.unlink()
        daemon.file.mkdir()
        result = inferd("logs", socket=daemon.socket)
        assert result.exit_code == 1 and "Is a directory" in result.stderr
        daemon.file.rmdir()
        os.mkfifo(daemon.file)
        result = inferd("logs", socket=daemon.socket)
        assert result.exit_code == 1 and "is a pipe" in result.stderr
        daemon.file.unlink()


# Without a daemon.


@pytest.mark.parametrize("size", [1, 10, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_the_last_lines_are_read_from_the_end(size: int, count: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [b"%d" % number + b"x" * (size - 1) for number in range(9)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    with open_log(path) as file:
        assert last_lines(file, count, lambda _: True) == lines[9 - min(count, 9) :]
        assert file.read() == b"", "at its end"
        odd = last_lines(file, count, lambda line: int(line[:1]) % 2 == 1)
        assert odd == lines[1::2][4 - min(count, 4) :]


def test_no_event_controls_the_terminal_that_shows_it() -> None:
    event = {
        "timestamp": "t",
        "level": "info",
        "logger": "ipc",
        "event": "e",
        "software": "\x1b[2J\x9b",
    }
    line = msgspec.json.encode(event)
    assert format_line(line, colors=False) == 't info    [ipc]       e software="\\u001b[2J\\u009b"'
    assert format_line(b"no event \x1b[2J", colors=True) == "no event \\u001b[2J"
    colored = format_line(line, colors=True)
    assert "\x1b[32m" in colored and "\x1b[2J" not in colored
    with_exception = msgspec.json.encode({**event, "exception": "Traceback\n\x1b[2Jx"})
    assert format_line(with_exception, colors=True).endswith("Traceback\n\\u001b[2Jx")
