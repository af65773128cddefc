"""The restoration of a backup: its extraction and checks, and then the change of the state."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import BinaryIO

from ...backends.errors import InvalidArgument, UnsupportedOperation
from ...sessions.journal.journal_file import NewerJournal, Unreadable
from ...sessions.journal.snapshot import add_to_dates, check_copy
from ..state_files import JOURNAL_FILE, JOURNALS, KV_DIR
from .archive import extract_archive
from .restoration import NEW, commit_restoration, finish_restoration, sync_folder, write_failed


def restore_backup(source: BinaryIO, state: Path, now: float) -> Path | None:
    """Replace the state in the directory *state*, whose lock the caller has, by a backup. Return
    the folder of the old state, if there was one. Sessions are as old as they were when they were
    saved; *now* is the date.

    :raises InvalidArgument: the backup is damaged, or another version wrote it.
    :raises UnsupportedOperation: a folder of the state cannot be moved.
    :raises BackendError: the state directory cannot be written.
    """
    finish_restoration(state)
    if os.path.ismount(state / KV_DIR):
        raise UnsupportedOperation(
            f"{state / KV_DIR} is a mount point, which cannot be moved",
            hint="unmount it, restore, and mount it again",
        )
    try:
        try:
            _extract(source, state / NEW, now)
        except BaseException:
            shutil.rmtree(state / NEW, ignore_errors=True)
            raise
        return commit_restoration(state)
    except (OSError, sqlite3.Error) as exc:
        raise write_failed(state, exc) from exc


def _extract(source: BinaryIO, target: Path, now: float) -> None:
    """Extract and check a backup; all of it is on the disk when this returns."""
    shutil.rmtree(target, ignore_errors=True)
    for folder in (target, target / "old", target / "new"):
        folder.mkdir(mode=0o700)
    new = target / "new"
    manifest = extract_archive(source, new)
    for name in JOURNALS:
        try:
            if (new / name).exists():
                check_copy(new / name)
        except (NewerJournal, Unreadable) as exc:
            raise InvalidArgument(
                f"{name} of the backup cannot be used: {exc}",
                hint="restore it with the version of inferd that wrote it",
            ) from exc
    if (new / JOURNAL_FILE).exists():
        # Otherwise a daemon would delete all sessions of a backup older than `dormant-days-max`.
        add_to_dates(new / JOURNAL_FILE, max(0.0, now - manifest.saved_at))
    for place, _, _ in os.walk(target):
        sync_folder(Path(place))
