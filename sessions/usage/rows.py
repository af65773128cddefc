"""Rows of usage: what they are counted by, their amounts, and the queries on them.

Hours are hours of UTC since 1970, so that 24 of them are a day of UTC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import add, sub
from typing import NamedTuple

HOUR_S = 3600
DAY_HOURS = 24
OTHER = "other"
"""The label, key and model of the row that has all usage past the bound on rows."""
OTHER_USER = -1
"""The user of such a row for users past the bound."""


class Amounts(NamedTuple):
    """Amounts of usage. The prompt's tokens include the cached ones, and compute time is in
    microseconds, because sums of integers are exact.
    """

    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    compute_us: int = 0

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(*map(add, self, other))

    def minus(self, other: Amounts) -> Amounts:
        return Amounts(*map(sub, self, other))

    @property
    def computed_tokens(self) -> int:
        """The tokens that count in quotas."""
        return self.prompt_tokens - self.cached_tokens + self.generated_tokens


NOTHING = Amounts()


class UsageKey(NamedTuple):
    """The key of a row: an *hour*, a user with a label, a gateway's key, and a model's name."""

    hour: int
    user: int
    label: str
    key: str
    model: str


class UsageRow(NamedTuple):
    """A row to be added. *name* is the user's name, if a gateway has given it."""

    key: UsageKey
    name: str
    amounts: Amounts


class Group(NamedTuple):
    """A group of rows; a field that the query does not group by is None. *start* is in hours."""

    start: int | None = None
    user: int | None = None
    label: str | None = None
    key: str | None = None
    model: str | None = None


COLUMNS = ("hour", "day", "user", "label", "key", "model")
"""The columns by which a query can group; a day consists of hours."""


class UsageQuery(NamedTuple):
    """The sums of rows from the hour *since* on, grouped *by* columns. A user, label or key that is
    not None restricts the rows.
    """

    by: tuple[str, ...]
    since: int
    user: int | None = None
    label: str | None = None
    key: str | None = None

    def includes(self, row: UsageKey) -> bool:
        pairs = ((self.user, row.user), (self.label, row.label), (self.key, row.key))
        return row.hour >= self.since and all(wanted in (None, has) for wanted, has in pairs)

    def group_of(self, row: UsageKey) -> Group:
        """Return the group of a row."""
        start = row.hour if "hour" in self.by else None
        if start is None and "day" in self.by:
            start = row.hour - row.hour % DAY_HOURS
        fields = {name: getattr(row, name) for name in COLUMNS[2:] if name in self.by}
        return Group(start, **fields)


class Sum(NamedTuple):
    """The sum of a group, with a name of its user."""

    name: str
    amounts: Amounts


def add_rows(
    sums: Mapping[Group, Sum], rows: Iterable[UsageRow], query: UsageQuery
) -> dict[Group, Sum]:
    """Return the *sums* of a query with further *rows*."""
    found = dict(sums)
    for row in rows:
        if query.includes(row.key):
            group = query.group_of(row.key)
            before = found.get(group, Sum("", NOTHING))
            name = row.name or before.name if group.user is not None else ""
            found[group] = Sum(name, before.amounts.plus(row.amounts))
    return found
