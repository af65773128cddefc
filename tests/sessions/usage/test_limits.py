"""Limits on usage by day and month: the one that ends last counts, and it ends with its period."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from inferd.backends.errors import QuotaExceeded
from inferd.sessions.usage.limits import DAY_S, UsageLimits, check_usage, states_of
from inferd.sessions.usage.rows import DaySum
from tests.sessions.usage.test_counting import ADA, Counting

NOW = datetime(2026, 12, 31, 23, 0, tzinfo=UTC).timestamp()
TODAY = int(NOW // DAY_S)
USED = {TODAY: DaySum(10, 2_000_000), TODAY - 30: DaySum(5, 0), TODAY - 31: DaySum(100, 0)}


def sum_of(days: range) -> DaySum:
    found = DaySum()
    for day, used in USED.items():
        if day in days:
            found = found.plus(*used)
    return found


def test_below_its_limits_a_user_goes_on() -> None:
    check_usage(UsageLimits(11, 16, 3, 3), sum_of, NOW, "access.a.")
    assert [s.used for s in states_of(UsageLimits(1, 1, 1, 1), sum_of, NOW)] == [10, 15, 2.0, 2.0]


@pytest.mark.parametrize(
    ("limits", "name", "ends"),
    [
        (UsageLimits(tokens_per_day=10), "tokens-per-day", (2027, 1, 1)),
        (UsageLimits(tokens_per_month=15), "tokens-per-month", (2027, 1, 1)),
        (UsageLimits(seconds_per_day=2), "seconds-per-day", (2027, 1, 1)),
        (UsageLimits(seconds_per_month=1), "seconds-per-month", (2027, 1, 1)),
    ],
)
def test_at_a_limit_the_error_says_when_it_ends(
    limits: UsageLimits, name: str, ends: tuple[int, int, int]
) -> None:
    with pytest.raises(QuotaExceeded) as refused:
        check_usage(limits, sum_of, NOW, "access.a.")
    error, end = refused.value, datetime(*ends, tzinfo=UTC)
    assert error.data["bound"] == f"access.a.{name}"
    assert error.data["ends_at"] == end.timestamp()
    assert 3600 < error.data["retry_after_s"] < 3601
    assert f"{end:%Y-%m-%d} 00:00 UTC" in error.hint


def test_of_two_limits_the_one_that_ends_last_is_named() -> None:
    earlier = NOW - 2 * DAY_S
    with pytest.raises(QuotaExceeded) as refused:
        check_usage(UsageLimits(0, 1), sum_of, earlier, "")
    assert refused.value.data["bound"] == "tokens-per-month"
    assert refused.value.data["retry_after_s"] > 2 * DAY_S


def test_a_clock_that_is_set_back_and_forth_gives_nobody_more() -> None:
    counting = Counting(NOW)
    limits, none = UsageLimits(seconds_per_day=5), UsageLimits()
    counting.compute(ADA, 5.0)

    def check(key: str = "", key_limits: UsageLimits = none) -> None:
        counting.usage.check_limits(ADA.user, limits, key, key_limits, "access.a.")

    with pytest.raises(QuotaExceeded):
        check()
    counting.now -= DAY_S
    check()
    counting.now += DAY_S
    with pytest.raises(QuotaExceeded):
        check()
    counting.now += DAY_S
    check()
    counting.compute(ADA, 1.0, key="phone")
    with pytest.raises(QuotaExceeded):
        check("phone", UsageLimits(seconds_per_month=1))
    check("tablet", UsageLimits(seconds_per_month=1))
