"""The date by which sessions age, on clocks of the test's own."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from inferd.daemon.state_clock import (
    CLOCK_FILE,
    OFF_S_MAX,
    SET_S_MAX,
    Advance,
    Moment,
    Note,
    StateClock,
    advance,
)

DAY_S = 86_400.0
LAST = Note(Moment("first", 1000.0, 100 * DAY_S), 99 * DAY_S)
"""A note whose date is a day behind the clock, which leapt ahead by a day before."""


def same_boot(passed_s: float, leap_s: float = 0.0) -> Moment:
    before = LAST.moment
    return Moment("first", before.elapsed_s + passed_s, before.wall + passed_s + leap_s)


def next_boot(uptime_s: float, off_s: float) -> Moment:
    return Moment("second", uptime_s, LAST.moment.wall + off_s + uptime_s)


def test_the_first_date_is_the_clock_s() -> None:
    assert advance(None, same_boot(5)) == Advance(LAST.moment.wall + 5)


@pytest.mark.parametrize("leap_s", [0.0, SET_S_MAX, -SET_S_MAX, -300 * DAY_S])
def test_until_the_next_boot_the_date_advances_by_the_time_since_boot(leap_s: float) -> None:
    assert advance(LAST, same_boot(2 * DAY_S, leap_s)) == Advance(LAST.date + 2 * DAY_S)


def test_a_clock_that_was_set_ahead_does_not_move_the_date() -> None:
    found = advance(LAST, same_boot(60, 300 * DAY_S))
    assert found == Advance(LAST.date + 60, 300 * DAY_S)


@pytest.mark.parametrize("off_s", [0.0, 8 * DAY_S, OFF_S_MAX])
def test_after_a_boot_the_time_off_counts(off_s: float) -> None:
    assert advance(LAST, next_boot(60, off_s)) == Advance(LAST.date + off_s + 60)


def test_a_machine_that_seems_to_have_been_off_for_months_has_aged_by_its_uptime() -> None:
    found = advance(LAST, next_boot(60, 300 * DAY_S))
    assert found == Advance(LAST.date + 60, 300 * DAY_S)


def test_a_machine_whose_clock_starts_in_the_past_has_aged_by_its_uptime() -> None:
    assert advance(LAST, next_boot(60, -LAST.moment.wall)) == Advance(LAST.date + 60)


@pytest.mark.parametrize("boot", ["", "first"])
def test_an_unknown_boot_and_one_whose_time_went_back_count_as_another_boot(boot: str) -> None:
    last = Note(Moment(boot, 1000.0, LAST.moment.wall), LAST.date)
    now = Moment(boot, 60.0, LAST.moment.wall + DAY_S)
    assert advance(last, now) == Advance(LAST.date + DAY_S)


@pytest.mark.asyncio
async def test_a_date_continues_from_its_note(tmp_path: Path) -> None:
    elapsed = time.clock_gettime(time.CLOCK_BOOTTIME)
    clock = StateClock(tmp_path, Moment("first", elapsed, 100 * DAY_S))
    assert clock.dates().age_s(99 * DAY_S) == pytest.approx(DAY_S, abs=60)
    await clock.note()
    path = tmp_path / CLOCK_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    noted = msgspec.json.decode(path.read_bytes(), type=Note)
    assert noted.date == pytest.approx(100 * DAY_S, abs=60)
    assert noted.moment.wall == pytest.approx(time.time(), abs=60), "the clock's"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 9000, b'{"moment": 1}'])
def test_a_damaged_note_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CLOCK_FILE).write_bytes(content)
    clock = StateClock(tmp_path, Moment("first", time.clock_gettime(time.CLOCK_BOOTTIME), DAY_S))
    assert clock.dates().now() == pytest.approx(DAY_S, abs=60)


@pytest.mark.asyncio
async def test_a_note_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    clock = StateClock(tmp_path / "missing")
    await clock.note()
    await clock.note()
    assert not (tmp_path / "missing").exists()
