"""Jobs and their files on disk: a row of SQLite for each, beside the files with requests and
results.

A file of results has a line for each request that has ended, and grows by whole lines. The lines
say which requests need not be computed again: no row changes while a job runs. A line that was cut
by a kill, or by a full disk, is removed before the next one is written.

All methods block; one thread at a time may use a store. Only its owner may read the folder (0700)
and the files (0600). Rows that are deleted are overwritten (`secure_delete`).
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...backends.errors import InvalidArgument, TooLarge
from ...scheduler.owner import Owner

ROWS_FILE = "jobs.db"
LINE_BYTES_MAX = 16 << 20
"""Bytes of a request. Images and sounds are in it, in base64."""
CUSTOM_ID_CHARACTERS_MAX = 512
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
SCHEMA = 1
_LOCK_WAIT_S = 1.0


class NewerRows(Exception):
    """A newer version of inferd wrote the rows; they are not touched."""


class StoredFile(msgspec.Struct, kw_only=True, tag="file"):
    """The row of a file with requests."""

    id: str
    owner: Owner
    name: str
    bytes: int
    lines: int
    created_at: float


class StoredJob(msgspec.Struct, kw_only=True, tag="job"):
    """The row of a job. *gateway* is the user whose connection submitted it, which differs from
    the owner's if a gateway did, and *on_behalf_of* is the gateway's name for the owner; both
    users' rights bound the job's requests. Their usage counts for the gateway's *key*, with the
    limits that it had then.
    """

    id: str
    owner: Owner
    gateway: int
    on_behalf_of: str
    file: str
    endpoint: str
    priority: str
    events: bool
    models: list[str] | None
    metadata: dict[str, str]
    requests: int
    created_at: float
    expires_at: float | None
    started_at: float | None = None
    ended_at: float | None = None
    state: str = "waiting"
    completed: int = 0
    failed: int = 0
    error: str = ""
    key: str = ""
    key_limits: dict[str, int] = {}


Row = StoredFile | StoredJob
_decode = msgspec.msgpack.Decoder(Row).decode
_encode = msgspec.msgpack.Encoder().encode


class RequestLine(msgspec.Struct):
    """A line of a file with requests."""

    body: msgspec.Raw
    custom_id: str = ""
    url: str = ""
    method: str = "POST"


class Line(NamedTuple):
    """A request's place in its file, by its number from 0 on."""

    number: int
    offset: int
    size: int


class Results(NamedTuple):
    """The lines of a file with results: their bytes, and the numbers of their requests or events.
    *is_final* says whether the last one is the end of a streamed response.
    """

    bytes: int
    numbers: list[int]
    is_final: bool


_decode_request = msgspec.json.Decoder(RequestLine).decode


def read_request(data: bytes, number: int, endpoint: str) -> RequestLine:
    """Return the request in a line.

    :raises InvalidArgument: the line is not a request.
    """

    def error(cause: str, hint: str) -> InvalidArgument:
        return InvalidArgument(
            f"line {number + 1} of the file {cause}", hint=hint, data={"line": number + 1}
        )

    form = 'each line is an object: {"custom_id": …, "url": "/v1/chat/completions", "body": {…}}'
    try:
        request = _decode_request(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise error(f"is not a request in JSON: {exc}", form) from None
    if not bytes(request.body).lstrip().startswith(b"{"):
        raise error("has a body that is not an object", form)
    request.url = request.url or endpoint
    if request.method.upper() != "POST":
        raise error(f"has the method {request.method[:20]!r}", "use POST")
    if request.url not in ENDPOINTS:
        raise error(f"has the url {request.url[:100]!r}", f"use one of {', '.join(ENDPOINTS)}")
    if endpoint and request.url != endpoint:
        raise error(
            f"has the url {request.url!r}, but the job's endpoint is {endpoint!r}",
            "use one url in a file, or submit the job without an endpoint",
        )
    request.custom_id = request.custom_id or f"request-{number + 1}"
    if len(request.custom_id) > CUSTOM_ID_CHARACTERS_MAX:
        raise error(
            f"has a custom_id of {len(request.custom_id)} characters",
            f"use at most {CUSTOM_ID_CHARACTERS_MAX}",
        )
    return request


class Store:
    """The rows and files of all jobs, in *folder*."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._db: sqlite3.Connection | None = None

    def path(self, file_id: str) -> Path:
        """Return the path of a file; an id has no slash."""
        return self.folder / f"{file_id}.jsonl"

    # Rows.

    def open(self) -> list[Row]:
        """Open or create the rows, return them, and delete the files of jobs that have none.

        :raises NewerRows: a newer version wrote them.
        :raises OSError: they cannot be created or read.
        :raises sqlite3.Error: they cannot be created or read.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.folder / ROWS_FILE
        try:
            rows = self._open_rows(path)
        except sqlite3.DatabaseError as exc:
            self.close()
            if getattr(exc, "sqlite_errorcode", 0) & 0xFF not in (
                sqlite3.SQLITE_CORRUPT,
                sqlite3.SQLITE_NOTADB,
            ):
                raise
            aside = f"{path}.damaged-{int(time.time())}"
            for suffix in ("", "-wal"):
                with suppress(FileNotFoundError):
                    os.rename(f"{path}{suffix}", f"{aside}{suffix}")
            self._open_rows(path)
            raise  # the files stay, because the rows that name them may be saved
        self._delete_unknown(rows)
        return rows

    def _open_rows(self, path: Path) -> list[Row]:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = db = sqlite3.connect(
            path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False
        )
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        [[version]] = db.execute("PRAGMA user_version")
        if version > SCHEMA:
            self.close()
            raise NewerRows(f"{path} was written by a newer version of inferd (tables {version})")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("CREATE TABLE IF NOT EXISTS row (id TEXT PRIMARY KEY, data BLOB NOT NULL)")
        db.execute(f"PRAGMA user_version = {SCHEMA}")
        return [_decode(data) for (data,) in db.execute("SELECT data FROM row")]

    def _delete_unknown(self, rows: Sequence[Row]) -> None:
        """Delete files without a row: uploads that did not end, and deletions that did not."""
        known = {name for row in rows for name in files_of(row)}
        for entry in os.scandir(self.folder):
            if entry.name.endswith(".jsonl") and entry.name.removesuffix(".jsonl") not in known:
                os.unlink(entry.path)

    def close(self) -> None:
        """Close the rows."""
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def save(self, row: Row) -> None:
        """Insert or replace a row.

        :raises sqlite3.Error: it cannot be written.
        """
        if self._db is None:
            raise sqlite3.OperationalError("the rows of jobs are not open")
        self._db.execute("INSERT OR REPLACE INTO row VALUES (?, ?)", (row.id, _encode(row)))

    def delete(self, row: Row) -> None:
        """Delete a row, then its files. After a kill between the two, `open` deletes the files.

        :raises sqlite3.Error: the row cannot be deleted.
        :raises OSError: a file cannot be deleted.
        """
        if self._db is None:
            raise sqlite3.OperationalError("the rows of jobs are not open")
        self._db.execute("DELETE FROM row WHERE id = ?", (row.id,))
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for name in files_of(row):
            self.path(name).unlink(missing_ok=True)

    # Files.

    def create(self, file_id: str) -> None:
        """Create an empty file.

        :raises OSError: it cannot be created.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(self.path(file_id), flags, 0o600))

    def append(self, file_id: str, size: int, data: bytes) -> None:
        """Write *data* after the first *size* bytes of a file; whatever is behind them is an
        earlier attempt. All of it is written, or the file ends there.

        :raises OSError: it cannot be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self.path(file_id), flags, 0o600)
        try:
            os.ftruncate(fd, size)
            view, offset = memoryview(data), size
            try:
                while view:
                    written = os.pwrite(fd, view, offset)
                    view, offset = view[written:], offset + written
            except OSError:
                with suppress(OSError):
                    os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)

    def read(self, file_id: str, offset: int, size: int) -> bytes:
        """Return a part of a file; an empty one if the file is not there."""
        try:
            fd = os.open(self.path(file_id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def check_requests(self, file_id: str, endpoint: str, *, single: bool) -> int:
        """Return the number of requests in a file; check all of them.

        :raises InvalidArgument: a line is not a request, or two have the same `custom_id`.
        :raises OSError: it cannot be read.
        """
        names: set[int] = set()
        for line, data in self.scan(file_id):
            request = read_request(data, line.number, endpoint)
            name = hash(request.custom_id)
            if name in names:
                raise InvalidArgument(
                    f"line {line.number + 1} of the file has the custom_id of an earlier line",
                    hint="each request has a custom_id of its own",
                    data={"line": line.number + 1},
                )
            names.add(name)
        if not names or (single and len(names) > 1):
            raise InvalidArgument(
                f"the file has {len(names)} requests", hint="it has one request in each line"
            )
        return len(names)

    def scan(self, file_id: str, offset: int = 0, number: int = 0) -> Iterator[tuple[Line, bytes]]:
        """Yield the requests in a file, without empty lines, from the line *number* at *offset* on.

        :raises TooLarge: a line is too long.
        :raises OSError: it cannot be read.
        """
        with self.path(file_id).open("rb") as file:
            file.seek(offset)
            for data in iter(lambda: file.readline(LINE_BYTES_MAX + 1), b""):
                if len(data) > LINE_BYTES_MAX:
                    raise line_too_long(number)
                if data.strip():
                    yield Line(number, offset, len(data)), data
                offset, number = offset + len(data), number + 1

    def read_results(self, file_id: str) -> Results:
        """Return the whole lines of a file with results. Lines behind one that is damaged do not
        count.
        """
        numbers, size, last = list[int](), 0, b""
        with suppress(FileNotFoundError), self.path(file_id).open("rb") as file:
            for data in file:
                number = number_in(data)
                if not data.endswith(b"\n") or number is None:
                    break
                numbers.append(number)
                size, last = size + len(data), data
        return Results(size, numbers, is_final=_type_of(last) in FINAL_EVENTS)


def check_rows(path: Path) -> None:
    """Check a copy of the rows, and move the changes of its log into the file.

    :raises NewerRows: a newer version wrote them.
    :raises sqlite3.DatabaseError: they are damaged.
    """
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        [[version]] = db.execute("PRAGMA user_version")
        if version > SCHEMA:
            raise NewerRows(f"a newer version of inferd wrote them (tables {version})")
        db.execute("PRAGMA journal_mode = DELETE")
        [[verdict]] = db.execute("PRAGMA integrity_check(1)")
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        try:
            for (data,) in db.execute("SELECT data FROM row"):
                _decode(data)
        except msgspec.MsgspecError as exc:
            raise sqlite3.DatabaseError(str(exc)) from exc


def add_to_rows(path: Path, seconds: float) -> None:
    """Add *seconds* to each date in a copy of the rows.

    :raises sqlite3.Error: it cannot be written.
    """
    with closing(sqlite3.connect(path)) as db, db:
        rows = [_decode(data) for (data,) in db.execute("SELECT data FROM row")]
        for row in rows:
            row.created_at += seconds
            if isinstance(row, StoredJob):
                for name in ("started_at", "ended_at", "expires_at"):
                    if (date := getattr(row, name)) is not None:
                        setattr(row, name, date + seconds)
        db.executemany("UPDATE row SET data = ? WHERE id = ?", ((_encode(r), r.id) for r in rows))


def line_too_long(number: int) -> TooLarge:
    """Return the error for a line that is longer than a request may be."""
    return TooLarge(
        f"line {number + 1} of the file has more than {LINE_BYTES_MAX} bytes",
        hint="a file has one request in each line, without line breaks in it",
        data={"line": number + 1, "line_bytes_max": LINE_BYTES_MAX},
    )


def files_of(row: Row) -> tuple[str, ...]:
    """Return the ids of the files that are deleted with a row."""
    if isinstance(row, StoredFile):
        return (row.id,)
    return output_of(row.id), errors_of(row.id)


def output_of(job_id: str) -> str:
    """Return the id of the file with a job's results."""
    return f"file-{job_id}-output"


def errors_of(job_id: str) -> str:
    """Return the id of the file with the results of a job's requests that failed."""
    return f"file-{job_id}-errors"


# Results.


FINAL_EVENTS = ("response.completed", "response.incomplete", "response.failed")
"""The types of the last event of a streamed response."""


class _ResultId(msgspec.Struct):
    id: str = ""
    sequence_number: int = -1
    type: str = ""


_decode_id = msgspec.json.Decoder(_ResultId).decode


def result_line(job_id: str, number: int, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the line of a request's result, in the form of OpenAI's Batch API. It has the number
    of the request, by which `number_in` finds it again.
    """
    name = f"batch_req_{job_id}_{number}"
    value: dict[str, Any] = {
        "id": name,
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": name, "body": msgspec.Raw(body)},
        "error": None,
    }
    return msgspec.json.encode(value).replace(b"\n", b" ") + b"\n"


def number_in(line: bytes) -> int | None:
    """Return the number of the request whose result a line is, or of the event; else None."""
    try:
        found = _decode_id(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if found.sequence_number >= 0:
        return found.sequence_number
    number = found.id.rpartition("_")[2]
    return int(number) if number.isdecimal() else None


def _type_of(line: bytes) -> str:
    try:
        return _decode_id(line).type
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
