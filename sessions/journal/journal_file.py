"""The journal's file: sessions with an id in SQLite. Knows nothing of when it is written to.

One thread at a time may use it. It holds what users have written: so it is its owner's alone
(0600), and what is deleted is overwritten (`secure_delete`), in the log beside it, too.

Measured with 16 sessions: a commit of a piece of each takes 0.09 ms, of a past of 500 tokens each
0.21 ms; each 4 MB the log goes into the file, which takes 10 to 15 ms more. Erasing takes 16 ms.
"""

from __future__ import annotations

import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec

from .entries import SessionFacts, StoredSession, TurnPiece
from .upgrade import upgrade_rows

SCHEMA = 2
"""Version of the tables, in the file's `user_version`. A newer one is left alone, an older one is
rewritten. Since 2, all values are stored, and priorities by name.
"""

_MAGIC = b"SQLite format 3\0"
_VERSION_AT = 60
"""Where a file's header has its `user_version`: big-endian, 4 bytes
(https://www.sqlite.org/fileformat2.html, section 1.3)."""
_WAL_BYTES = 4 << 20
_LOCK_WAIT_S = 1.0
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Primary result codes that speak of the file itself."""

_TABLES = """
CREATE TABLE session (
    owner INTEGER NOT NULL, id TEXT NOT NULL, at REAL NOT NULL,
    facts BLOB NOT NULL, facts_crc INTEGER NOT NULL,
    past BLOB NOT NULL, past_crc INTEGER NOT NULL,
    PRIMARY KEY (owner, id)
);
CREATE TABLE piece (
    owner INTEGER NOT NULL, id TEXT NOT NULL, number INTEGER NOT NULL,
    data BLOB NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY (owner, id, number)
);
"""


class NewerJournal(Exception):
    """The file was written by a newer version of inferd, and is not touched."""


class _Damaged(Exception):
    """The file, or a row of it, cannot be read."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the session *session_id* of the user *owner*."""

    owner: int
    session_id: str


class SavePast(Change, frozen=True, kw_only=True):
    """Put facts and past in the place of all that there was of the session, if anything."""

    facts: bytes
    past: bytes
    at: float


class SaveFacts(Change, frozen=True, kw_only=True):
    """Replace the facts of a session that is there."""

    facts: bytes
    at: float


class SavePiece(Change, frozen=True, kw_only=True):
    """Add to the last turn; number 0 begins another one."""

    number: int
    data: bytes


class Erase(Change, frozen=True, kw_only=True):
    """Delete a session; nothing of it is left in the file or its log."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What there was in the file: sessions, the longest untouched first. A damaged file was set
    aside as *set_aside*; then these are the ones that could be read, and the file is a new one.
    """

    sessions: list[StoredSession]
    set_aside: Path | None = None


class JournalFile:
    """Sessions in the file *path*. All methods block; all but `open` need it to be open."""

    def __init__(self, path: Path, now: Callable[[], float] = time.time):
        self.path = path
        self._now = now
        self._db: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        """Tell whether it can be written to."""
        return self._db is not None

    def open(self) -> Found:
        """Open the file, or make it, and read it.

        :raises NewerJournal: it is a newer version's.
        :raises OSError: it cannot be made or read.
        :raises sqlite3.Error: the same.
        """
        sessions: list[StoredSession] = []
        try:
            self._open(sessions)
        except _Damaged:
            self.close()
            aside = self._set_aside()
            self._open([])
            return Found(sessions=sessions, set_aside=aside)
        except BaseException:
            self.close()
            raise
        return Found(sessions=sessions)

    def _open(self, sessions: list[StoredSession]) -> None:
        """Open the file and append what is in it to *sessions*, as far as it can be read.

        :raises _Damaged: not all of it can.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _peek(self.path)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(
            self.path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare(self._db)
            for stored in _read(self._db):
                sessions.append(stored)  # noqa: PERF402  # what was read before damage counts
            _check(self._db)
        except sqlite3.Error as exc:
            if damaged(exc) or _code(exc) == sqlite3.SQLITE_ERROR:  # no table where one belongs
                raise _Damaged(str(exc)) from exc
            raise

    def _prepare(self, db: sqlite3.Connection) -> None:
        # Exclusive: another daemon on this directory is refused, and no shared memory is needed.
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        version = _number(db, "PRAGMA user_version")
        if version > SCHEMA:
            raise NewerJournal(_newer(self.path, version))
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA temp_store = MEMORY")
        db.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE;{_TABLES}PRAGMA user_version = {SCHEMA};COMMIT")
        elif version < SCHEMA:
            with _transaction(db):
                upgrade_rows(db)
                db.execute(f"PRAGMA user_version = {SCHEMA}")
        if version < SCHEMA:
            # Older versions look for the number in the file, not in its log.
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _set_aside(self) -> Path:
        """Rename a damaged file, with its log, and return its new name."""
        stem = f"{self.path.name}.damaged-{int(self._now())}"
        numbers = (f"{stem}-{n}" if n else stem for n in range(1000))
        aside = next(p for p in map(self.path.with_name, numbers) if not p.exists())
        for old, new in zip(_parts(self.path), _parts(aside), strict=True):
            with suppress(FileNotFoundError):
                old.rename(new)
        return aside

    def close(self) -> None:
        """Close the file; its log goes into it."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def write(self, changes: Sequence[Change]) -> None:
        """Do changes, in this order, all or none.

        :raises sqlite3.Error: they cannot be written; `damaged` tells whether the file is at fault.
        """
        db = self._db
        assert db is not None, "the journal is not open"
        with _transaction(db):
            for change in changes:
                _do(db, change)
        if any(isinstance(change, Erase) for change in changes):
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def damaged(error: sqlite3.Error) -> bool:
    """Tell whether an error says that the file is damaged, not that it cannot be written."""
    return _code(error) in _DAMAGE


def _code(error: sqlite3.Error) -> int:
    """Return an error's primary result code; −1: it has none."""
    code = getattr(error, "sqlite_errorcode", None)
    return -1 if code is None else code & 0xFF


def _do(db: sqlite3.Connection, change: Change) -> None:
    whose = change.owner, change.session_id
    match change:
        case SavePast(facts=facts, past=past, at=at):
            db.execute("DELETE FROM piece WHERE owner = ? AND id = ?", whose)
            db.execute(
                "INSERT OR REPLACE INTO session VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*whose, at, facts, zlib.crc32(facts), past, zlib.crc32(past)),
            )
        case SaveFacts(facts=facts, at=at):
            db.execute(
                "UPDATE session SET facts = ?, facts_crc = ?, at = ? WHERE owner = ? AND id = ?",
                (facts, zlib.crc32(facts), at, *whose),
            )
        case SavePiece(number=number, data=data):
            if number == 0:
                db.execute("DELETE FROM piece WHERE owner = ? AND id = ?", whose)
            db.execute(
                "INSERT OR REPLACE INTO piece VALUES (?, ?, ?, ?, ?)",
                (*whose, number, data, zlib.crc32(data)),
            )
        case Erase():
            db.execute("DELETE FROM piece WHERE owner = ? AND id = ?", whose)
            db.execute("DELETE FROM session WHERE owner = ? AND id = ?", whose)


# Reading.


def _read(db: sqlite3.Connection) -> Iterator[StoredSession]:
    rows = db.execute("SELECT * FROM session ORDER BY at")
    damage = 0
    with closing(rows):
        for owner, session_id, at, facts, facts_crc, past, past_crc in rows:
            try:
                known = _facts(_checked(facts, facts_crc))
                pieces = tuple(_pieces(db, owner, session_id))
                yield StoredSession(owner, session_id, at, known, _checked(past, past_crc), pieces)
            except (msgspec.MsgspecError, TypeError, _Damaged):
                damage += 1  # the others are none the worse for it
    if damage:
        raise _Damaged(f"{damage} sessions cannot be read")


def _pieces(db: sqlite3.Connection, owner: int, session_id: str) -> Iterator[TurnPiece]:
    rows = db.execute(
        "SELECT data, crc FROM piece WHERE owner = ? AND id = ? ORDER BY number",
        (owner, session_id),
    )
    for data, crc in rows:
        yield _piece(_checked(data, crc))


def _checked(data: bytes, crc: int) -> bytes:
    if zlib.crc32(data) != crc:
        raise _Damaged("a checksum is wrong")
    return data


_facts = msgspec.msgpack.Decoder(SessionFacts).decode
_piece = msgspec.msgpack.Decoder(TurnPiece).decode


def _check(db: sqlite3.Connection) -> None:
    """:raises _Damaged: the file does not hang together."""
    [[verdict]] = db.execute("PRAGMA quick_check(1)")
    if verdict != "ok":
        raise _Damaged(verdict)


def _number(db: sqlite3.Connection, query: str) -> int:
    [[number]] = db.execute(query)
    return int(number)


def _peek(path: Path) -> None:
    """Look at a file's header before SQLite does, which would touch it.

    :raises NewerJournal: it is a newer version's.
    :raises _Damaged: it is no file of SQLite's.
    """
    try:
        with path.open("rb") as file:
            header = file.read(_VERSION_AT + 4)
    except FileNotFoundError:
        return
    if header and not header.startswith(_MAGIC):
        raise _Damaged("no file of SQLite's")
    version = int.from_bytes(header[_VERSION_AT:], "big")
    if version > SCHEMA:
        raise NewerJournal(_newer(path, version))


def _newer(path: Path, version: int) -> str:
    return f"{path} was written by a newer version of inferd (tables {version}, here {SCHEMA})"


def _parts(path: Path) -> list[Path]:
    return [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]
