"""The journal's SQLite file, which has the sessions with an id. `journal.py` schedules its writes.

One thread at a time may use it. It has users' texts, so only its owner may read it (0600), and
deleted data is overwritten (`secure_delete`), in the write-ahead log too. The version of its tables
is checked before and after SQLite opens the file.

Measured with 16 sessions: a commit of a piece of each takes 0.09 ms, of a past of 500 tokens each
0.21 ms. Every 4 MB the log is copied into the file, which takes 10 to 15 ms more. Erasing a session
takes 16 ms.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from ...scheduler.owner import Owner
from ..entries import SessionFacts, StoredSession, TurnPiece, resumable_of
from ..usage.rows import TABLE, UsageRow, copy_rows, delete_rows, write_rows

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


_WAL_BYTES = 4 << 20
_LOCK_WAIT_S = 1.0
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Primary result codes for damage of the file itself."""

_TABLES = """
CREATE TABLE session (
    user INTEGER NOT NULL, label TEXT NOT NULL, id TEXT NOT NULL, at REAL NOT NULL,
    facts BLOB NOT NULL, facts_crc INTEGER NOT NULL,
    past BLOB NOT NULL, past_crc INTEGER NOT NULL,
    PRIMARY KEY (user, label, id)
);
CREATE TABLE piece (
    user INTEGER NOT NULL, label TEXT NOT NULL, id TEXT NOT NULL, number INTEGER NOT NULL,
    data BLOB NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY (user, label, id, number)
);
"""
_LATER_TABLES = f"""
CREATE TABLE IF NOT EXISTS deletions (
    user INTEGER NOT NULL, label TEXT NOT NULL, data BLOB NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY (user, label)
);
{TABLE}
"""
"""Tables that earlier versions lack. They read and write the file all the same."""
_WHERE = "WHERE user = ? AND label = ? AND id = ?"
_T = TypeVar("_T")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the session *session_id* of *owner*."""

    owner: Owner
    session_id: str


class SavePast(Change, frozen=True, kw_only=True):
    """Replace all that is stored of a session, or insert it."""

    facts: bytes
    past: bytes
    at: float


class SaveFacts(Change, frozen=True, kw_only=True):
    """Replace the facts of a stored session."""

    facts: bytes
    at: float


class SavePiece(Change, frozen=True, kw_only=True):
    """Add a piece to the last turn; number 0 begins another turn."""

    number: int
    data: bytes


class Erase(Change, frozen=True, kw_only=True):
    """Delete a session from the file and its log."""


class SaveDeletions(Change, frozen=True, kw_only=True):
    """Replace the notes on the deleted sessions of *owner*; without *data* there are none."""

    data: bytes
    session_id: str = ""


class ChangeUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Add *rows* of usage; with *before*, delete the rows of hours before this one."""

    rows: list[UsageRow] = []
    before: int | None = None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The sessions read from the file, least recently written first. An unreadable file was set
    aside as *set_aside*, for *cause*; *sessions* are then the readable ones, and the file is new.
    *deletions* are the packed notes on deleted sessions.
    """

    sessions: list[StoredSession]
    deletions: dict[Owner, bytes] = {}
    set_aside: Path | None = None
    cause: str = ""


class JournalFile:
    """Sessions whose facts are of the type *facts*, in the file *path*. All methods block. `write`
    needs an open file.
    """

    def __init__(
        self,
        path: Path,
        now: Callable[[], float] = time.time,
        facts: type[SessionFacts] = SessionFacts,
    ):
        self.path = path
        self._now = now
        self._decode_facts = msgspec.msgpack.Decoder(facts).decode
        self._db: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether the file can be written to."""
        return self._db is not None

    def open(self) -> Found:
        """Open or create the file and read it.

        :raises NewerJournal: a newer version wrote it.
        :raises OSError: it cannot be created or read.
        :raises sqlite3.Error: it cannot be created or read.
        """
        sessions: list[StoredSession] = []
        try:
            self._open(sessions)
        except Unreadable as exc:
            self.close()
            aside = self._set_aside()
            self._open([])
            assert self._db is not None
            with suppress(sqlite3.Error):  # the table itself may be damaged
                copy_rows(aside, self._db)
            return Found(sessions=sessions, set_aside=aside, cause=str(exc))
        except BaseException:
            self.close()
            raise
        assert self._db is not None
        return Found(sessions=sessions, deletions=_read_deletions(self._db))

    def _open(self, sessions: list[StoredSession]) -> None:
        """Open the file and append its readable sessions; raise `Unreadable` if it is damaged."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        defect = check_header(self.path)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(
            self.path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False
        )
        try:
            defect = self._prepare(self._db) or defect
            for stored in _read(self._db, self._decode_facts):
                sessions.append(stored)  # noqa: PERF402  # those before the damage count
            [[verdict]] = self._db.execute("PRAGMA quick_check(1)")
        except sqlite3.Error as exc:
            if damaged(exc) or _code(exc) == sqlite3.SQLITE_ERROR:  # e.g. a table is missing
                raise Unreadable(str(exc)) from exc
            raise
        if verdict != "ok" or defect:
            raise Unreadable(defect or verdict)

    def _prepare(self, db: sqlite3.Connection) -> str:
        """Prepare the file for use; return its version's defect, or an empty text."""
        # Exclusive: another daemon on this directory is refused, and no shared memory is needed.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        [[version]] = db.execute("PRAGMA user_version")
        [[checksum]] = db.execute("PRAGMA application_id")
        defect = check_version(self.path, version, checksum)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        if version == checksum == 0:
            marks = version_marks(SCHEMA)
            db.executescript(f"BEGIN IMMEDIATE;{_TABLES}{marks}COMMIT")
            # Other versions look for the number in the file, not in its log.
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.executescript(_LATER_TABLES)
        return defect

    def _set_aside(self) -> Path:
        """Rename the file and its log, and return the new name."""
        stem = f"{self.path.name}.damaged-{int(self._now())}"
        numbers = (f"{stem}-{n}" if n else stem for n in range(1000))
        aside = next(p for p in map(self.path.with_name, numbers) if not p.exists())
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        return aside

    def close(self) -> None:
        """Close the file; SQLite copies its log into it."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def read(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        """Return the result of a query on the open file.

        :raises sqlite3.Error: it cannot be read.
        """
        if self._db is None:
            raise sqlite3.OperationalError("the file is not open")
        return query(self._db)

    def write(self, changes: Sequence[Change | ChangeUsage]) -> None:
        """Apply all changes, in this order, or none.

        :raises sqlite3.Error: they cannot be written; `damaged` says whether the file is damaged.
        """
        db = self._db
        assert db is not None, "the journal is not open"
        db.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                _apply(db, change)
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        if any(_deletes(change) for change in changes):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _deletes(change: Change | ChangeUsage) -> bool:
    """Return whether a change deletes texts, which must not stay in the log either."""
    return isinstance(change, Erase) or (isinstance(change, SaveDeletions) and not change.data)


def damaged(error: sqlite3.Error) -> bool:
    """Return whether an error means a damaged file, not a failed write."""
    return _code(error) in _DAMAGE


def _code(error: sqlite3.Error) -> int:
    """Return an error's primary result code, or −1."""
    code = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


def _apply(db: sqlite3.Connection, change: Change | ChangeUsage) -> None:
    if isinstance(change, ChangeUsage):
        write_rows(db, change.rows)
        if change.before is not None:
            delete_rows(db, change.before)
        return
    key = (*change.owner, change.session_id)
    match change:
        case SavePast(facts=facts, past=past, at=at):
            db.execute(f"DELETE FROM piece {_WHERE}", key)
            db.execute(
                "INSERT OR REPLACE INTO session VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*key, at, facts, zlib.crc32(facts), past, zlib.crc32(past)),
            )
        case SaveFacts(facts=facts, at=at):
            db.execute(
                f"UPDATE session SET facts = ?, facts_crc = ?, at = ? {_WHERE}",
                (facts, zlib.crc32(facts), at, *key),
            )
        case SavePiece(number=number, data=data):
            if number == 0:
                db.execute(f"DELETE FROM piece {_WHERE}", key)
            db.execute(
                "INSERT OR REPLACE INTO piece VALUES (?, ?, ?, ?, ?, ?)",
                (*key, number, data, zlib.crc32(data)),
            )
        case SaveDeletions(owner=owner, data=data):
            if data:
                row = (*owner, data, zlib.crc32(data))
                db.execute("INSERT OR REPLACE INTO deletions VALUES (?, ?, ?, ?)", row)
            else:
                db.execute("DELETE FROM deletions WHERE user = ? AND label = ?", tuple(owner))
        case Erase():
            db.execute(f"DELETE FROM piece {_WHERE}", key)
            db.execute(f"DELETE FROM session {_WHERE}", key)


# Reading.


def _read(
    db: sqlite3.Connection, decode_facts: Callable[[bytes], SessionFacts]
) -> Iterator[StoredSession]:
    """Yield the readable sessions; if others are not, raise `Unreadable` in the end."""
    pieces_query = f"SELECT data, crc FROM piece {_WHERE} ORDER BY number"
    damaged_sessions = 0
    with closing(db.execute("SELECT * FROM session ORDER BY at")) as rows:
        for user, label, session_id, at, packed_facts, facts_crc, past, past_crc in rows:
            try:
                facts = decode_facts(_checked(packed_facts, facts_crc))
                piece_rows = db.execute(pieces_query, (user, label, session_id))
                pieces = tuple(_decode_piece(_checked(*row)) for row in piece_rows)
                resumable_of(_checked(past, past_crc))
                yield StoredSession(Owner(user, label), session_id, at, facts, past, pieces)
            except (msgspec.MsgspecError, TypeError, Unreadable):
                damaged_sessions += 1
    if damaged_sessions:
        raise Unreadable(f"{damaged_sessions} sessions cannot be read")


def _read_deletions(db: sqlite3.Connection) -> dict[Owner, bytes]:
    """Return the notes on deleted sessions; damaged ones are left out."""
    rows = db.execute("SELECT user, label, data, crc FROM deletions")
    return {Owner(user, label): data for user, label, data, crc in rows if zlib.crc32(data) == crc}


def _checked(data: bytes, crc: int) -> bytes:
    if zlib.crc32(data) != crc:
        raise Unreadable("a checksum is wrong")
    return data


_decode_piece = msgspec.msgpack.Decoder(TurnPiece).decode
