"""Supervision without Ray: processes that outlive their supervisor, by the locks they hold."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.backends.errors import BackendError, InvalidArgument
from inferd.gateways.fleet.ray_cluster.detached import Detached, has_ended_within, holder_of
from inferd.gateways.fleet.ray_cluster.supervisor import (
    NodePlan,
    NodeSupervisor,
    members_of,
    withdraw_plan,
)
from tests.waiting import wait_until

WAIT = [sys.executable, "-c", "import signal; signal.pause()"]
pytestmark = pytest.mark.process


def member(folder: Path, command: list[str] = WAIT) -> Detached:
    return Detached(folder / "lock", folder / "output", command, dict(os.environ))


@pytest.fixture
def detached(tmp_path: Path) -> Iterator[Detached]:
    found = member(tmp_path)
    found.start()
    yield found
    found.end()


def kill(process: int | None) -> None:
    assert process is not None
    os.kill(process, signal.SIGKILL)


def test_a_process_is_found_by_its_lock_until_it_ends(detached: Detached) -> None:
    process = holder_of(detached.lock)
    detached.start()
    assert holder_of(detached.lock) == process, "a second start finds the first"
    descriptor = detached.find()
    assert descriptor is not None
    kill(process)
    assert has_ended_within(descriptor, 20.0)
    os.close(descriptor)
    assert holder_of(detached.lock) is None and detached.find() is None


def test_starts_at_once_start_one_process(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"import signal; open({str(starts)!r}, 'a').write('.'); signal.pause()"
    found = member(tmp_path, [sys.executable, "-c", code])
    threads = [threading.Thread(target=found.start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        wait_until(lambda: starts.exists() and starts.read_text())
        assert starts.read_text() == "."
    finally:
        found.end()


def test_a_process_that_ignores_sigterm_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferd.gateways.fleet.ray_cluster.detached.END_S_MAX", 0.1)
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
    found = member(tmp_path, [sys.executable, "-c", f"{code}; signal.pause()"])
    found.start()
    wait_until(lambda: found.log.read_text())
    found.end()
    wait_until(lambda: holder_of(found.lock) is None)


def test_a_start_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot be started"):
        member(tmp_path / "missing").start()


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[dict[str, Detached]]:
    """The processes of a plan in *tmp_path*, which are ended at last."""
    plan = NodePlan("127.0.0.1:7878", {"daemon": WAIT, "relay": WAIT}, dict(os.environ))
    plan.write(tmp_path)
    members = members_of(plan, tmp_path)
    yield members
    withdraw_plan(tmp_path)
    for member in members.values():
        member.end()


def test_a_supervisor_restarts_processes_and_leaves_them_to_the_next(
    tmp_path: Path, planned: dict[str, Detached]
) -> None:
    locks = [one.lock for one in planned.values()]
    notes: list[str] = []
    first = NodeSupervisor(tmp_path, notes.append)
    first.begin()
    wait_until(lambda: all(map(holder_of, locks)))
    before = [holder_of(lock) for lock in locks]
    kill(before[0])
    wait_until(lambda: holder_of(locks[0]) not in (None, before[0]))
    assert holder_of(locks[1]) == before[1]
    assert set(notes) <= {"the daemon has ended"}
    before = [holder_of(lock) for lock in locks]
    second = NodeSupervisor(tmp_path, notes.append)  # as after the kill of a replica
    second.begin()
    assert [holder_of(lock) for lock in locks] == before
    assert first.is_sound() and second.is_sound()
    first.end()
    second.end()
    assert not any(map(holder_of, locks))


def test_nothing_is_started_for_a_plan_that_was_withdrawn(
    tmp_path: Path, planned: dict[str, Detached]
) -> None:
    supervisor = NodeSupervisor(tmp_path, print)
    supervisor.begin()
    wait_until(lambda: all(holder_of(one.lock) for one in planned.values()))
    withdraw_plan(tmp_path)
    for member in planned.values():
        member.end()
    wait_until(lambda: not supervisor.is_sound())
    assert not any(holder_of(one.lock) for one in planned.values())


def test_a_change_of_the_plan_is_another_version() -> None:
    plan = NodePlan("127.0.0.1:7878", {"daemon": ["serve"]}, {"A": "1"})
    assert plan.digest == NodePlan(plan.address, plan.commands, {"A": "2"}).digest
    assert plan.digest != NodePlan("127.0.0.1:7879", plan.commands, {}).digest
    assert plan.digest != NodePlan(plan.address, {"daemon": ["serve", "-v"]}, {}).digest


def test_a_state_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="state directory"):
        NodePlan("", {}, {}).write(tmp_path / "file" / "folder")
