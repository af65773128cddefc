"""The machine of these tests: a real systemd that leaves nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from . import conftest
from .conftest import booted
from .machine import GROUP_PREFIX, BootedMachine, CannotBoot, make_group

ROOT = Path(__file__).resolve().parents[2]
HERE = ("mnt", "pid", "uts", "ipc", "net", "cgroup")
BOOT_AND_WAIT = """
import sys
from tests.boot.machine import BootedMachine
with BootedMachine() as machine:
    machine.boot()
    print(machine.pid, flush=True)
    sys.stdin.read()
"""


BOOT_AND_COMPARE = """
from tests.boot.machine import BootedMachine
from tests.boot.test_machine import state
before = state()
with BootedMachine() as machine:
    machine.boot()
    assert state() == before, (before, state())
assert state() == before, (before, state())
"""
ALONE = (
    *("unshare", "--mount", "--uts", "--net", "--propagation=private"),
    *("sh", "-c", 'mount --make-rshared / && exec "$@"', "sh"),
)
"""Runs a command where no other process mounts, and where mounts propagate, as systemd has it."""


def state() -> tuple[str, str, list[tuple[int, str]]]:
    """Return the mounts, the name and the interfaces that this process sees."""
    mounts = Path("/proc/self/mountinfo").read_text()
    return mounts, os.uname().nodename, socket.if_nameindex()


def groups() -> list[Path]:
    """Return the cgroups of machines without processes; the next machine removes them."""
    group = make_group()
    try:
        others = [g for g in group.parent.glob(f"{GROUP_PREFIX}*") if g != group]
        return [g for g in others if "populated 0" in (g / "cgroup.events").read_text()]
    finally:
        group.rmdir()


def test_systemd_is_the_first_process_of_a_machine_of_its_own() -> None:
    before = groups()
    with booted() as machine:
        assert (machine.root / "proc/1/comm").read_text() == "systemd\n"
        assert machine.run("systemctl", "is-system-running").stdout == "running\n"
        for name in HERE:
            there = os.readlink(f"/proc/{machine.pid}/ns/{name}")
            assert there != os.readlink(f"/proc/self/ns/{name}"), name
        usr = machine.run("touch", "/usr/x", "/proc/sys/kernel/x", "/sys/x", check=False).stderr
        assert usr.count("Read-only file system") + usr.count("No such file") == 3, usr
        (machine.root / "etc/here").touch()
        assert not Path("/etc/here").exists()
        pid = machine.pid
    assert not psutil.pid_exists(pid)
    assert groups() == before


def test_no_mount_name_or_interface_of_a_machine_is_seen_outside_of_it() -> None:
    command = [*ALONE, sys.executable, "-c", BOOT_AND_COMPARE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_machine_ends_with_the_killed_process_that_booted_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT_AND_WAIT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        first = psutil.Process(int(process.stdout.readline()))
        all_of_it = [first, *first.children(recursive=True)]
        assert len(all_of_it) > 1, "the journal's is there"
    finally:
        process.kill()
        process.communicate()
    _, alive = psutil.wait_procs(all_of_it, timeout=60)
    assert not alive and not groups()


def test_where_it_cannot_boot_the_tests_fail_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(conftest.WITHOUT, raising=False)
    monkeypatch.setattr("tests.boot.machine.FOLDER", Path("/nowhere"))
    with pytest.raises(CannotBoot, match=r"status 2: .*/nowhere/boot\.sh"):
        BootedMachine().boot()
    with (
        pytest.raises(pytest.fail.Exception, match=r"cannot boot here because .*nowhere"),
        booted(),
    ):
        pass
    monkeypatch.setenv(conftest.WITHOUT, "1")
    with pytest.raises(pytest.skip.Exception), booted():
        pass
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(CannotBoot, match="root alone"):
        BootedMachine().boot()
    assert not groups()
