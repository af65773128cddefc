"""Dates that are written down, on clocks of the test's own."""

from __future__ import annotations

import pytest

from inferd.sessions.entries import Dates

DAY_S = 86_400.0


class Clocks:
    """The machine's clocks: the date, which can be set, and the elapsed time."""

    def __init__(self, date: float = 100 * DAY_S) -> None:
        self.date, self.passed = date, 7.0

    def dates(self) -> Dates:
        """Return those of a daemon that starts."""
        return Dates(lambda: self.date, lambda: self.passed)

    def pass_s(self, seconds: float) -> None:
        self.date += seconds
        self.passed += seconds


@pytest.mark.parametrize("jump_s", [5 * 3600, -5 * 3600, 30 * DAY_S, -30 * DAY_S])
def test_a_clock_that_is_set_moves_no_date(jump_s: float) -> None:
    clocks = Clocks()
    dates = clocks.dates()
    clocks.date += jump_s
    clocks.pass_s(60)
    assert dates.now() == 100 * DAY_S + 60
    assert dates.age_s(100 * DAY_S) == 60


def test_a_start_with_a_date_of_long_ago_writes_none_before_the_last_one() -> None:
    clocks = Clocks(date=0.0)
    dates = clocks.dates()
    dates.not_before(100 * DAY_S)
    clocks.pass_s(60)
    assert dates.now() == 100 * DAY_S + 60
    dates.not_before(99 * DAY_S)
    assert dates.now() == 100 * DAY_S + 60, "an older date changes nothing"


def test_nothing_seems_old_by_a_date_that_is_yet_to_come() -> None:
    """One that a wrong clock has left, or a damaged one."""
    clocks = Clocks()
    dates = clocks.dates()
    dates.not_before(9000 * DAY_S)
    assert dates.age_s(9000 * DAY_S) == 0
    assert dates.age_s(float("inf")) == dates.age_s(float("nan")) == 0
    assert dates.age_s(98 * DAY_S) == 2 * DAY_S
