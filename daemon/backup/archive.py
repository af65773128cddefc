"""The archive of a backup: a tar file of the journals, the settings of models, and KV files.

Its last member lists the others, so that an archive that was cut off is recognised.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ...backends.errors import InvalidArgument
from ..state_files import JOURNALS, KV_DIR, SETTINGS_FILE

FORMAT = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES_MAX = 1 << 20
KV_MEMBER = re.compile(rf"{KV_DIR}(/[A-Za-z0-9_-][A-Za-z0-9._-]{{0,127}}){{3}}")
"""The name of a KV file: fingerprint, owner and name. None of them begins with a dot."""
_CHUNK_BYTES = 1 << 20


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The list of the archive's members: SHA-256 by name, and the number of KV files, which have
    checksums of their own. *software* is the version of inferd that wrote it, *saved_at* the date.
    """

    format: int
    software: str
    saved_at: float
    files: dict[str, str]
    kv_files: int = 0


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
    kv: Iterable[tuple[str, Path]],
    *,
    software: str,
    now: float,
) -> Manifest:
    """Write *files* and the files of *kv*, by their names in the archive. A KV file that is evicted
    meanwhile is left out. *now* is the date.

    :raises OSError: one of them cannot be read, or *target* cannot be written.
    """
    hashes: dict[str, str] = {}
    count = 0
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in files:
            hashes[name] = _add_file(archive, name, path)
        for name, path in kv:
            try:
                _add_file(archive, name, path)
            except FileNotFoundError:
                continue
            count += 1
        manifest = Manifest(
            format=FORMAT, software=software, saved_at=now, files=hashes, kv_files=count
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
    kv_files, manifest = 0, None
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
                elif member.name in (*JOURNALS, SETTINGS_FILE):
                    hashes[member.name] = _write_member(data, folder / member.name, member)
                elif KV_MEMBER.fullmatch(member.name):
                    kv_files += 1
                    for parent in reversed(Path(member.name).parents[:-1]):
                        (folder / parent).mkdir(exist_ok=True, mode=0o700)
                    _write_member(data, folder / member.name, member)
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
    if (manifest.files, manifest.kv_files) != (hashes, kv_files):
        raise _not_a_backup("its files do not match its manifest")
    return manifest


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
