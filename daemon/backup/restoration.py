"""The restoration of a backup in the state directory, of which a kill leaves the old or new state.

1. The backup is extracted and checked in `restore.new/new`. The state is the old one.
2. `restore.new` is renamed to `restore.ready`: from here on the state is the new one. Each file of
   the old state is moved to `restore.ready/old`.
3. `restore.ready` is renamed to `restore.moved`: no old file is left in its place. Each new
   file is moved into its place, and `old` is renamed to `before-restore-N`.

`finish_restoration` repeats steps 2 and 3 from any point. A daemon calls it at its start, before it
reads a file of its state.
"""

from __future__ import annotations

import errno
import os
import shutil
from itertools import count
from pathlib import Path

from ...backends.errors import BackendError
from ..state_files import JOURNALS, KV_DIR, SETTINGS_FILE

NEW, READY, MOVED, ASIDE = "restore.new", "restore.ready", "restore.moved", "before-restore"
MANAGED = (
    *(f"{name}{suffix}" for name in JOURNALS for suffix in ("", "-wal", "-shm", "-journal")),
    *(SETTINGS_FILE, KV_DIR),
)
"""All that belongs to the state, also where the backup lacks it."""


def commit_restoration(state: Path) -> Path | None:
    """Make the extracted backup in `restore.new` the state; return the folder of the old one.

    :raises OSError: the state directory cannot be written; the state is the old one.
    :raises BackendError: it cannot be written; the state is the new one.
    """
    os.rename(state / NEW, state / READY)
    sync_folder(state)
    return finish_restoration(state)


def finish_restoration(state: Path) -> Path | None:
    """Finish a restoration of the directory *state* that was interrupted, or undo its first step.
    Return the folder of the old state, if there is one.

    :raises BackendError: the state directory cannot be written.
    """
    try:
        if (state / NEW).is_dir():  # a kill has left it in the first step
            shutil.rmtree(state / NEW)
        if (state / READY).is_dir():
            for name in MANAGED:
                if os.path.lexists(state / name):
                    os.rename(state / name, state / READY / "old" / name)
            sync_folder(state / READY / "old")
            sync_folder(state)
            os.rename(state / READY, state / MOVED)
            sync_folder(state)
        return _put_in_place(state) if (state / MOVED).is_dir() else None
    except OSError as exc:
        raise write_failed(state, exc) from exc


def _put_in_place(state: Path) -> Path | None:
    moved, aside = state / MOVED, None
    for path in sorted((moved / "new").glob("*")):
        os.rename(path, state / path.name)
    sync_folder(state)
    old = moved / "old"
    if old.is_dir() and any(old.iterdir()):
        paths = (state / f"{ASIDE}-{number}" for number in count(1))
        aside = next(path for path in paths if not os.path.lexists(path))
        os.rename(old, aside)
        sync_folder(state)
    shutil.rmtree(moved)
    return aside


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # a file system that needs none
            raise
    finally:
        os.close(fd)


def write_failed(state: Path, error: Exception) -> BackendError:
    """Return the error of a restoration that cannot write."""
    return BackendError(
        f"the restoration in {state} cannot go on: {getattr(error, 'strerror', None) or error}",
        hint="free space on its disk, or let the daemon's user write there; then try again",
    )
