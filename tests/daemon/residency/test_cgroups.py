"""Limits of the cgroups that a process is in, its own and those above it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from inferd.daemon.config import sources
from inferd.daemon.config.sources import kv_ram_default, load_config
from inferd.daemon.doctor.checks.machine_limits import check_memory, inspect_machine
from inferd.daemon.residency.machine import MachineMemory, OomKills, cores_usable
from inferd.daemon.residency.pressure import MemoryAct, Pace, Pressure, Reading

MIB = 1 << 20


class Unit(NamedTuple):
    """The cgroup folder of a unit that this process is in, and where its path starts."""

    folder: Path
    proc: Path
    root: Path

    def cores(self) -> int:
        return cores_usable(self.proc, self.root)


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unit:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/system.slice/inferd.service\n")
    folder = tmp_path / "cgroup" / "system.slice" / "inferd.service"
    folder.mkdir(parents=True)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {memory // 1024} kB\n")
    for function in (cores_usable, MachineMemory):
        limited = partial(function, tmp_path / "proc", folder.parents[1])
        monkeypatch.setattr(sources, function.__name__, limited)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return Unit(folder, tmp_path / "proc", folder.parents[1])


def test_without_limits_the_machine_has_them(unit: Unit) -> None:
    assert unit.cores() == 8
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert MachineMemory(unit.proc, unit.root).total_bytes() == memory
    (unit.folder / "cpu.max").write_text("max 100000\n")
    assert unit.cores() == 8


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000 100000", 2), ("160000 100000", 2), ("20000 100000", 1)]
)
def test_the_quota_of_the_own_unit_bounds_the_cores(unit: Unit, quota: str, cores: int) -> None:
    (unit.folder / "cpu.max").write_text(f"{quota}\n")
    assert unit.cores() == cores


def test_the_tightest_quota_on_the_path_holds(unit: Unit) -> None:
    (unit.folder / "cpu.max").write_text("600000 100000\n")
    (unit.folder.parent / "cpu.max").write_text("300000 100000\n")
    assert unit.cores() == 3


def test_defaults_respect_the_limits_of_the_own_unit(unit: Unit) -> None:
    (unit.folder / "cpu.max").write_text("300000 100000\n")
    (unit.folder / "memory.max").write_text(f"{512 * MIB}\n")
    config = load_config({}, {})
    assert config.cores == 3
    assert config.kv_ram_bytes == kv_ram_default(512 * MIB) == 64 * MIB


# Version 1, where each controller has a hierarchy of its own.


class Container(NamedTuple):
    """A process in cgroups of version 1: the folders of /proc and of the mounts."""

    proc: Path
    cgroups: Path

    def write(self, file: str, value: object) -> None:
        """Write a file below the mounts."""
        path = self.cgroups / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")

    def limit_memory(self, folder: str, limit: int, used: int, cache: int = 0) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", used)
        fields = f"active_file 7\ninactive_file 7\ntotal_active_file {cache}\n"
        self.write(f"{folder}/memory.stat", f"{fields}total_inactive_file {cache}")

    def limit_cores(self, folder: str, quota: int) -> None:
        self.write(f"{folder}/cpu.cfs_quota_us", quota)
        self.write(f"{folder}/cpu.cfs_period_us", 100_000)

    @property
    def memory(self) -> MachineMemory:
        return MachineMemory(self.proc, self.cgroups)

    @property
    def cores(self) -> int:
        return cores_usable(self.proc, self.cgroups)


POD = "/kubepods/burstable/pod7/3f"
MEMBERSHIP = f"12:cpu,cpuacct:{POD}\n4:memory:{POD}\n1:name=systemd:{POD}\n"
NO_LIMIT = 9223372036854771712
GIB = 1 << 30


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Container:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(MEMBERSHIP)
    kib = 16 * GIB // 1024
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: {kib} kB\nMemAvailable: {kib} kB\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return Container(tmp_path / "proc", tmp_path / "cgroup")


def test_without_limits_of_version_1_the_machine_has_them(pod: Container) -> None:
    machine = pod.memory.free_bytes()
    pod.limit_memory("memory", NO_LIMIT, 5 * GIB)
    pod.limit_memory(f"memory{POD}", NO_LIMIT, GIB)
    pod.limit_cores(f"cpu,cpuacct{POD}", -1)
    assert pod.memory.total_bytes() == 16 * GIB and pod.memory.free_bytes() == machine
    assert pod.cores == 8


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(POD, id="of its own cgroup"),
        pytest.param("/kubepods/burstable", id="of an ancestor"),
        pytest.param("", id="of a container, which sees its cgroup as the root"),
    ],
)
def test_limits_of_version_1_count(pod: Container, place: str) -> None:
    pod.limit_memory(f"memory{place}", 2 * GIB, GIB, cache=GIB // 4)
    pod.limit_cores(f"cpu,cpuacct{place}", 300_000)
    assert pod.memory.total_bytes() == 2 * GIB
    assert pod.memory.free_bytes() == GIB + GIB // 2 - 2 * GIB // 20, "its page cache is free"
    assert pod.cores == 3


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [(150_000, 2), (20_000, 1), (0, 8)])
def test_the_quota_of_version_1_is_found_under_both_names(
    pod: Container, mount: str, quota: int, cores: int
) -> None:
    pod.limit_cores(mount + POD, quota)
    assert pod.cores == cores


def test_the_tightest_limit_of_both_versions_counts(pod: Container) -> None:
    """As where systemd mounts version 2 beside version 1 (its hybrid mode)."""
    (pod.proc / "self" / "cgroup").write_text(f"{MEMBERSHIP}0::/a/b\n")
    pod.limit_memory(f"memory{POD}", 2 * GIB, 0)
    pod.write("unified/a/memory.max", GIB)
    pod.write("unified/a/b/memory.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=500000")
    assert pod.memory.total_bytes() == GIB
    assert pod.memory.own_stalled_s() == 0.5
    pod.write("unified/a/memory.max", 3 * GIB)
    assert pod.memory.total_bytes() == 2 * GIB


@pytest.mark.parametrize("text", ["", "max", "x 1", "4294967296 kB"])
def test_unreadable_limits_of_version_1_are_none(pod: Container, text: str) -> None:
    for file in ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"):
        pod.write(f"memory{POD}/{file}", text)
    pod.write(f"cpu{POD}/cpu.cfs_quota_us", text)
    assert pod.memory.total_bytes() == 16 * GIB and pod.cores == 8


def test_an_oom_kill_in_a_cgroup_of_version_1_is_claimed(pod: Container) -> None:
    events = "oom_kill_disable 0\nunder_oom 0\noom_kill {}"
    pod.write("memory/memory.oom_control", events.format(2))
    kills = OomKills(pod.proc, pod.cgroups)
    pod.write("memory/memory.oom_control", events.format(3))
    assert [kills.claim_kill(), kills.claim_kill()] == [True, False]


def test_defaults_and_doctor_respect_the_limits_of_version_1(
    pod: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.limit_memory(f"memory{POD}", 2 * GIB, GIB)
    pod.limit_cores(f"cpu,cpuacct{POD}", 300_000)
    for function in (cores_usable, MachineMemory):
        limited = partial(function, pod.proc, pod.cgroups)
        monkeypatch.setattr(sources, function.__name__, limited)
    config = load_config({}, {})
    assert (config.cores, config.kv_ram_bytes) == (3, kv_ram_default(2 * GIB))
    machine = inspect_machine(0, pod.proc, pod.cgroups)
    assert (machine.cores_usable, machine.total_bytes) == (3, 2 * GIB)
    [finding] = check_memory(machine, None, config)
    assert "of 2.15 GB in the limit of its cgroup" in finding.found


def test_memory_becomes_short_at_the_limit_of_version_1(pod: Container) -> None:
    """Version 1 has no stalls of a cgroup; its free memory decides."""
    pressure, acts = Pressure(Pace()), []
    for at, used in enumerate((GIB, 2 * GIB)):
        pod.limit_memory(f"memory{POD}", 2 * GIB, used)
        free, total = pod.memory.free_bytes(), pod.memory.total_bytes()
        acts.append(pressure.decide(Reading(at, free, total, None, pod.memory.own_stalled_s())))
    assert acts == [MemoryAct.NONE, MemoryAct.STATES]
