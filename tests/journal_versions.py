"""Journals of other versions of inferd."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from inferd.sessions.journal.journal_file import version_marks

__all__ = ("mark_version",)


def mark_version(path: Path, version: int) -> None:
    """Mark a journal as one of *version*, as that version of inferd would."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(version_marks(version))
