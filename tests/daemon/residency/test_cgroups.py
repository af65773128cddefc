"""Limits of the cgroups that a process is in, its own and those above it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from inferd.daemon.config import sources
from inferd.daemon.config.sources import kv_ram_default, load_config
from inferd.daemon.residency.machine import MachineMemory, cores_usable

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
