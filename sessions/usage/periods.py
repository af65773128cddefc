"""Days and months of UTC, as numbers of days since 1970."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

DAY_S = 86_400
_EPOCH = date(1970, 1, 1)


def day_of(now: float) -> range:
    """Return the day at a time, in seconds since 1970."""
    day = int(now // DAY_S)
    return range(day, day + 1)


def month_of(now: float) -> range:
    """Return the days of the month at a time."""
    first = datetime.fromtimestamp(now, UTC).date().replace(day=1)
    following = (first + timedelta(days=32)).replace(day=1)
    return range((first - _EPOCH).days, (following - _EPOCH).days)
