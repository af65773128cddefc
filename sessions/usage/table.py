"""The table of usage in the journal's file. One thread at a time may use it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from .rows import DAY_HOURS, Amounts, Group, Sum, UsageKey, UsageQuery, UsageRow

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


def add_rows(db: sqlite3.Connection, rows: Iterable[UsageRow]) -> None:
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
