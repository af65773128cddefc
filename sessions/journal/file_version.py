"""The version of the journal's tables, and its check before and after SQLite opens the file."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

SCHEMA = 4
"""Version of the tables, in the file's `user_version`. A newer file is not touched, an older one is
set aside. `application_id` has a checksum of the version, which shows whether it is damaged.
"""

_MAGIC = b"SQLite format 3\0"
_HEADER = struct.Struct(">18xB41xi4xi28x")
"""The format's write version, `user_version` and `application_id` in the file's header
(https://www.sqlite.org/fileformat2.html, section 1.3)."""
_WRITE_VERSIONS = 1, 2
"""SQLite reads a file with another one, but does not write to it."""


class NewerJournal(Exception):
    """A newer version of inferd wrote the file; it is not touched."""


class Unreadable(Exception):
    """The file or one of its rows is damaged, or an older version of inferd wrote the file."""


def check_header(path: Path) -> str:
    """Check a file's header before SQLite opens the file, which would change it.

    Return a defect that may leave the tables readable, or an empty text.

    :raises NewerJournal: a newer version wrote it.
    :raises Unreadable: it is not an SQLite file, or an older version wrote it.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
    except FileNotFoundError:
        return ""
    if header and not header.startswith(_MAGIC):
        raise Unreadable("it is not an SQLite file")
    write_version, *version = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
    defect = check_version(path, *version)
    if header and write_version not in _WRITE_VERSIONS:
        return f"its format {write_version} is unknown"
    return defect


def check_version(path: Path, version: int, checksum: int) -> str:
    """Check the version of a file's tables. Version and checksum are 0 if it has none yet.

    Return the defect of a damaged version, whose tables may be readable, or an empty text.

    :raises NewerJournal: a newer version wrote them.
    :raises Unreadable: an older version wrote them.
    """
    if version == checksum == 0:
        return ""
    if checksum != _checksum(version):
        return f"the checksum of its version {version} is wrong"
    tables = f"version of inferd (tables {version}, here {SCHEMA})"
    if version > SCHEMA:
        raise NewerJournal(f"{path} was written by a newer {tables}")
    if version < SCHEMA:
        raise Unreadable(f"it was written by an older {tables}")
    return ""


def version_marks(version: int) -> str:
    """Return the SQL statements that mark a file as one of *version*."""
    return f"PRAGMA user_version = {version};PRAGMA application_id = {_checksum(version)};"


def _checksum(version: int) -> int:
    """Return a checksum of a version that fits into `application_id`, a signed number."""
    return zlib.crc32(f"inferd sessions {version}".encode()) >> 1
