"""Backups of the state directory, also while a daemon uses it, and their restoration, of which a
kill leaves the old or the new state.

A backup is a tar archive of the journals, the settings of models, images and sounds, jobs with
their files, and KV files.
Its last member, the manifest, lists the others, so that an archive that was cut off is recognised.
A restoration has three steps:

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
import hashlib
import io
import os
import re
import shutil
import sqlite3
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from .. import __version__
from ..backends.errors import BackendError, InvalidArgument, NotFound, UnsupportedOperation
from ..sessions.journal.journal_file import NewerJournal, Unreadable
from ..sessions.journal.snapshot import add_to_dates, check_copy, copy_journal
from .jobs.store import ROWS_FILE, NewerRows, add_to_rows, check_rows
from .state_files import JOBS_DIR, JOURNAL_FILE, JOURNALS, KV_DIR, MEDIA_DIR, SETTINGS_FILE

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 1 << 20
KV_MEMBER = re.compile(rf"{KV_DIR}(/[A-Za-z0-9_-][A-Za-z0-9._-]{{0,127}}){{3}}")
"""The name of a KV file: fingerprint, owner and name. None of them begins with a dot."""
MEDIA_MEMBER = re.compile(rf"{MEDIA_DIR}/[0-9]{{1,10}}/([0-9a-f]{{64}})")
"""The name of an image or sound: user and hash."""
JOB_ROWS = f"{JOBS_DIR}/{ROWS_FILE}"
JOB_MEMBER = re.compile(rf"{JOBS_DIR}/file-[A-Za-z0-9_-]{{1,100}}\.jsonl")
"""The name of a file with requests or results of a job."""
_CHUNK_BYTES = 1 << 20


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The list of the archive's members: SHA-256 by name, and the numbers of KV files, which have
    checksums of their own, of images and sounds, whose names are their hashes, and of the files of
    jobs, which have one hash in common.
    *software* is the version of inferd that wrote it, *saved_at* the date.
    """

    format: int
    software: str
    saved_at: float
    files: dict[str, str]
    kv_files: int = 0
    media_files: int = 0
    job_files: int = 0
    jobs_sha256: str = ""


class _HashOfFiles:
    """The common hash of files, by their names and hashes in the archive's order."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self.count = 0

    def add(self, name: str, sha256: str) -> None:
        self._sha256.update(f"{name} {sha256}\n".encode())
        self.count += 1

    def __str__(self) -> str:
        return self._sha256.hexdigest() if self.count else ""


class _Hashed:
    """A file whose content is hashed as it is read."""

    def __init__(self, file: Any):
        self._file = file
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self.sha256.update(data)
        return data


def write_archive(
    target: BinaryIO,
    files: Iterable[tuple[str, Path]],
    others: Iterable[tuple[str, Path]],
    *,
    software: str,
    now: float,
) -> Manifest:
    """Write *files* and *others*, by their names in the archive. Of the latter, those that are
    deleted meanwhile are left out: KV files, images and sounds, and files of jobs. *now* is the
    date.

    :raises OSError: one of them cannot be read, or *target* cannot be written.
    """
    hashes: dict[str, str] = {}
    counts, jobs = Counter[str](), _HashOfFiles()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in files:
            hashes[name] = _add_file(archive, name, path)
        for name, path in others:
            try:
                sha256 = _add_file(archive, name, path)
            except FileNotFoundError:
                continue
            counts[name.partition("/")[0]] += 1
            if JOB_MEMBER.fullmatch(name):
                jobs.add(name, sha256)
        manifest = Manifest(
            format=FORMAT,
            software=software,
            saved_at=now,
            files=hashes,
            kv_files=counts[KV_DIR],
            media_files=counts[MEDIA_DIR],
            job_files=jobs.count,
            jobs_sha256=str(jobs),
        )
        content = msgspec.json.encode(manifest)
        info = tarfile.TarInfo(MANIFEST)
        info.size, info.mode = len(content), 0o600
        archive.addfile(info, io.BytesIO(content))
    return manifest


def _add_file(archive: tarfile.TarFile, name: str, path: Path) -> str:
    """Add a file; return its hash."""
    with path.open("rb") as file:
        info = archive.gettarinfo(arcname=name, fileobj=file)
        info.mode, info.uid, info.gid, info.uname, info.gname = 0o600, 0, 0, "", ""
        info.mtime = int(info.mtime)
        hashed = _Hashed(file)
        archive.addfile(info, hashed)
    return hashed.sha256.hexdigest()


def extract_archive(source: BinaryIO, folder: Path) -> Manifest:
    """Write the members of an archive into the empty *folder*.

    :raises InvalidArgument: it is not a backup, or is damaged or incomplete.
    :raises OSError: it cannot be read, or the files cannot be written.
    """
    hashes: dict[str, str] = {}
    kv_files, media_files, jobs, manifest = 0, 0, _HashOfFiles(), None
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for member in archive:
                # Nothing follows the manifest. Sparse files could be larger than the archive.
                if manifest is not None or member.type != tarfile.REGTYPE or member.sparse:
                    raise _not_a_backup(f"the member {member.name!r}")
                data = archive.extractfile(member)
                assert data is not None, "a regular file has content"
                if member.name == MANIFEST:
                    if member.size > MANIFEST_BYTES_MAX:
                        raise _not_a_backup("its manifest is too large")
                    manifest = msgspec.json.decode(data.read(), type=Manifest)
                elif member.name in (*JOURNALS, SETTINGS_FILE, JOB_ROWS):
                    _make_parents(folder, member.name)
                    hashes[member.name] = _write_member(data, folder / member.name, member)
                elif KV_MEMBER.fullmatch(member.name):
                    kv_files += 1
                    _make_parents(folder, member.name)
                    _write_member(data, folder / member.name, member)
                elif found := MEDIA_MEMBER.fullmatch(member.name):
                    media_files += 1
                    _make_parents(folder, member.name)
                    if _write_member(data, folder / member.name, member) != found[1]:
                        raise _not_a_backup(f"the member {member.name!r} is damaged")
                elif JOB_MEMBER.fullmatch(member.name):
                    _make_parents(folder, member.name)
                    jobs.add(member.name, _write_member(data, folder / member.name, member))
                else:
                    raise _not_a_backup(f"the member {member.name!r}")
    except FileExistsError as exc:
        raise _not_a_backup(f"two members {exc.filename!r}") from None
    except (tarfile.TarError, msgspec.MsgspecError, EOFError, ValueError, OverflowError) as exc:
        raise _not_a_backup(str(exc)) from exc
    if manifest is None:
        raise _not_a_backup("its end is missing")
    if manifest.format != FORMAT:
        raise InvalidArgument(
            f"the backup has the format {manifest.format}, here {FORMAT}",
            hint=f"restore it with inferd {manifest.software}",
        )
    listed = manifest.files, manifest.kv_files, manifest.media_files
    listed_jobs = manifest.job_files, manifest.jobs_sha256
    if (*listed, *listed_jobs) != (hashes, kv_files, media_files, jobs.count, str(jobs)):
        raise _not_a_backup("its files do not match its manifest")
    return manifest


def _make_parents(folder: Path, name: str) -> None:
    """Make the folders of a member below *folder*."""
    for parent in reversed(Path(name).parents[:-1]):
        (folder / parent).mkdir(exist_ok=True, mode=0o700)


def _write_member(data: Any, path: Path, member: tarfile.TarInfo) -> str:
    """Write a member to a new file; return its hash."""
    hashed = _Hashed(data)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        shutil.copyfileobj(hashed, file, _CHUNK_BYTES)
        if file.tell() != member.size:
            raise EOFError(f"{member.name} is cut off")
        file.flush()
        os.utime(file.fileno(), (member.mtime, member.mtime))  # KV files: the time of the last use
        os.fsync(file.fileno())
    return hashed.sha256.hexdigest()


def _not_a_backup(why: str) -> InvalidArgument:
    return InvalidArgument(
        f"the file is not a backup, or is damaged: {why}",
        hint="name a file that `inferd backup` has written",
    )


NEW, READY, MOVED, ASIDE = "restore.new", "restore.ready", "restore.moved", "before-restore"
MANAGED = (
    *(f"{name}{suffix}" for name in JOURNALS for suffix in ("", "-wal", "-shm", "-journal")),
    *(SETTINGS_FILE, KV_DIR, MEDIA_DIR, JOBS_DIR),
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


def restore_backup(source: BinaryIO, state: Path, now: float) -> Path | None:
    """Replace the state in the directory *state*, whose lock the caller has, by a backup. Return
    the folder of the old state, if there was one. Sessions and jobs are as old as they were when
    they were saved; *now* is the date.

    :raises InvalidArgument: the backup is damaged, or another version wrote it.
    :raises UnsupportedOperation: a folder of the state cannot be moved.
    :raises BackendError: the state directory cannot be written.
    """
    finish_restoration(state)
    for name in (KV_DIR, MEDIA_DIR, JOBS_DIR):
        if os.path.ismount(state / name):
            raise UnsupportedOperation(
                f"{state / name} is a mount point, which cannot be moved",
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
    if (new / JOB_ROWS).exists():
        try:
            check_rows(new / JOB_ROWS)
        except (NewerRows, sqlite3.DatabaseError) as exc:
            raise InvalidArgument(
                f"the jobs of the backup cannot be used: {exc}",
                hint="restore it with the version of inferd that wrote it",
            ) from exc
        add_to_rows(new / JOB_ROWS, max(0.0, now - manifest.saved_at))
    for place, _, _ in os.walk(target):
        sync_folder(Path(place))


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
            has_jobs = copy_journal(state / JOB_ROWS, folder / ROWS_FILE, check=check_rows)
            if has_jobs:
                members.append((JOB_ROWS, folder / ROWS_FILE))
            if (state / SETTINGS_FILE).exists():
                members.append((SETTINGS_FILE, state / SETTINGS_FILE))
            if not members:
                raise NotFound(
                    f"{state} has no state of a daemon",
                    hint="name its directory: --state-dir /var/lib/inferd for the service's",
                )
            # After the journals: a content that they name is there, unless it was deleted since.
            others = chain(
                _files(state, MEDIA_DIR, MEDIA_MEMBER),
                _files(state, JOBS_DIR, JOB_MEMBER) if has_jobs else (),
                _files(state, KV_DIR, KV_MEMBER) if kv else (),
            )
            return write_archive(target, members, others, software=__version__, now=now)
    except (NewerJournal, Unreadable, NewerRows, sqlite3.DatabaseError) as exc:
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


def _files(state: Path, folder: str, member: re.Pattern[str]) -> Iterator[tuple[str, Path]]:
    """Yield the finished files in *folder* by their names in the archive, which are a *member*'s.

    The daemon deletes files and folders meanwhile; these are left out.
    """
    for place, folders, names in os.walk(state / folder):
        folders.sort()
        for path in (Path(place, name) for name in sorted(names)):
            name = path.relative_to(state).as_posix()
            if member.fullmatch(name) and path.is_file() and not path.is_symlink():
                yield name, path
