"""Notifications to systemd: readiness, status, more time, the watchdog, the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from inferd.daemon.components import Components
from inferd.daemon.service.notifier import (
    STATUS_BYTES_MAX,
    ServiceNotifier,
    feed_interval_s,
    status_line,
)
from inferd.daemon.workers.process import KILLED_S, HangDetector
from inferd.scheduler.record import ActivityKind, Recorder
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.manager import Manager, Message, manager_of, serving
from tests.echo import echo_model
from tests.raw import RawClient

CONFIG = "[daemon]\nworker_hang_timeout_s = 1\n" + echo_model("m", slots=4, step_ms=2)
CONFIG += echo_model("slow", load_ms=3000)
FED = {"WATCHDOG_USEC": "2000000"}


def fed(message: Message) -> bool:
    return message.get("WATCHDOG") == "1"


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], RunningDaemon]]:
    """Return a factory of daemons with a watchdog of two seconds."""
    for name, value in FED.items():
        monkeypatch.setenv(name, value)
    yield running_daemon


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """Act as the manager of this process."""
    manager = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    yield manager
    manager.socket.close()


def test_readiness_is_notified_after_the_start_when_the_socket_answers() -> None:
    with running_daemon(CONFIG) as daemon:
        daemon.stop()
        manager = Manager(daemon.directory / "manager")
        with serving(daemon, {"NOTIFY_SOCKET": str(manager.path)}):
            first = manager.next()
            assert first["STATUS"].startswith("starting: ") and "READY" not in first
            assert int(first["EXTEND_TIMEOUT_USEC"]) > 10_000_000
            ready = manager.until(lambda m: "READY" in m)
            with RawClient(daemon.socket) as client:
                assert client.server_hello[1]["instance"] > 0
            assert ready["STATUS"] == "serving"
        assert [m for m in manager.messages if "READY" in m] == [ready]
        manager.socket.close()


def test_a_load_is_notified_with_its_progress_and_gets_more_time() -> None:
    with (
        running_daemon(CONFIG) as daemon,
        manager_of(daemon) as manager,
        RawClient(daemon.socket) as client,
    ):
        load = client.start_request("load_by_name", name="slow")
        first = manager.until(lambda m: "loading" in m.get("STATUS", ""))
        assert first["STATUS"].startswith("serving; loading: slow ")
        manager.status("serving; loading: slow ")
        client.wait_result(load)
        manager.serves()
        sent = [m["STATUS"] for m in manager.messages if "loading" in m.get("STATUS", "")]
        parts = [int(line.rsplit(" ", 1)[1].rstrip("%")) for line in sent]
        assert parts == sorted(parts) and len(set(parts)) > 1
        assert first["EXTEND_TIMEOUT_USEC"] == "30000000"
        assert not any("EXTEND_TIMEOUT_USEC" in message for message in manager.messages[-2:])


def test_more_time_for_a_load_postpones_the_watchdog_no_further_than_feeding_it(
    managed: Callable[[str], RunningDaemon],
) -> None:
    with (
        managed(CONFIG) as daemon,
        manager_of(daemon) as manager,
        RawClient(daemon.socket) as client,
    ):
        client.call("load_by_name", name="slow")
        manager.serves()
        extended = [m for m in manager.messages if "EXTEND_TIMEOUT_USEC" in m]
        assert len(extended) > 1
        assert all(fed(m) and m["EXTEND_TIMEOUT_USEC"] == "2000000" for m in extended)
        manager.until(fed)
        assert "EXTEND_TIMEOUT_USEC" not in manager.messages[-1]


def test_the_watchdog_is_fed_twice_per_interval(managed: Callable[[str], RunningDaemon]) -> None:
    with managed(CONFIG) as daemon:
        began = time.monotonic()
        with manager_of(daemon) as manager:
            manager.until(fed)
            first_at = time.monotonic()
            for _ in range(3):
                manager.until(fed)
            ended = time.monotonic()
        assert ended - began > 2.5, "all four came since then, however late they are read"
        assert ended - first_at < 6.0


def test_the_watchdog_is_fed_while_the_daemon_replaces_a_hung_worker(
    managed: Callable[[str], RunningDaemon],
) -> None:
    """A new daemon would interrupt all turns; a new worker only its own."""
    with (
        managed(CONFIG) as daemon,
        manager_of(daemon) as manager,
        RawClient(daemon.socket) as client,
    ):
        text = "as if nothing had been " * 20
        turn = client.begin_stream(client.context("m"), text)
        [worker] = psutil.Process(daemon.pid).children()
        worker.suspend()
        manager.until(fed)
        manager.until(fed)
        client.wait_result(turn)
        assert client.streamed_text == text
        assert "worker.hung" in daemon.log and "watchdog.withheld" not in daemon.log


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_PID": "7"}, None),
        ({}, None),
    ],
)
def test_only_the_watchdog_of_this_process_counts(
    environ: dict[str, str], seconds: float | None
) -> None:
    assert feed_interval_s(environ, 7) == seconds


def test_another_process_s_watchdog_is_not_fed(
    managed: Callable[[str], RunningDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_PID", "1")
    with (
        managed(CONFIG) as daemon,
        manager_of(daemon) as manager,
        RawClient(daemon.socket) as client,
    ):
        client.call("load_by_name", name="slow")  # takes longer than the watchdog gives
        manager.status("serving; loading: slow ")
        while manager.next().get("STATUS") != "serving":
            pass
        assert not any(fed(m) for m in manager.messages)


@pytest.mark.asyncio
async def test_the_watchdog_is_not_fed_while_a_worker_cannot_be_replaced(
    manager: Manager,
) -> None:
    stuck = ["m"]
    environ = {"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "200000"}
    service = ServiceNotifier(Components(), overdue=lambda: list(stuck), environ=environ)
    service.notify_ready()
    run = asyncio.create_task(service.run())
    sent = await asyncio.to_thread(manager.status, "serving; cannot be replaced: m")
    assert sent and not any(fed(m) for m in manager.messages)
    stuck.clear()
    await asyncio.to_thread(manager.until, fed)
    await asyncio.to_thread(manager.serves)
    run.cancel()


def test_a_worker_is_overdue_when_its_kill_did_not_end_it() -> None:
    now, awaited, killed = time.monotonic(), True, []
    recorder = Recorder()
    recorder.record_activity(ActivityKind.STEP, [1])
    watch = HangDetector(recorder, 2.0, lambda: awaited, lambda: killed.append(1), lambda: now)

    assert not watch.overdue
    now += 2.5 + KILLED_S - 1
    assert not watch.overdue
    now += 2
    assert watch.overdue
    awaited = False
    assert not watch.overdue
    recorder.record_activity(ActivityKind.IDLE)
    awaited = True
    assert not watch.overdue


@pytest.mark.asyncio
async def test_a_worker_that_reads_nothing_is_silent_however_much_it_is_sent() -> None:
    now = time.monotonic()
    recorder = Recorder()
    watch = HangDetector(recorder, 2.0, lambda: True, lambda: None, lambda: now)
    for _ in range(20):
        now += 1.0
        watch.note_command()
    assert watch.overdue
    watch.stop()


@pytest.mark.asyncio
async def test_unaccepted_notifications_are_sent_later(manager: Manager) -> None:
    parts = Components()
    service = ServiceNotifier(parts, environ={"NOTIFY_SOCKET": str(manager.path)})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        other.connect(str(manager.path))
        with pytest.raises(BlockingIOError):
            while True:
                other.send(b"STATUS=full")
    service.notify_ready()
    assert "notify" in parts.line
    while manager.socket.recv(100) == b"STATUS=full":
        manager.socket.setblocking(False)
        try:
            manager.socket.recv(100, socket.MSG_PEEK)
        except BlockingIOError:
            break
    manager.socket.settimeout(60)
    run = asyncio.create_task(service.run())
    assert (await asyncio.to_thread(manager.next))["READY"] == "1"
    await asyncio.to_thread(manager.serves)
    run.cancel()


def test_a_status_is_one_line_and_bounded() -> None:
    assert status_line("serving", {}) == "serving"
    head = "serving; degraded: journal (disk full)"
    assert status_line(head, {"b": 0.504, "a": 0}) == (
        "serving; loading: a 0%, b 50%; degraded: journal (disk full)"
    )
    many = {f"model-{n}": n / 10 for n in range(9)}
    assert status_line("serving", many).endswith("model-2 20%, and 6 more")
    long = status_line("serving; degraded: kv (ü\nWATCHDOG=1" + "ü" * 5000, many)
    assert "\n" not in long and long.endswith("…")
    assert len(long.encode()) in (STATUS_BYTES_MAX - 1, STATUS_BYTES_MAX)
    widest = {"x" * 128 + str(n): 0.5 for n in range(9)}
    assert "and 6 more; degraded" in status_line(head, widest)


def test_sigterm_to_the_whole_group_drains_and_requests_time() -> None:
    with (
        running_daemon(CONFIG) as daemon,
        manager_of(daemon) as manager,
        RawClient(daemon.socket) as client,
    ):
        text = "finish this text, daemon or worker " * 20
        turn = client.begin_stream(client.context("m"), text)
        process = psutil.Process(daemon.pid)
        for number in [worker.pid for worker in process.children()] + [daemon.pid]:
            os.kill(number, signal.SIGTERM)
        stopping = manager.until(lambda m: "STOPPING" in m)
        assert stopping["STATUS"] == "shutting down; running turns: 1"
        assert int(stopping["EXTEND_TIMEOUT_USEC"]) > 10_000_000
        client.wait_result(turn)
        assert client.streamed_text == text
        assert daemon.process is not None and daemon.process.wait(60) == 0
        assert not any("worker.died" in line for line in daemon.log.splitlines())
