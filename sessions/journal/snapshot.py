"""A copy of a journal's file and its log, taken while a daemon may be writing them.

The daemon holds SQLite's lock for as long as it runs (`JournalFile`), so no other process can use
SQLite's backup interface on the file. The files are copied instead, first the file and then its
log. Such a copy is complete if the log was not begun anew meanwhile: until then the file changes
only by pages that are copied out of the log, and the log that was copied afterwards has them all.
SQLite recovers the copy as it does after a crash (https://www.sqlite.org/walformat.html).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from ...backends.errors import Busy
from .journal_file import Unreadable, check_header

ATTEMPTS = 50
PAUSE_S = 0.02
"""Longer than the kernel's clock tick, by which it dates changes of a file (10 ms at most). So a
change after the pause changes the file's date."""
_SUFFIXES = ("", "-wal", "-journal")
_WAL_HEADER_BYTES = 32
"""The header has two numbers that change whenever the log is begun anew."""


class _Generation(NamedTuple):
    """The identity of the log, and of the file if the log is empty."""

    wal: bytes
    files: tuple[tuple[int, ...], ...]


def copy_journal(
    source: Path,
    target: Path,
    copy: Callable[[Path, Path], object] = shutil.copyfile,
    check: Callable[[Path], object] | None = None,
) -> bool:
    """Copy the journal *source* to the new file *target*, which then needs no log. Return whether
    there is a journal. *copy* copies one of its files. *check* replaces `check_copy` for files with
    other tables.

    :raises Busy: it changed too fast.
    :raises NewerJournal: a newer version of inferd wrote it.
    :raises Unreadable: it is damaged, or an older version wrote it.
    :raises OSError: it cannot be read, or the copy cannot be written.
    """
    for _ in range(ATTEMPTS):
        if not source.exists() or not source.stat().st_size:  # empty: a daemon has just created it
            return False
        if _copy_once(source, target, copy):
            (check or check_copy)(target)
            return True
    raise Busy(
        f"{source} changed during each of {ATTEMPTS} copies of it",
        hint="try again when fewer sessions are deleted, or stop the daemon first",
    )


def _copy_once(source: Path, target: Path, copy: Callable[[Path, Path], object]) -> bool:
    """Copy the files, and return whether the copy is complete."""
    before = _generation(source)
    time.sleep(PAUSE_S)
    for suffix in _SUFFIXES:
        part = Path(f"{target}{suffix}")
        part.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            copy(Path(f"{source}{suffix}"), part)
    return before == _generation(source)


def _generation(source: Path) -> _Generation:
    wal = b""
    with suppress(FileNotFoundError), open(f"{source}-wal", "rb") as file:
        wal = file.read(_WAL_HEADER_BYTES)
    # An old file is pages of the log that have the same numbers, so that only its identity counts.
    whole = len(wal) < _WAL_HEADER_BYTES
    return _Generation(wal, tuple(_identity(f"{source}{s}", whole=whole) for s in ("", "-journal")))


def _identity(path: str, *, whole: bool) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ()
    changes = (found.st_size, found.st_mtime_ns) if whole else ()
    return found.st_dev, found.st_ino, *changes


def check_copy(path: Path) -> None:
    """Check a copied journal, and move the changes of its log into the file.

    :raises NewerJournal: a newer version of inferd wrote it.
    :raises Unreadable: it is damaged, or an older version wrote it.
    """
    if defect := check_header(path):
        raise Unreadable(defect)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = DELETE")
            [[verdict]] = db.execute("PRAGMA integrity_check(1)")
            db.execute("SELECT count(*) FROM session").fetchall()
    except sqlite3.Error as exc:
        raise Unreadable(str(exc)) from exc
    if verdict != "ok":
        raise Unreadable(verdict)


def add_to_dates(path: Path, seconds: float) -> None:
    """Add *seconds* to the date of each session in a copied journal.

    :raises sqlite3.Error: it cannot be written.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE session SET at = at + ?", (seconds,))
