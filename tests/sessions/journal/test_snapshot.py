"""Copies of a journal that another connection has open and writes."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from inferd.backends.errors import Busy
from inferd.scheduler import Owner
from inferd.sessions.entries import HistoryEntry, SessionFacts, encode
from inferd.sessions.journal.journal_file import (
    Erase,
    JournalFile,
    NewerJournal,
    SavePast,
    Unreadable,
)
from inferd.sessions.journal.snapshot import ATTEMPTS, copy_journal
from tests.journal_versions import mark_version

ADA = Owner(1000)
PAST = encode(HistoryEntry(tokens=b"\1\0\0\0" * 4000))


def save(file: JournalFile, *names: str) -> None:
    facts = encode(SessionFacts(model="echo"))
    file.write([SavePast(owner=ADA, session_id=n, facts=facts, past=PAST, at=1.0) for n in names])


def sessions_of(path: Path) -> list[str]:
    file = JournalFile(path)
    found = file.open()
    file.close()
    assert found.set_aside is None
    return sorted(s.session_id for s in found.sessions)


@pytest.fixture
def file(tmp_path: Path) -> JournalFile:
    """An open journal with two sessions, whose log is not empty."""
    file = JournalFile(tmp_path / "sessions.db")
    file.open()
    save(file, "a", "b")
    assert (tmp_path / "sessions.db-wal").stat().st_size
    return file


def test_an_open_journal_is_copied_with_its_log(file: JournalFile, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    other = sqlite3.connect(file.path, timeout=0)
    with closing(other), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("SELECT * FROM session")  # hence the copy of the files
    assert copy_journal(file.path, copy)
    assert [p.name for p in tmp_path.glob("copy*")] == ["copy"]
    save(file, "c")
    assert sessions_of(copy) == ["a", "b"]
    file.close()
    assert sessions_of(file.path) == ["a", "b", "c"]


def test_a_journal_of_a_killed_daemon_is_copied(file: JournalFile, tmp_path: Path) -> None:
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for path in tmp_path.glob("sessions.db*"):
        shutil.copy(path, crashed)
    assert copy_journal(crashed / "sessions.db", tmp_path / "copy")
    assert sessions_of(tmp_path / "copy") == ["a", "b"]


def changes(file: JournalFile) -> dict[str, Callable[[int], None]]:
    """Return changes of the files, which are made while the n-th copy is under way."""

    def append(n: int) -> None:
        save(file, f"new{n}")

    def erase(n: int) -> None:
        file.write([Erase(owner=ADA, session_id="a" if n % 2 else "b")])

    def erase_and_save(n: int) -> None:
        erase(n)
        save(file, f"new{n}")

    def fill_the_log(n: int) -> None:
        for _ in range(20):
            save(file, *(f"new{n}-{m}" for m in range(20)))

    def close(n: int) -> None:
        file.close()
        file.open()

    return {f.__name__: f for f in (append, erase, erase_and_save, fill_the_log, close)}


@pytest.mark.parametrize("name", ["append", "erase", "erase_and_save", "fill_the_log", "close"])
@pytest.mark.parametrize("empty", [False, True], ids=["log", "empty-log"])
@pytest.mark.parametrize("at", ["", "-wal"], ids=["in-file", "in-log"])
@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_copy_during_a_change_has_the_sessions_before_or_after_it(
    file: JournalFile, tmp_path: Path, name: str, empty: bool, at: str, moment: str
) -> None:
    """The change comes before or after one of the files is copied, or between two halves of it."""
    change = changes(file)[name]
    if empty:
        file.close()
        file.open()
    before, done = sessions_in(file), False

    def copy(source: Path, target: Path) -> None:
        nonlocal done
        with source.open("rb") as old, target.open("wb") as new:
            half = source.stat().st_size // 2
            for step, size in (("before", half), ("between", -1), ("after", 0)):
                if step == moment and str(source).endswith(f".db{at}") and not done:
                    done = True
                    change(1)
                new.write(old.read(size))

    assert copy_journal(file.path, tmp_path / "copy", copy)
    assert done
    assert sessions_of(tmp_path / "copy") in (before, sessions_in(file))
    file.close()


def sessions_in(file: JournalFile) -> list[str]:
    assert file._db is not None
    return sorted(name for (name,) in file._db.execute("SELECT id FROM session"))


def test_a_journal_that_never_rests_is_refused(file: JournalFile, tmp_path: Path) -> None:
    copies = 0

    def copy(source: Path, target: Path) -> None:
        nonlocal copies
        copies += source == file.path
        shutil.copyfile(source, target)
        file.write([Erase(owner=ADA, session_id=f"{copies}")])
        save(file, f"{copies}")

    with pytest.raises(Busy, match=f"each of {ATTEMPTS} copies"):
        copy_journal(file.path, tmp_path / "copy", copy)
    assert copies == ATTEMPTS


def test_a_directory_without_a_journal_has_none_to_copy(tmp_path: Path) -> None:
    assert not copy_journal(tmp_path / "sessions.db", tmp_path / "copy")
    (tmp_path / "sessions.db").touch()
    assert not copy_journal(tmp_path / "sessions.db", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_damaged_journal_and_one_of_a_newer_version_are_refused(
    file: JournalFile, tmp_path: Path
) -> None:
    file.close()
    whole = file.path.read_bytes()
    mark_version(file.path, 1000)
    with pytest.raises(NewerJournal):
        copy_journal(file.path, tmp_path / "copy")
    for content in (b"no SQLite file", whole[:5000], whole[:8192] + b"x" * (len(whole) - 8192)):
        file.path.write_bytes(content)
        with pytest.raises(Unreadable):
            copy_journal(file.path, tmp_path / "copy")
