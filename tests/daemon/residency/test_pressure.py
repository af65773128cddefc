"""Decisions on memory pressure, from given readings and a given clock."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from inferd.daemon.residency.machine import (
    MachineMemory,
    StallAlarm,
    headroom_bytes,
    parse_stalled_s,
    parse_total_bytes,
)
from inferd.daemon.residency.pressure import MemoryAct, Pace, Pressure, Reading
from tests.processes import open_descriptors

GIB = 1 << 30
TOTAL = 20 * GIB
HEADROOM = headroom_bytes(TOTAL)
PACE = Pace(settle_s=2, calm_s=30)
NONE, STATES, MODEL, RELIEF = MemoryAct.NONE, MemoryAct.STATES, MemoryAct.MODEL, MemoryAct.RELIEF


@dataclass
class Days:
    """A machine over time: seconds pass with `after`, stalls add up."""

    pressure: Pressure = field(default_factory=lambda: Pressure(PACE))
    now: float = 100.0
    machine_s: float | None = 50.0
    own_s: float | None = 7.0

    def after(
        self, seconds: float, free: int = GIB, *, machine: float = 0.0, own: float = 0.0
    ) -> MemoryAct:
        """Return the act *seconds* later, of which shares were stalled."""
        self.now += seconds
        if self.machine_s is not None:
            self.machine_s += machine * seconds
        if self.own_s is not None:
            self.own_s += own * seconds
        return self.pressure.decide(Reading(self.now, free, TOTAL, self.machine_s, self.own_s))


def test_no_act_while_memory_suffices() -> None:
    days = Days()
    assert [days.after(5, free) for free in (19 * GIB, GIB, 0, -HEADROOM // 4, -HEADROOM // 2)] == (
        [NONE] * 5
    )
    assert [days.after(5, own=0.09, machine=0.09) for _ in range(9)] == [NONE] * 9
    assert not days.pressure.pressed


@pytest.mark.parametrize(
    ("last", "pressed", "seconds"),
    [
        (None, False, 5),
        (Reading(0, TOTAL // 5 - 1, TOTAL), False, 5),
        (Reading(0, TOTAL // 5, TOTAL), False, 15),
        (Reading(0, TOTAL // 5, TOTAL), True, 1),
        (Reading(0, -HEADROOM, TOTAL), True, 1),
    ],
)
def test_the_less_memory_is_free_the_sooner_it_is_read_again(
    last: Reading | None, pressed: bool, seconds: float
) -> None:
    assert PACE.interval_s(last, pressed) == seconds


def test_stalls_before_the_first_reading_do_not_count() -> None:
    assert Days(machine_s=1e6, own_s=1e6).after(0.1) is NONE


@pytest.mark.parametrize(
    ("free", "own", "machine"),
    [
        pytest.param(-HEADROOM // 2 - 1, 0, 0, id="free memory has fallen"),
        pytest.param(10 * GIB, 0.11, 0, id="the own cgroup stalls, at its limit"),
        pytest.param(TOTAL // 5 - 1, 0, 0.11, id="the machine stalls"),
    ],
)
def test_states_are_dropped_first_then_one_model_per_settling_time(
    free: int, own: float, machine: float
) -> None:
    days = Days()
    days.after(5)
    acts = [days.after(1, free, own=own, machine=machine) for _ in range(7)]
    assert acts == [STATES, NONE, MODEL, NONE, MODEL, NONE, MODEL]


def test_machine_stalls_do_not_count_while_memory_is_ample() -> None:
    days = Days()
    days.after(5)
    assert days.after(5, TOTAL // 5, machine=1.0) is NONE
    assert days.after(5, TOTAL // 5 - 1, machine=1.0) is STATES


def test_states_are_kept_again_after_a_calm_period() -> None:
    days = Days()
    assert days.after(5, -HEADROOM) is STATES
    assert [days.after(10) for _ in range(4)] == [NONE, NONE, NONE, RELIEF]
    assert not days.pressure.pressed
    assert days.after(10, -HEADROOM) is STATES, "and it begins anew"


def test_no_act_between_the_thresholds() -> None:
    days = Days()
    days.after(5, -HEADROOM)
    assert [days.after(20, -HEADROOM // 3) for _ in range(9)] == [NONE] * 9
    assert [days.after(20, own=0.05) for _ in range(9)] == [NONE] * 9
    assert days.pressure.pressed


def test_an_interrupted_calm_period_restarts() -> None:
    days = Days()
    days.after(5, -HEADROOM)
    assert [days.after(15), days.after(15, -HEADROOM // 3)] == [NONE, NONE]
    assert [days.after(15), days.after(15), days.after(15)] == [NONE, NONE, RELIEF]


def test_without_stall_information_free_memory_decides() -> None:
    days = Days(machine_s=None, own_s=None)
    assert [days.after(5, own=1, machine=1), days.after(5, -HEADROOM)] == [NONE, STATES]


def test_a_pressure_file_that_disappears_is_not_a_stall() -> None:
    days = Days()
    days.after(5)
    days.own_s = None
    assert days.after(5) is NONE
    days.own_s = 100.0
    assert days.after(5) is NONE
    assert days.after(5, own=0.2) is STATES


def test_a_clock_that_stands_still_divides_by_nothing() -> None:
    days = Days()
    days.after(5)
    assert days.after(0, own=1.0) is NONE


# Readings of the machine.

PSI = """some avg10=1.00 avg60=0.00 avg300=0.00 total=2500000
full avg10=0.00 avg60=0.00 avg300=0.00 total=9
"""


def test_stalls_are_read_as_the_kernel_writes_them() -> None:
    assert parse_stalled_s(PSI) == 2.5
    assert parse_stalled_s("") is None
    assert parse_stalled_s("full avg10=0.00 total=9\n") is None
    assert parse_total_bytes("MemTotal:  2 kB\nMemAvailable: 1 kB\n") == 2048


def test_the_own_cgroup_and_its_limit_are_found(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(f"MemTotal: {TOTAL // 1024} kB\nMemAvailable: 1 kB\n")
    machine = MachineMemory(tmp_path, tmp_path / "cgroups")
    assert (machine.stalled_s(), machine.own_stalled_s(), machine.total_bytes()) == (
        None,
        None,
        TOTAL,
    )
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "memory").write_text(PSI)
    (tmp_path / "self" / "cgroup").write_text("0::/a/b\n")
    folder = tmp_path / "cgroups" / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "memory.pressure").write_text(PSI.replace("2500000", "500000"))
    (folder.parent / "memory.max").write_text(f"{GIB}\n")
    assert (machine.stalled_s(), machine.own_stalled_s(), machine.total_bytes()) == (2.5, 0.5, GIB)
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    assert machine.own_stalled_s() is None, "the machine's file says it"


# Alarms.


@pytest.mark.asyncio
async def test_files_without_triggers_are_unchanged_and_the_wait_ends(
    tmp_path: Path,
) -> None:
    """An ordinary file, a missing one, and one that cannot be polled."""
    file = tmp_path / "memory"
    file.write_text(PSI)
    with closing(StallAlarm([file, tmp_path / "none", Path("/dev/null")])) as alarm:
        assert len(alarm) == 0
        assert not await alarm.wait(0.01)
    assert file.read_text() == PSI


@pytest.mark.asyncio
async def test_an_alarm_whose_file_was_removed_wakes_once_and_closes_its_files() -> None:
    """A terminal that hangs up is reported like a removed cgroup."""
    before = open_descriptors()
    leader, follower = os.openpty()
    with closing(StallAlarm([Path(os.ttyname(follower))])) as alarm:
        assert len(alarm) == 1
        os.close(leader)
        assert await alarm.wait(60)
        assert len(alarm) == 0
        assert not await alarm.wait(0.01)
    os.close(follower)
    assert not open_descriptors() - before  # others may have been closed meanwhile


@pytest.mark.asyncio
async def test_this_machine_can_be_watched() -> None:
    with closing(MachineMemory().alarm()) as alarm:
        await alarm.wait(0.01)
