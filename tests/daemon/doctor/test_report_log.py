"""The log in the report of `inferd doctor`: its last warnings and errors, no texts of users."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd import Client
from inferd.backends.errors import LoadFailed
from inferd.daemon.config.sources import load_config
from inferd.daemon.doctor import report as doctor_log
from inferd.daemon.doctor.checks.units import Units
from inferd.daemon.doctor.report import (
    CHARACTERS_MAX,
    LIST_MAX,
    LOG_BYTES_MAX,
    LOG_LINES_MAX,
    READ_BYTES_MAX,
    LogEnd,
    last_events,
    read_log_end,
)
from inferd.daemon.doctor.time_limits import Probe, ProbeFailed
from inferd.daemon.logs.log_lines import SystemdJournal, log_place
from inferd.testing import running_daemon
from tests.daemon.command_line import inferd
from tests.fork_server import ForkedProcess

SECRET = "zebra7f3a"
DIARY = "my-very-own-diary"
UNITS = Units(user=True, directives={}, outdated=[])
SERVICE = SystemdJournal("inferd.service", user=True)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr("subprocess.Popen", ForkedProcess)
    return tmp_path


def event(level: str = "warning", **fields: Any) -> bytes:
    return msgspec.json.encode({"level": level, "event": "worker.died", **fields})


def printed(end: LogEnd) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in end.lines]


def read(path: Path) -> LogEnd:
    return read_log_end({"log": {"file": str(path)}}, None, None)


# Where it is.


def test_the_place_of_the_log_comes_from_the_daemon_or_the_configuration() -> None:
    config = load_config({"log-file": "/var/log/of/config"}, {})
    printed: dict[str, Any] = {"pid": 7, "log": {"file": "/var/log/printed", "journal": None}}
    assert log_place(printed, config, SERVICE) == Path("/var/log/printed")
    printed["log"] = {"file": None, "journal": {"unit": "inferd.service", "user": True}}
    assert log_place(printed, config, None) == SystemdJournal("inferd.service", user=True, pid=7)
    printed["log"]["journal"]["unit"] = None
    assert log_place(printed, config, None) == SystemdJournal("", user=True, pid=7)
    printed["log"]["journal"] = None
    assert log_place(printed, config, SERVICE) is None, (
        "the running daemon reports that its log is not kept"
    )
    assert log_place({}, config, SERVICE) == Path("/var/log/of/config")
    assert log_place({}, load_config({}, {}), SERVICE) == SystemdJournal(
        "inferd.service", user=True
    )
    assert log_place({}, None, None) is None


def test_the_warnings_of_the_unit_are_read_from_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [event(model="a"), b"Started inferd.", event("error", model="b")]
    (tmp_path / "lines").write_bytes(b"\n".join(lines) + b"\n")
    journalctl(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/lines')
    end = read_log_end({}, None, UNITS)
    assert [e["model"] for e in printed(end)] == ["a", "b"]
    assert (end.place, end.other) == ("the journal of inferd.service", 1)
    asked = (tmp_path / "asked").read_text().split()
    assert {"--user", "--unit=inferd.service", "--priority=warning", "--lines=200"} <= set(asked)


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("echo 'No journal files were opened' >&2; exit 1", "No journal files were opened"),
        ("exec sleep 600", "no answer within 0.2 s"),
        ("", "journalctl is not installed"),
    ],
)
def test_a_journal_that_cannot_be_read_is_reported(
    script: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_log, "SYSTEMD_JOURNAL_S_MAX", 0.2)
    journalctl(tmp_path, monkeypatch, script)
    with pytest.raises(ProbeFailed, match=cause):
        Probe(lambda: read_log_end({}, None, UNITS)).wait_result()


def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Install a journalctl that runs *script*, or none if *script* is empty."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cat", "sleep"):
        (tools / name).symlink_to(f"/bin/{name}")
    if script:
        (tools / "journalctl").write_text(f"#!/bin/sh\n{script}\n")
        (tools / "journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))


# Fields of an event.


def test_only_warnings_and_errors_are_reported_oldest_first(tmp_path: Path) -> None:
    levels = ("error", "debug", "warning", "info", "critical")
    lines = [event(level, pid=number) for number, level in enumerate(levels)]
    (tmp_path / "log").write_bytes(b"\n".join([*lines, b"no event", b"[]", b"\xff\xfe"]))
    end = read(tmp_path / "log")
    assert [e["pid"] for e in printed(end)] == [0, 2, 4]
    assert end.other == 3


def test_fields_that_may_hold_texts_of_users_are_left_out() -> None:
    wild: dict[str, Any] = {
        "prompt": SECRET,
        "answer": SECRET,
        "session": f"id:{DIARY}",
        "errors": [SECRET],
    }
    wild |= {"software": SECRET, "path": f"/{DIARY}", "model": {"a": SECRET}, "text": SECRET}
    frame, raised = '  File "a.py", line 3, in f', f'KeyError: "{SECRET}"'
    wild["exception"] = "\n".join(["Traceback:", frame, f"    say({SECRET})", raised, SECRET])
    lines = [event(**wild)]
    for name in ("task.failed", "call.refused", "session.not_deleted"):
        lines.append(event(**wild).replace(b"worker.died", name.encode()))
        lines[-1] = lines[-1][:-1] + f',"cause":"{SECRET} {DIARY}"}}'.encode()
    end = last_events("", reversed(lines))
    assert len(end.lines) == 4
    assert SECRET not in str(end) and DIARY not in str(end)
    assert printed(end)[0]["exception"] == ['File "a.py", line 3, in f', "KeyError"]


def test_causes_and_texts_of_crashing_processes_are_reported() -> None:
    lines = [
        event("error", cause="the disk is full", remedy="make room", component="journal"),
        event("error", text="GGML_ASSERT(n > 0) failed").replace(b"worker.died", b"worker.output"),
    ]
    first, last = printed(last_events("", reversed(lines)))
    assert (first["cause"], first["component"]) == ("the disk is full", "journal")
    assert last["text"] == "GGML_ASSERT(n > 0) failed"


def test_control_characters_are_replaced() -> None:
    wild = "\x1b[2J\x7f\x9b31m\n" + "x" * 10_000
    [line] = last_events("", [event(cause=wild, requests=[wild] * 100, tasks=[[1]])]).lines
    assert not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in line)
    [one] = printed(LogEnd("", [line]))
    assert len(one["cause"]) == CHARACTERS_MAX and len(one["requests"]) == LIST_MAX
    assert one["tasks"] == []


# Its bounds.


def test_the_number_of_lines_and_bytes_is_bounded(tmp_path: Path) -> None:
    lines = [event(pid=number) for number in range(LOG_LINES_MAX + 50)]
    (tmp_path / "log").write_bytes(b"\n".join(lines) + b"\n")
    pids = [e["pid"] for e in printed(read(tmp_path / "log"))]
    assert pids == list(range(50, LOG_LINES_MAX + 50)), "the last ones"

    wide = [event(cause="x" * 1000, pid=number) for number in range(LOG_LINES_MAX)]
    (tmp_path / "log").write_bytes(b"\n".join(wide))
    end = read(tmp_path / "log")
    assert LOG_BYTES_MAX - 2000 < sum(len(line) + 1 for line in end.lines) <= LOG_BYTES_MAX
    assert printed(end)[-1]["pid"] == LOG_LINES_MAX - 1


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(event(pid=1) + b"\n")
        file.truncate(1 << 40)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + event(pid=2) + b"\n" + event(pid=3) + b"\n")
    end = read(path)
    assert [e["pid"] for e in printed(end)] == [2, 3]
    path.write_bytes(event(pid=4) + b"\n" + b"y" * (READ_BYTES_MAX - 10) + b"\n")
    assert read(path) == LogEnd(str(path), [], 1), "the first line is cut"


def test_a_path_that_is_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ProbeFailed, match="is not a file"):
            read(path)
    with pytest.raises(ProbeFailed, match="No such file"):
        Probe(lambda: read(tmp_path / "none")).wait_result()


# The whole.


def test_a_report_has_the_errors_of_a_log_without_its_texts(tmp_path: Path) -> None:
    log, file = tmp_path / "inferd.log", tmp_path / "report.txt"
    config = f'[daemon]\nlog-level = "debug"\nlog-text = true\nlog-file = "{log}"\n'
    config += '[models.bad]\nbackend = "echo"\n[models.bad.echo]\ncrash_at_step = 1\n'
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        with client.session("echo", session_id=DIARY) as session:
            session.chat(SECRET)
        with (
            client.session("bad", session_id=f"{DIARY}-2") as session,
            pytest.raises(LoadFailed),
        ):
            session.chat(SECRET)
        assert SECRET in log.read_text(), "there is something to leave out"
        inferd("doctor", "--report", str(file), socket=daemon.socket)
    text = file.read_text()
    part = text.split("\n## log\n")[1]
    assert part.strip().startswith(f"{log}: the last ") and "worker.died" in part
    assert SECRET not in text and DIARY not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_report_explains_a_missing_log(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        inferd("doctor", "--report", str(tmp_path / "one"), socket=daemon.socket)
    assert "which is not kept" in (tmp_path / "one").read_text().split("\n## log\n")[1]
    config = tmp_path / "config.toml"
    config.write_text(f"[daemon]\nlog-file = '{tmp_path / 'none.log'}'\n")
    inferd("doctor", "--report", str(tmp_path / "two"), "--config", str(config))
    part = (tmp_path / "two").read_text().split("\n## log\n")[1]
    assert f"cannot be read: {tmp_path / 'none.log'}: No such file" in part
