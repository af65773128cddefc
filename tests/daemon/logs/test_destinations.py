"""Destinations of the log: a file that is moved, removed or full; the journal; a terminal."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd import Client
from inferd.daemon.logs.setup import (
    LogFile,
    StandardError,
    _console,
    is_systemd_journal,
    previous_file,
    systemd_journal_of,
)
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd, inferd_process, on_terminal
from tests.daemon.manager import manager_of, serving
from tests.daemon.service.test_components import check, limit, part
from tests.daemon.service.test_reload import reload
from tests.waiting import wait_until

CONFIG = "[daemon]\nlog-file = 'logs/inferd.log'\n"
"""Relative to the file, as all paths in it."""


class Filed(RunningDaemon):
    """A daemon that logs to a file in its own folder."""

    def __enter__(self) -> Filed:
        self.start()
        return self

    def start_again(self) -> None:
        (self.directory / "logs").mkdir(exist_ok=True)
        super().start_again()

    @property
    def file(self) -> Path:
        return self.directory / "logs" / "inferd.log"


def filed(config: str = CONFIG) -> Filed:
    return Filed(config)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def names_of(path: Path) -> list[str]:
    return [event["event"] for event in lines_of(path)]


def say(daemon: RunningDaemon) -> None:
    """Cause an event: each change of the levels is logged."""
    with Client(daemon.socket) as client:
        client.log_level({"ipc": "info"})


def test_events_go_to_the_file_and_nowhere_else() -> None:
    with filed() as daemon:
        say(daemon)
        assert "log.levels" in names_of(daemon.file) and names_of(daemon.file)[-1] == "log.levels"
        assert daemon.log == ""
        assert stat.S_IMODE(daemon.file.stat().st_mode) == 0o600
        with Client(daemon.socket) as client:
            assert client.stats()["log"]["file"] == str(daemon.file)
        assert f"log: {daemon.file}" in inferd("status", socket=daemon.socket).stdout
        daemon.stop()
        assert names_of(daemon.file)[-1] == "daemon.stopped"
        before = len(names_of(daemon.file))
        daemon.start_again()
        assert len(names_of(daemon.file)) > before, "appended"


@pytest.mark.parametrize("how", ["moved", "removed", "emptied"])
def test_a_rotated_file_is_created_again_with_the_next_event(how: str) -> None:
    with filed() as daemon:
        old = daemon.file.with_suffix(".1")
        if how == "moved":
            daemon.file.rename(old)
        elif how == "removed":
            daemon.file.unlink()
        else:
            os.truncate(daemon.file, 0)
        say(daemon)
        say(daemon)
        assert names_of(daemon.file) == ["log.levels"] * 2
        if how == "moved":
            assert "daemon.ready" in names_of(old) and "log.levels" not in names_of(old)
        assert part(daemon, "log")["up"]


def test_sighup_reopens_the_file_even_with_an_error_in_the_configuration() -> None:
    with filed() as daemon, manager_of(daemon) as manager:
        daemon.file.rename(daemon.file.with_suffix(".1"))
        reload(daemon, manager, CONFIG + "wrong = 1\n")
        assert names_of(daemon.file)[0] == "config.refused"


def test_the_file_changes_with_the_configuration() -> None:
    with filed() as daemon, manager_of(daemon) as manager:
        other = daemon.directory / "logs" / "other.log"
        reload(daemon, manager, CONFIG.replace("inferd.log", "other.log"))
        assert "config.read_again" in names_of(other)
        reload(daemon, manager, "")
        say(daemon)
        assert "log.levels" not in names_of(other) and "log.levels" in daemon.log


def test_a_file_that_cannot_be_opened_does_not_stop_the_daemon() -> None:
    with filed("[daemon]\nlog-file = 'logs'\n") as daemon:
        check(daemon, "log", f"{daemon.directory / 'logs'}: Is a directory")


def test_a_folder_missing_for_a_while_does_not_stop_the_daemon() -> None:
    with filed() as daemon, manager_of(daemon) as manager:
        folder, aside = daemon.file.parent, daemon.directory / "aside"
        folder.rename(aside)
        say(daemon)
        assert manager.status("serving; degraded: log (")
        check(daemon, "log", f"{daemon.file}: No such file or directory")
        assert "log.levels" in daemon.log, "in standard error meanwhile"
        folder.mkdir()
        say(daemon)
        manager.serves()
        assert names_of(daemon.file) == ["log.levels", "component.recovered"]
        assert part(daemon, "log")["up"]


def test_a_full_disk_does_not_stop_the_daemon_and_tears_one_line_at_most() -> None:
    with filed() as daemon, manager_of(daemon) as manager:
        assert part(daemon, "log")["up"]
        limit(daemon.pid, daemon.file.stat().st_size + 20)
        say(daemon)
        assert manager.status("serving; degraded: log (")
        found = part(daemon, "log")
        assert not found["up"] and "File too large" in found["cause"] and found["remedy"]
        limit(daemon.pid, resource.RLIM_INFINITY)
        say(daemon)
        manager.serves()
        torn = []
        for line in daemon.file.read_bytes().splitlines():
            try:
                msgspec.json.decode(line)
            except msgspec.DecodeError:
                torn.append(line)
        assert [len(line) for line in torn] == [20]
        assert daemon.file.read_bytes().count(b"log.levels") == 1


def test_events_that_cannot_be_written_anywhere_do_not_stop_the_daemon() -> None:
    """Standard error is a file here, too: both are full."""
    with filed() as daemon, manager_of(daemon) as manager:
        assert part(daemon, "log")["up"]
        limit(daemon.pid, 0)
        say(daemon)
        assert manager.status("serving; degraded: log (")
        assert not part(daemon, "log")["up"]
        assert daemon.log == ""
        limit(daemon.pid, resource.RLIM_INFINITY)
        say(daemon)
        manager.serves()


def test_a_reopened_file_is_appended_to_and_a_pipe_without_a_reader_does_not_block(
    tmp_path: Path,
) -> None:
    causes: list[str | None] = []
    file = LogFile(tmp_path / "log", causes.append)
    assert file.write_line(b"one\n")
    file.reopen()
    assert file.write_line(b"two\n")
    file.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n" and causes == []
    os.mkfifo(tmp_path / "pipe")
    piped = LogFile(tmp_path / "pipe", causes.append)
    assert not piped.write_line(b"one\n") and not piped.write_line(b"two\n")
    assert len(causes) == 1 and "pipe: " in str(causes[0]), "reported once"


# Standard error.


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_slow_reader_of_standard_error_gets_whole_lines(kind: str) -> None:
    pair = os.pipe() if kind == "pipe" else [end.detach() for end in socket.socketpair()]
    theirs, ours = pair
    error, lines = StandardError(ours), 0
    try:
        while error.write(b"%05d\n" % lines * 100):
            lines += 1
        assert lines > 10 and not error.write(b"lost\n" * 120), "it waits for nobody"
        read = os.read(theirs, 1 << 20)
        assert error.write(b"last\n")
        while not read.endswith(b"last\n"):
            read += os.read(theirs, 1 << 20)
        assert read.splitlines() == [b"%05d" % (n // 100) for n in range(lines * 100)] + [b"last"]
    finally:
        error.close()
        for end in pair:
            os.close(end)


def test_unread_standard_error_blocks_no_client(tmp_path: Path) -> None:
    extra = ["--set", "log-format=json", "--set", "log-level=debug"]
    theirs, ours = os.pipe()
    process = inferd_process(*arguments(tmp_path), *extra, stderr=ours)
    os.close(ours)
    try:
        read = b""
        while b"daemon.ready" not in read:
            read += os.read(theirs, 1 << 16)
        fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
        with Client(tmp_path / "s", timeout=60) as client:
            for _ in range(100):
                client.models()
            read += os.read(theirs, 1 << 16)
            client.models()
            while b"log.lost" not in read:
                read += os.read(theirs, 1 << 16)
    finally:
        process.kill()
        process.communicate()
        os.close(theirs)
    found = [msgspec.json.decode(line) for line in read.splitlines(keepends=True) if b"\n" in line]
    [lost] = [event for event in found if event["event"] == "log.lost"]
    written = sum(event["event"] == "call.done" for event in found)
    assert lost["level"] == "warning" and written + lost["events"] >= 100


# Systemd's journal.


def journal_of_log(daemon: RunningDaemon) -> str:
    status = (daemon.directory / "log").stat()
    return f"{status.st_dev}:{status.st_ino}"


def since_restart_text(daemon: RunningDaemon) -> str:
    return daemon.log.rsplit("daemon.stopped", 1)[1]


def since_restart(daemon: RunningDaemon) -> list[str]:
    return since_restart_text(daemon).splitlines()[1:]


def test_in_the_journal_events_are_json_with_their_priority() -> None:
    with running_daemon() as daemon:
        daemon.stop()
        with serving(daemon, {"JOURNAL_STREAM": journal_of_log(daemon)}) as process:
            (daemon.directory / "config.toml").write_text("wrong = 1\n")
            os.kill(process.pid, signal.SIGHUP)
            wait_until(lambda: "component.failing" in since_restart_text(daemon))
            lines = since_restart(daemon)
            assert all(line[:4] in ("<3>{", "<4>{", "<6>{", "<7>{") for line in lines)
            found = {
                e["event"]: (line[1], e) for line, e in zip(lines, decoded(lines), strict=True)
            }
            priority, ready = found["daemon.ready"]
            assert priority == "6" and ready["socket"] == daemon.socket
            assert found["config.refused"][0] == found["component.failing"][0] == "3"
            with Client(daemon.socket) as client:
                assert set(client.stats()["log"]["journal"]) == {"unit", "user"}


def decoded(lines: list[str]) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line[3:]) for line in lines]


def test_a_variable_that_names_another_stream_makes_no_journal() -> None:
    with running_daemon() as daemon:
        daemon.stop()
        with serving(daemon, {"JOURNAL_STREAM": "1:2"}):
            assert not any(line.startswith("<") for line in since_restart(daemon))
            with Client(daemon.socket) as client:
                assert client.stats()["log"]["journal"] is None


def test_the_unit_of_the_journal_is_read_from_the_cgroup() -> None:
    system = "0::/system.slice/inferd.service\n"
    user = "0::/user.slice/user-7.slice/user@7.service/app.slice/inferd.service\n"
    assert systemd_journal_of(system) == {"unit": "inferd.service", "user": False}
    assert systemd_journal_of(user) == {"unit": "inferd.service", "user": True}
    for other in ("0::/\n", "", "0::/user.slice/session-1.scope\n"):
        assert systemd_journal_of(other) == {"unit": None, "user": False}
    assert not is_systemd_journal({"JOURNAL_STREAM": "1:2"}, -1)


# A full file.


def test_a_full_file_replaces_the_previous_one_and_another_begins(tmp_path: Path) -> None:
    path, previous = tmp_path / "log", tmp_path / "log.1"
    file = LogFile(path, bytes_max=8, rotates=True)
    assert file.write_line(b"1234567\n") and not previous.exists(), "it is full to the byte"
    assert file.write_line(b"89\n")
    assert (previous.read_bytes(), path.read_bytes()) == (b"1234567\n", b"89\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert file.write_line(b"longer than the limit\n") and file.write_line(b"x\n")
    assert previous.read_bytes() == b"longer than the limit\n"
    assert file.write_line(b"y\n") and path.read_bytes() == b"x\ny\n"


def test_a_full_file_that_cannot_be_renamed_gets_no_more_lines(tmp_path: Path) -> None:
    causes: list[str | None] = []
    file = LogFile(tmp_path / "log", causes.append, bytes_max=8, rotates=True)
    file.write_line(b"1234567\n")
    (tmp_path / "log.1").mkdir()
    assert not file.write_line(b"8\n")
    assert causes == [f"{tmp_path / 'log'}: Is a directory"]
    (tmp_path / "log.1").rmdir()
    assert file.write_line(b"8\n") and causes[1:] == [None]


def test_the_daemon_s_file_is_bounded_from_a_reload_on() -> None:
    with filed() as daemon, manager_of(daemon) as manager:
        reload(daemon, manager, f"{CONFIG}log-file-bytes-max = 1000\n")
        for _ in range(20):
            say(daemon)
        assert daemon.file.stat().st_size <= 1000
        assert previous_file(daemon.file).stat().st_size > 0


# A terminal.


def arguments(folder: Path) -> list[str]:
    socket = str(folder / "s")
    (folder / "models").mkdir()
    (folder / "empty.toml").touch()
    return [
        *("serve", "--config", str(folder / "empty.toml"), "--socket", socket),
        *("--models-dir", str(folder / "models"), "--state-dir", str(folder / "state")),
        *("--metrics", "off"),
    ]


def test_on_a_terminal_events_are_in_colours(tmp_path: Path) -> None:
    with on_terminal(*arguments(tmp_path), socket="", TERM="xterm") as terminal:
        shown = terminal.until("daemon.ready") + terminal.until("\n")
    assert "\x1b[" in shown and "daemon" in shown
    assert "{" not in shown


def test_no_colours_where_the_user_wants_none(tmp_path: Path) -> None:
    with on_terminal(*arguments(tmp_path), socket="", TERM="xterm", NO_COLOR="1") as terminal:
        shown = terminal.until("daemon.ready") + terminal.until("\n")
    assert "\x1b" not in shown and "[daemon]" in shown


def test_a_terminal_also_shows_the_events_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    extra = ["--set", f"log-file={file}"]
    with on_terminal(*arguments(tmp_path), *extra, socket="", NO_COLOR="1") as terminal:
        terminal.until("daemon.ready")
        assert "daemon.ready" in names_of(file)


def test_a_console_s_exception_shows_no_variables() -> None:
    """The variables of failed code hold texts of users."""

    render: Any = _console(True)
    secret = "in a variable"
    try:
        raise ValueError(len(secret))
    except ValueError as exc:
        line = render(None, "error", {"event": "x", "level": "error", "exc_info": exc})
    assert "ValueError: 13" in line and secret not in line
