"""The table of usage: amounts are added, and its queries group as those in memory do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.sessions.journal.journal_file import ChangeUsage, JournalFile
from inferd.sessions.usage.rows import (
    COLUMNS,
    TABLE,
    Amounts,
    Group,
    Sum,
    UsageKey,
    UsageQuery,
    UsageRow,
    add_rows,
    copy_rows,
    delete_rows,
    read_stored,
    read_sums,
    write_rows,
)

SMALL = st.integers(0, 3)
KEYS = st.builds(
    UsageKey,
    hour=st.integers(46, 50),
    user=SMALL,
    label=st.sampled_from(["", "a"]),
    key=st.sampled_from(["", "k"]),
    model=st.sampled_from(["m", "n"]),
)
ROWS = st.lists(
    st.builds(UsageRow, key=KEYS, name=st.just(""), amounts=st.builds(Amounts, *[SMALL] * 7)),
    max_size=20,
)
QUERIES = st.builds(
    UsageQuery,
    by=st.lists(st.sampled_from([*COLUMNS[1:]]), unique=True).map(tuple)
    | st.just(("hour", "model")),
    since=st.integers(46, 51),
    user=st.none() | SMALL,
    label=st.sampled_from([None, "a"]),
    key=st.sampled_from([None, "k"]),
)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[JournalFile]:
    file = JournalFile(tmp_path / "sessions.db")
    file.open()
    yield file
    file.close()


def row(hour: int = 5, requests: int = 1, name: str = "") -> UsageRow:
    return UsageRow(UsageKey(hour, 1000, "", "", "m"), name, Amounts(requests=requests))


def read(file: JournalFile, *by: str) -> dict[Group, Sum]:
    return file.read(lambda db: read_sums(db, UsageQuery(by, 0), 100))


@given(rows=ROWS, query=QUERIES)
def test_the_table_and_the_rows_in_memory_are_grouped_alike(
    rows: list[UsageRow], query: UsageQuery
) -> None:
    db = sqlite3.connect(":memory:")
    db.executescript(TABLE)
    write_rows(db, rows)
    assert read_sums(db, query, 1000) == add_rows({}, rows, query)
    db.close()


def test_amounts_are_added_and_a_name_that_was_learnt_later_stays(file: JournalFile) -> None:
    file.write([ChangeUsage(rows=[row()])])
    file.write([ChangeUsage(rows=[row(), row(requests=3, name="@ada")])])
    [(group, found)] = read(file, "user").items()
    assert group == Group(user=1000) and found == Sum("@ada", Amounts(requests=5))


def test_a_write_that_fails_adds_nothing(file: JournalFile) -> None:
    with pytest.raises((sqlite3.Error, OverflowError)):
        file.write([ChangeUsage(rows=[row(), row(hour=1 << 70)])])
    assert read(file) == {}


def test_rows_of_old_hours_are_deleted(file: JournalFile) -> None:
    file.write([ChangeUsage(rows=[row(hour) for hour in range(10)])])
    file.write([ChangeUsage(before=4)])
    assert [group.start for group in read(file, "hour")] == [*range(4, 10)]
    file.read(lambda db: delete_rows(db, 100))
    assert read(file) == {}


def test_the_rows_of_an_hour_and_the_sums_of_days_are_read_at_the_start(file: JournalFile) -> None:
    many = [row(hour) for hour in (23, 24, 25, 48)]
    file.write([ChangeUsage(rows=many)])
    tokens = UsageKey(49, 7, "l", "k", "m"), Amounts(0, 0, 10, 4, 3, 0, 9)
    file.write([ChangeUsage(rows=[UsageRow(tokens[0], "", tokens[1])])])
    stored = file.read(lambda db: read_stored(db, hour=49, day=1))
    assert stored.rows == [tokens[0]]
    assert {(d.user, d.key, d.day): (d.tokens, d.compute_us) for d in stored.days} == {
        (7, "k", 2): (9, 9), (1000, "", 1): (0, 0), (1000, "", 2): (0, 0)
    }  # fmt: skip


def test_a_journal_of_an_earlier_version_gets_the_table(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    file = JournalFile(path)
    file.open()
    file.read(lambda db: db.execute("DROP TABLE usage"))
    file.close()
    assert file.open().set_aside is None
    file.write([ChangeUsage(rows=[row()])])
    assert len(read(file)) == 1
    file.close()


def test_usage_is_kept_when_a_journal_with_damaged_sessions_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    file = JournalFile(path)
    file.open()
    file.write([ChangeUsage(rows=[row(), row(hour=6, requests=4)])])
    insert = "INSERT INTO session VALUES (1, '', 'x', 1.0, x'00', 1, x'00', 1)"
    file.read(lambda db: db.execute(insert))
    file.close()
    found = file.open()
    assert found.set_aside is not None
    assert {g.start: s.amounts.requests for g, s in read(file, "hour").items()} == {5: 1, 6: 4}
    with pytest.raises(sqlite3.Error):
        file.read(lambda db: copy_rows(tmp_path / "missing", db))
    file.close()
