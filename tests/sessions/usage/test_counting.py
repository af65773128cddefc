"""Counting of usage: bounds on rows, hours of a clock that jumps, rows that cannot be written."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from inferd.scheduler.owner import Owner
from inferd.sessions.usage.limits import DAY_S, day_of, month_of
from inferd.sessions.usage.rows import (
    DAY_HOURS,
    HOUR_S,
    OTHER,
    OTHER_USER,
    Amounts,
    DayUsage,
    StoredUsage,
    UsageKey,
    UsageRow,
)
from inferd.sessions.usage.usage import (
    USAGE_DAYS_MAX,
    USAGE_ROWS_HOUR_MAX,
    USAGE_ROWS_USER_MAX,
    USAGE_UNWRITTEN_MAX,
    USAGE_USERS_HOUR_MAX,
    USAGE_USERS_MAX,
    DaySums,
    RowKeys,
    Usage,
)

NOON = datetime(2026, 3, 15, 12, 30, tzinfo=UTC).timestamp()
ADA, BOB = Owner(1000), Owner(1001, "agent")


class Counting:
    """Usage with a clock of our own."""

    def __init__(self, now: float = NOON):
        self.now = now
        self.usage = Usage(lambda model: str(model), now=lambda: self.now)
        self.source: Any = "echo"

    def compute(self, owner: Owner = ADA, seconds: float = 1.0, key: str = "") -> None:
        self.usage.count_computation(owner, key, self.source, seconds)

    @property
    def hour(self) -> int:
        return int(self.now // HOUR_S)


def total(rows: Sequence[UsageRow]) -> Amounts:
    found = Amounts()
    for row in rows:
        found = found.plus(row.amounts)
    return found


def test_rows_are_kept_by_hour_owner_key_and_model() -> None:
    counting = Counting()
    for _ in range(2):
        counting.compute(ADA, 0.5)
    counting.compute(BOB, key="phone")
    counting.now += HOUR_S
    counting.compute(ADA)
    rows = {row.key: row.amounts for row in counting.usage.take_rows()}
    hour = int(NOON // HOUR_S)
    assert rows == {
        UsageKey(hour, 1000, "", "", "echo"): Amounts(requests=2, compute_us=1_000_000),
        UsageKey(hour, 1001, "agent", "phone", "echo"): Amounts(requests=1, compute_us=1_000_000),
        UsageKey(hour + 1, 1000, "", "", "echo"): Amounts(requests=1, compute_us=1_000_000),
    }
    assert counting.usage.take_rows() == []


def test_refusals_count_without_a_model_too() -> None:
    counting = Counting()
    counting.usage.count_refusal(ADA, "", None)
    counting.usage.count_refusal(ADA, "", counting.source)
    assert [(row.key.model, row.amounts.refused) for row in counting.usage.take_rows()] == [
        ("", 1), ("echo", 1)
    ]  # fmt: skip


def test_rows_that_could_not_be_written_are_written_later_with_the_new_ones() -> None:
    counting = Counting()
    counting.compute()
    rows = counting.usage.take_rows()
    counting.compute()
    counting.usage.return_rows(rows)
    [row] = counting.usage.take_rows()
    assert row.amounts.requests == 2


def test_one_user_has_a_bounded_number_of_rows_in_an_hour_and_loses_no_usage() -> None:
    counting = Counting()
    for number in range(2 * USAGE_ROWS_USER_MAX):
        counting.compute(Owner(1000, f"label-{number}"))
    counting.compute(BOB)
    rows = counting.usage.take_rows()
    own = [row for row in rows if row.key.user == 1000]
    assert len(own) == USAGE_ROWS_USER_MAX and total(rows).requests == 2 * USAGE_ROWS_USER_MAX + 1
    [other] = [row for row in own if row.key.label == OTHER]
    assert other.key == UsageKey(counting.hour, 1000, OTHER, OTHER, OTHER)
    assert other.amounts.requests == USAGE_ROWS_USER_MAX + 1


def test_all_users_together_have_a_bounded_number_of_rows() -> None:
    keys = RowKeys()
    users = USAGE_ROWS_HOUR_MAX // (USAGE_ROWS_USER_MAX - 1) + 2
    found = {
        keys.bounded(UsageKey(0, user, f"label-{number}", "", "m"))
        for user in range(users)
        for number in range(USAGE_ROWS_USER_MAX)
    }
    assert len(found) == USAGE_ROWS_HOUR_MAX + users
    later = {
        keys.bounded(UsageKey(0, user, "", "", "m")) for user in range(USAGE_USERS_HOUR_MAX + 9)
    }
    assert UsageKey(0, OTHER_USER, OTHER, OTHER, OTHER) in later
    assert len({key.user for key in later}) == USAGE_USERS_HOUR_MAX + 1


def test_rows_that_cannot_be_written_are_bounded() -> None:
    counting = Counting()
    for hour in range(USAGE_UNWRITTEN_MAX // 100 + 5):
        for user in range(100):
            counting.compute(Owner(user), 0.0)
        counting.now += HOUR_S * (hour % 2 or 1)
    assert counting.usage.unwritten <= USAGE_UNWRITTEN_MAX + 5
    rows = counting.usage.take_rows()
    assert total(rows).requests == 100 * (USAGE_UNWRITTEN_MAX // 100 + 5)


def test_after_the_clock_was_set_back_usage_counts_in_the_earlier_hour() -> None:
    counting = Counting()
    counting.compute()
    counting.now -= 3 * HOUR_S
    counting.compute()
    counting.now += 3 * HOUR_S
    counting.compute()
    found = {row.key.hour: row.amounts.requests for row in counting.usage.take_rows()}
    assert found == {counting.hour - 3: 1, counting.hour: 2}


def test_after_a_restart_within_an_hour_its_rows_still_count_against_the_bound() -> None:
    counting = Counting()
    hour = counting.hour
    stored = [
        UsageKey(hour, 1000, f"label-{n}", "", "echo") for n in range(USAGE_ROWS_USER_MAX - 1)
    ]
    counting.usage.restore(StoredUsage(stored, []))
    counting.compute(Owner(1000, "label-0"))
    counting.compute(Owner(1000, "new"))
    labels = {row.key.label for row in counting.usage.take_rows()}
    assert labels == {"label-0", OTHER}


# Days and months.


def test_days_and_months_are_those_of_utc() -> None:
    assert day_of(NOON) == range(int(NOON // DAY_S), int(NOON // DAY_S) + 1)
    march = month_of(NOON)
    assert len(march) == 31 and march.start == int(
        datetime(2026, 3, 1, tzinfo=UTC).timestamp() // DAY_S
    )
    assert len(month_of(datetime(2028, 2, 29, 23, 59, tzinfo=UTC).timestamp())) == 29
    december = month_of(datetime(2026, 12, 31, tzinfo=UTC).timestamp())
    assert december.stop == int(datetime(2027, 1, 1, tzinfo=UTC).timestamp() // DAY_S)


def test_sums_of_days_come_back_after_a_restart_and_are_added_once() -> None:
    counting = Counting()
    today = counting.usage.day
    stored = StoredUsage(
        [], [DayUsage(1000, "phone", today, 40, 7), DayUsage(1000, "", today, 2, 0)]
    )
    counting.compute(ADA, 1e-6)
    counting.usage.restore(stored)
    counting.usage.restore(stored)  # the journal was opened again
    sums = counting.usage.day_sums
    assert sums.sum_of(1000, "", day_of(NOON)) == (42, 8)
    assert sums.sum_of(1000, "phone", day_of(NOON)) == (40, 7)
    assert sums.sum_of(1001, "", day_of(NOON)) == (0, 0)
    assert counting.usage.first_day == int(datetime(2026, 2, 1, tzinfo=UTC).timestamp() // DAY_S)


def test_sums_of_days_are_bounded() -> None:
    sums = DaySums()
    for day in range(2 * USAGE_DAYS_MAX):
        sums.add(1, "", day, 1, 0)
    assert sums.sum_of(1, "", range(2 * USAGE_DAYS_MAX)).tokens == USAGE_DAYS_MAX
    for user in range(USAGE_USERS_MAX + 5):
        sums.add(user, "", 0, 1, 0)
    assert len(sums) == USAGE_USERS_MAX


@pytest.mark.parametrize(
    ("days", "deleted_before"),
    [(90.0, NOON - 90 * DAY_S), (1.0, datetime(2026, 3, 1, tzinfo=UTC).timestamp())],
)
def test_rows_are_deleted_after_days_but_not_before_their_month_has_ended(
    days: float, deleted_before: float
) -> None:
    counting = Counting()
    counting.usage.days_max = days
    assert counting.usage.expired_before(NOON) == deleted_before // HOUR_S
    assert counting.usage.expired_before(NOON) is None, "once in an hour"
    counting.now += HOUR_S
    assert counting.usage.expired_before(counting.now) is not None


def test_a_clock_that_leaps_ahead_deletes_nothing() -> None:
    counting = Counting(NOON + 3650 * DAY_S)
    found = counting.usage.expired_before(NOON)
    assert found is not None and found <= (NOON - 90 * DAY_S) // HOUR_S
    assert found % 1 == 0 and found // DAY_HOURS > 0
