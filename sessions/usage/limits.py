"""Limits on usage by day and month, of users and of gateways' keys. Decisions without a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

from ...backends.errors import QuotaExceeded
from .rows import DaySum

DAY_S = 86_400
_EPOCH = date(1970, 1, 1)


def day_of(now: float) -> range:
    """Return the day of UTC at a time, in seconds since 1970, as its number since then."""
    day = int(now // DAY_S)
    return range(day, day + 1)


def month_of(now: float) -> range:
    """Return the days of the month at a time; see `day_of`."""
    first = datetime.fromtimestamp(now, UTC).date().replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return range((first - _EPOCH).days, (following - _EPOCH).days)


class UsageLimits(NamedTuple):
    """The tokens and the seconds of compute of a day and a month; None if there is no limit."""

    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    seconds_per_day: int | None = None
    seconds_per_month: int | None = None


NO_LIMITS = UsageLimits()


class LimitState(NamedTuple):
    """The use of one limit. *name* is that of its setting, *end* the period's in seconds."""

    name: str
    used: float
    limit: int
    end: float


def states_of(
    limits: UsageLimits, sum_of: Callable[[range], DaySum], now: float
) -> Iterator[LimitState]:
    """Yield the use of each limit that is set; *sum_of* returns the usage of days."""
    for name, limit in zip(limits._fields, limits, strict=True):
        if limit is not None:
            unit, _, period = name.split("_")
            days = day_of(now) if period == "day" else month_of(now)
            found = sum_of(days)
            used = found.tokens if unit == "tokens" else found.compute_us / 1e6
            yield LimitState(name.replace("_", "-"), used, limit, float(days.stop * DAY_S))


def check_usage(
    limits: UsageLimits, sum_of: Callable[[range], DaySum], now: float, prefix: str
) -> None:
    """Check that usage is below each limit. *prefix* stands before a setting's name in errors.

    :raises QuotaExceeded: one is reached; the data has the time until its period ends.
    """
    reached = [s for s in states_of(limits, sum_of, now) if s.used >= s.limit]
    if not reached:
        return
    state = max(reached, key=lambda s: s.end)
    unit, _, period = state.name.split("-")
    retry_after_s = round(state.end - now + 0.001, 3)
    end = f"{datetime.fromtimestamp(state.end, UTC):%Y-%m-%d %H:%M} UTC"
    what = "tokens" if unit == "tokens" else "seconds of compute"
    raise QuotaExceeded(
        f"you have used {state.used:.0f} {what}; the limit is {state.limit} a {period}",
        hint=f"try again at {end}, when the {period} ends, or have {prefix}{state.name} raised",
        data={
            "bound": f"{prefix}{state.name}",
            unit: round(state.used, 3),
            state.name.replace("-", "_"): state.limit,
            "ends_at": state.end,
            "retry_after_s": retry_after_s,
        },
    )
