"""A backup of the state directory, also while a daemon uses it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ... import __version__
from ...backends.errors import BackendError, NotFound
from ...sessions.journal.journal_file import NewerJournal, Unreadable
from ...sessions.journal.snapshot import copy_journal
from ..state_files import JOURNALS, KV_DIR, SETTINGS_FILE
from .archive import KV_MEMBER, Manifest, write_archive
from .restoration import MOVED, READY


def write_backup(state: Path, target: BinaryIO, now: float, *, kv: bool = False) -> Manifest:
    """Write the state in the directory *state* to *target*, with *kv* also its KV files.

    :raises NotFound: there is no state.
    :raises Busy: a journal changed too fast.
    :raises BackendError: a file cannot be read or written, or a restoration was interrupted.
    """
    try:
        if any((state / name).exists() for name in (READY, MOVED)):
            raise BackendError(
                f"a restoration in {state} was interrupted",
                hint="start the daemon, which finishes it, or run `inferd restore` again",
            )
        # Copies have texts of users; this folder can be read by its owner only.
        with tempfile.TemporaryDirectory(prefix="inferd-backup-") as name:
            folder = Path(name)
            files = [n for n in JOURNALS if copy_journal(state / n, folder / n)]
            members = [(n, folder / n) for n in files]
            if (state / SETTINGS_FILE).exists():
                members.append((SETTINGS_FILE, state / SETTINGS_FILE))
            if not members:
                raise NotFound(
                    f"{state} has no state of a daemon",
                    hint="name its directory: --state-dir /var/lib/inferd for the service's",
                )
            found = _kv_files(state) if kv else ()
            return write_archive(target, members, found, software=__version__, now=now)
    except (NewerJournal, Unreadable) as exc:
        raise BackendError(
            f"a journal in {state} cannot be saved: {exc}",
            hint="use the version of inferd that wrote it; a daemon sets a damaged file aside",
        ) from exc
    except OSError as exc:
        where = exc.filename or state
        raise BackendError(
            f"the backup failed at {where}: {exc.strerror or exc}",
            hint="free space on the disk, or run the command as the daemon's user",
        ) from exc


def _kv_files(state: Path) -> Iterator[tuple[str, Path]]:
    """Yield the finished KV files, by their names in the archive."""
    for path in sorted((state / KV_DIR).rglob("*")):
        name = path.relative_to(state).as_posix()
        if KV_MEMBER.fullmatch(name) and path.is_file() and not path.is_symlink():
            yield name, path
