"""Rows of usage: what they are counted by, their amounts, queries on them, and their table in the
journal's file, which one thread at a time may use.

Hours are hours of UTC since 1970, so that 24 of them are a day of UTC.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from operator import add, sub
from pathlib import Path
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


class DaySum(NamedTuple):
    """The computed tokens and the compute time of one day, or of several."""

    tokens: int = 0
    compute_us: int = 0

    def plus(self, tokens: int, compute_us: int) -> DaySum:
        return DaySum(self.tokens + tokens, self.compute_us + compute_us)


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


TABLE = """
CREATE TABLE IF NOT EXISTS usage (
    hour INTEGER NOT NULL, user INTEGER NOT NULL, label TEXT NOT NULL, key TEXT NOT NULL,
    model TEXT NOT NULL, name TEXT NOT NULL,
    requests INTEGER NOT NULL, refused INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL, drafted_tokens INTEGER NOT NULL,
    compute_us INTEGER NOT NULL,
    PRIMARY KEY (user, hour, label, key, model)
) WITHOUT ROWID;
"""
_COUNTS = ", ".join(f"{name} = {name} + excluded.{name}" for name in Amounts._fields)
_SUMS = ", ".join(f"SUM({name})" for name in Amounts._fields)
_ADD = (
    "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    f" ON CONFLICT DO UPDATE SET name = excluded.name, {_COUNTS}"
)
_GROUPS = {"hour": "hour", "day": f"hour - hour % {DAY_HOURS}"} | {
    name: name for name in ("user", "label", "key", "model")
}
USAGE_DAYS_ROWS_MAX = 1_000_000


class DayUsage(NamedTuple):
    """The usage of a user with a key on one day, a number of days since 1970."""

    user: int
    key: str
    day: int
    tokens: int
    compute_us: int


class StoredUsage(NamedTuple):
    """The part of the table that is kept in memory."""

    rows: list[UsageKey]
    """The keys of the last hours' rows."""
    days: list[DayUsage]


def write_rows(db: sqlite3.Connection, rows: Iterable[UsageRow]) -> None:
    """Add the amounts of *rows* to those in the table."""
    db.executemany(_ADD, ((*row.key, row.name, *row.amounts) for row in rows))


def delete_rows(db: sqlite3.Connection, before: int) -> None:
    """Delete the rows of all hours *before* one."""
    db.execute("DELETE FROM usage WHERE hour < ?", (before,))


def read_stored(db: sqlite3.Connection, hour: int, day: int) -> StoredUsage:
    """Return the keys of the rows of an hour, and the usage from a day on."""
    keys = db.execute("SELECT hour, user, label, key, model FROM usage WHERE hour = ?", (hour,))
    days = db.execute(
        f"SELECT user, key, hour / {DAY_HOURS},"
        " SUM(prompt_tokens - cached_tokens + generated_tokens), SUM(compute_us)"
        " FROM usage WHERE hour >= ? GROUP BY 1, 2, 3 LIMIT ?",
        (day * DAY_HOURS, USAGE_DAYS_ROWS_MAX),
    )
    return StoredUsage([UsageKey(*row) for row in keys], [DayUsage(*row) for row in days])


def read_sums(db: sqlite3.Connection, query: UsageQuery, groups_max: int) -> dict[Group, Sum]:
    """Return the sums of a query, at most *groups_max* of them."""
    columns = [_GROUPS[name] for name in query.by]
    wanted = {"user": query.user, "label": query.label, "key": query.key}
    given = {name: value for name, value in wanted.items() if value is not None}
    where = "".join(f" AND {name} = ?" for name in given)
    name = "MAX(name)" if "user" in query.by else "''"
    grouping = f" GROUP BY {', '.join(columns)}" if columns else " HAVING COUNT(*) > 0"
    select = ", ".join([*columns, name, _SUMS])
    found: dict[Group, Sum] = {}
    statement = f"SELECT {select} FROM usage WHERE hour >= ?{where}{grouping} LIMIT ?"
    with closing(db.execute(statement, (query.since, *given.values(), groups_max))) as rows:
        for row in rows:
            own = dict(zip(query.by, row, strict=False))
            start = own.get("hour", own.get("day"))
            fields = {key: value for key, value in own.items() if key in Group._fields}
            user_name, *amounts = row[len(columns) :]
            found[Group(start, **fields)] = Sum(user_name, Amounts(*amounts))
    return found


def copy_rows(source: Path, db: sqlite3.Connection) -> None:
    """Copy all rows of a file that was set aside.

    :raises sqlite3.Error: they cannot be read; none is then copied.
    """
    with closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as old:
        rows = old.execute("SELECT * FROM usage")
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany(_ADD, rows)
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
