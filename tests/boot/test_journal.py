"""The daemon's events in a journal that systemd keeps, and `inferd logs`, which reads it there."""

from __future__ import annotations

import subprocess

import msgspec
import pytest

from tests.echo import echo_model

from .machine import BootedMachine
from .service import BootedService, Entry

SYSLOG_PRIORITIES = {"debug": "7", "info": "6", "warning": "4", "error": "3"}


def own(entries: list[Entry]) -> list[Entry]:
    """Return those that the daemon has written."""
    return [entry for entry in entries if entry["SYSLOG_IDENTIFIER"] == "inferd"]


@pytest.fixture(scope="module")
def lived(machine: BootedMachine) -> BootedService:
    """A service of which the journal has events of three levels."""
    service = BootedService(machine)
    service.reset()
    service.mark()
    service.configure("[daemon]\nlog-level = 'debug'\n" + echo_model("m"))
    assert service.inferd("run", "m", "hello").stdout == "hello\n"
    service.configure("[daemon]\nlog-level = 'loud'\n")
    service.systemctl("reload", "inferd", check=False)
    service.configure("[daemon]\nlog-level = 'debug'\n" + echo_model("m"))
    service.systemctl("reload", "inferd")
    return service


def test_each_event_is_an_entry_with_its_fields_and_its_priority(lived: BootedService) -> None:
    pid = lived.show("MainPID")["MainPID"]
    entries = own(lived.entries())
    events = [msgspec.json.decode(entry["MESSAGE"]) for entry in entries if entry["_PID"] == pid]
    assert len(events) >= 10 and all(
        {"timestamp", "level", "logger", "event"} <= event.keys() for event in events
    )
    for entry, event in zip((e for e in entries if e["_PID"] == pid), events, strict=True):
        assert entry["PRIORITY"] == SYSLOG_PRIORITIES[event["level"]], entry["MESSAGE"]
        assert entry["_SYSTEMD_UNIT"] == "inferd.service" and entry["_TRANSPORT"] == "stdout"
    assert {event["level"] for event in events} >= {"debug", "info", "error"}
    [finished] = [event for event in events if event["event"] == "task.finished"]
    assert finished["logger"] == "scheduler" and finished["output_tokens"] >= 5
    assert finished["model"] == "m" and finished["request"].count(".") == 1
    [refused] = [event for event in events if event["event"] == "config.refused"]
    assert "log-level" in refused["errors"][0]


def test_inferd_logs_shows_the_events_of_the_journal(lived: BootedService) -> None:
    lines = lived.inferd("logs", "-n", "1000").stdout.splitlines()
    assert any("task.finished" in line and "model=m" in line for line in lines)
    assert "config.refused" in lived.inferd("logs", "--level", "error").stdout
    shown = lived.inferd("logs", "--level", "error", "--json").stdout
    names = {msgspec.json.decode(x).get("event") for x in shown.splitlines() if x[0] == "{"}
    assert names >= {"config.refused"} and "daemon.ready" not in names
    assert lived.inferd("logs", "-n", "1").stdout.count("\n") == 1
    status = lived.inferd("status").stdout
    assert "log: the journal of inferd.service" in status


def test_new_events_are_shown_at_once(lived: BootedService) -> None:
    following = lived.machine.start(
        "inferd", "logs", "-f", "-n", "1", "--json", stdout=subprocess.PIPE
    )
    try:
        assert following.stdout is not None
        assert following.stdout.readline(), "it has begun"
        lived.systemctl("reload", "inferd")
        names = (msgspec.json.decode(x)["event"] for x in following.stdout if x.startswith("{"))
        assert "config.read_again" in names
    finally:
        following.kill()
        following.communicate()


def test_a_user_who_may_not_read_the_journal_gets_a_hint(lived: BootedService) -> None:
    lived.machine.run("usermod", "--append", "--groups=inferd", "ada")
    printed = lived.inferd("logs", user="ada", check=False)
    assert printed.returncode == 1 and printed.stdout == ""
    assert "systemd-journal" in printed.stderr and "sudo inferd logs" in printed.stderr


def test_the_longest_events_stay_whole(service: BootedService) -> None:
    model = echo_model("m", **{"ctx-size": 60_000})
    service.configure("[daemon]\nlog-level = 'debug'\nlog-text = true\n" + model)
    text = "\x01" * 12_000  # six characters each in JSON, and the journal cuts lines at 48 KiB
    service.inferd("run", "m", text, "--n-predict", "1")
    entries = [entry["MESSAGE"] for entry in own(service.entries())]
    [queued] = [line for line in entries if "task.queued" in line]
    assert len(queued) < 48 * 1024 and text[:3000] in msgspec.json.decode(queued)["prompt"]
    assert all(line.startswith("{") for line in entries), "nothing is the rest of a line"
