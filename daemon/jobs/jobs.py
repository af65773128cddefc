"""All jobs and their files: who has them, their bounds, their changes, and the waits for these.

A job is requests in a file, of which the daemon's `JobRunner` has a bounded number computed at a
time, under the identity of the job's owner. It belongs to an owner as a session does: an owner
without a label has the jobs of all labels of its user; other users see neither jobs nor files.

A job ends when each request has a result, when it is cancelled or expires, or when its results take
more space than its user may have. It then stays, with its results, until it is deleted: by its
owner, by age (`jobs-days-max`), or for newer files of the same user (`jobs-user-bytes-max`,
`jobs-user-max`). Nobody's files are deleted for those of another user.

Everything here lives on the daemon's event loop; the store is used in one thread, files are also
read in others.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread
import structlog

from ...backends.errors import (
    BackendError,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    TooLarge,
)
from ...scheduler.owner import Owner
from .store import (
    LINE_BYTES_MAX,
    Line,
    NewerRows,
    Row,
    Store,
    StoredFile,
    StoredJob,
    errors_of,
    files_of,
    line_too_long,
    output_of,
)

log = structlog.get_logger(logger_name="jobs")
UPLOADS_USER_MAX = 8
"""Uploads of one user that have not ended."""
CLEAN_S = 60.0
"""The pause between two searches for jobs that are too old."""
READ_BYTES = 512 << 10
_READERS = 4
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENDED = ("completed", "cancelled", "expired", "failed")
JOB_STATES = ("waiting", "running", *_ENDED)
REQUEST_OUTCOMES = ("completed", "failed", "given_up")
DAY_S = 86_400.0
T = TypeVar("T")


@dataclass(kw_only=True)
class JobLimits:
    """The bounds of jobs, as the configuration has them."""

    entries_max: int = 10_000
    user_max: int = 1000
    lines_max: int = 50_000
    file_bytes_max: int = 200 << 20
    user_bytes_max: int = 2 << 30
    bytes_max: int = 16 << 30
    days_max: float = 30.0
    requests_max: int = 16


@dataclass(eq=False)
class Upload:
    """A file that is being uploaded over a connection, its *holder*."""

    row: StoredFile
    holder: object
    line_bytes: int = 0
    """Bytes of its last line so far."""
    busy: bool = False


@dataclass(eq=False)
class Job:
    """A job, its progress, and its results' sizes."""

    row: StoredJob
    output_bytes: int = 0
    error_bytes: int = 0
    done: set[int] = field(default_factory=set)
    """The numbers of the lines that have a result; empty once the job has ended."""
    events: int = 0
    """The events in its results, if they are those of a streamed response."""
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    """Held while a result is written."""
    running: int = 0
    revision: int = 1
    changed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def ended(self) -> bool:
        """Whether its requests are no longer computed."""
        return self.row.state in _ENDED

    @property
    def left(self) -> int:
        """The number of its requests without a result."""
        return max(0, self.row.requests - self.row.completed - self.row.failed)

    @property
    def bytes(self) -> int:
        """The size of its results."""
        return self.output_bytes + self.error_bytes

    def report_change(self) -> None:
        """Wake those who wait for a change."""
        self.revision += 1
        self.changed.set()
        self.changed = anyio.Event()


class FileFacts(NamedTuple):
    """A file, and the job that writes it, if any."""

    id: str
    row: StoredFile | StoredJob
    purpose: str
    bytes: int
    lines: int
    job: Job | None


class Space(NamedTuple):
    """An input file or an ended job, which can be deleted to make space."""

    id: str
    at: float
    bytes: int


def to_delete(spaces: Iterable[Space], excess_bytes: int, excess: int) -> list[str] | None:
    """Return the oldest of a user's *spaces* whose deletion frees *excess_bytes* and *excess*
    entries, or None if all of them are too few.
    """
    chosen: list[str] = []
    for space in sorted(spaces, key=lambda each: (each.at, each.id)):
        if excess_bytes <= 0 and len(chosen) >= excess:
            break
        chosen.append(space.id)
        excess_bytes -= space.bytes
    return None if excess_bytes > 0 or len(chosen) < excess else chosen


def too_old(spaces: Iterable[Space], now: float, days_max: float) -> list[str]:
    """Return the spaces that are older than *days_max* days."""
    return [space.id for space in spaces if now - space.at > days_max * DAY_S]


def not_written(exc: Exception) -> BackendError:
    """Return the error for a file or row that cannot be written."""
    return BackendError(
        f"the files of jobs cannot be written: {exc}",
        hint="free space on the disk of state-dir, or let the daemon's user write there",
    )


class Jobs:
    """The owner of all jobs and files. *note_state* is called with the cause while they cannot be
    written, and with None when they can.
    """

    def __init__(
        self, folder: Path, note_state: Callable[[str | None], object], now: Callable[[], float]
    ):
        self.store = Store(folder)
        self.limits = JobLimits()
        self.wake = anyio.Event()
        """Set when a request may have become ready to be computed."""
        self.requests_ended: Counter[str] = Counter()
        """Requests that have ended since the start, by `REQUEST_OUTCOMES`."""
        self._note_state, self.now = note_state, now
        self._files: dict[str, StoredFile] = {}
        self._jobs: dict[str, Job] = {}
        self._uploads: dict[str, Upload] = {}
        self._used: Counter[int] = Counter()
        """The bytes of each user's files."""
        self._unsaved: set[str] = set()
        """Jobs that have ended, whose rows could not be written yet."""
        self._reserved: dict[str, str] = {}
        """Ids of jobs that are being submitted, with their input files."""
        self._writer, self._readers = anyio.CapacityLimiter(1), anyio.CapacityLimiter(_READERS)
        self._submitted = anyio.Event()
        self._refused = ""

    # Start, age, end.

    async def open(self) -> None:
        """Read the jobs of earlier daemons. If that fails, the daemon runs without jobs."""
        try:
            rows = await self.in_writer(self.store.open)
        except (OSError, sqlite3.Error, NewerRows) as exc:
            self._refused = str(exc)
            self._note_state(self._refused)
            log.error("jobs.not_opened", cause=self._refused)
            return
        self._files = {row.id: row for row in rows if isinstance(row, StoredFile)}
        for row in rows:
            if isinstance(row, StoredJob):
                self._jobs[row.id] = await self._restored(row)
        for each in self._rows():
            self._used[each.owner.user] += self._bytes_of(each)
        for job in self.unfinished():
            if len(job.done) >= job.row.requests:  # it was killed before it could note its end
                with suppress(BackendError):
                    await self.end(job, "completed")
        log.info("jobs.restored", jobs=len(self._jobs), unfinished=len(self.unfinished()))

    async def _restored(self, row: StoredJob) -> Job:
        """Return a job of an earlier daemon, with the results that it had stored."""
        job, read = Job(row), self.store.read_results
        outputs, errors = [await self.in_reader(read, name) for name in files_of(row)]
        job.output_bytes, job.error_bytes = outputs.bytes, errors.bytes
        if row.events:
            job.events = len(outputs.numbers)
        if not job.ended:
            row.failed = len(errors.numbers)
            row.completed = int(outputs.is_final) if row.events else len(outputs.numbers)
            if row.completed + row.failed and not row.events:
                job.done.update(outputs.numbers, errors.numbers)
            elif row.completed + row.failed:
                job.done.add(0)
            if outputs.numbers or errors.numbers:
                row.state, row.started_at = "running", row.started_at or row.created_at
        return job

    def _bytes_of(self, row: Row) -> int:
        return row.bytes if isinstance(row, StoredFile) else self._jobs[row.id].bytes

    async def run(self) -> None:
        """Delete what is too old, and end jobs that expire, until cancelled."""
        while True:
            now = self.now()
            with suppress(BackendError):  # noted; it is tried again
                await self._clean(now)
            expiries = [j.row.expires_at for j in self.unfinished() if j.row.expires_at is not None]
            pause_s = min((expiry - now for expiry in expiries), default=CLEAN_S)
            with anyio.move_on_after(min(max(pause_s, 0.05), CLEAN_S)):
                await self._submitted.wait()
            self._submitted = anyio.Event()

    async def _clean(self, now: float) -> None:
        for job_id in [*self._unsaved]:
            if (job := self._jobs.get(job_id)) is not None:
                await self._save(job.row)
            self._unsaved.discard(job_id)
        for job in self.unfinished():
            if job.row.expires_at is not None and job.row.expires_at <= now:
                await self.end(job, "expired")
        for user in {row.owner.user for row in self._rows()}:
            await self._delete_all(too_old(self._spaces(user), now, self.limits.days_max))

    async def close(self) -> None:
        """Close the rows."""
        await self.in_writer(self.store.close)

    async def in_writer(self, work: Callable[..., T], *args: object) -> T:
        """Run a blocking function of the store that writes. It ends even if the caller is
        cancelled, because its result must be noted.
        """
        with anyio.CancelScope(shield=True):
            result = await anyio.to_thread.run_sync(work, *args, limiter=self._writer)
        return result

    async def in_reader(self, work: Callable[..., T], *args: object) -> T:
        """Run a blocking function of the store that only reads."""
        return await anyio.to_thread.run_sync(work, *args, limiter=self._readers)

    async def _save(self, row: Row) -> None:
        """Write a row.

        :raises BackendError: it cannot be written.
        """
        try:
            await self.in_writer(self.store.save, row)
        except (OSError, sqlite3.Error) as exc:
            self._note_state(str(exc))
            raise not_written(exc) from None
        self._note_state(None)

    # Files.

    def _rows(self) -> Iterator[StoredFile | StoredJob]:
        yield from self._files.values()
        yield from (job.row for job in self._jobs.values())

    def _check_usable(self) -> None:
        if self._refused:
            raise BackendError(
                f"jobs are not available: {self._refused}",
                hint="start the newer version again, or check the disk of state-dir",
            )

    async def upload(
        self, owner: Owner, holder: object, file_id: str, offset: int, data: bytes, *, name: str
    ) -> StoredFile:
        """Add a part to a file; without *file_id* begin one.

        :raises InferdError: a bound is exceeded, or it cannot be written. The upload then ends.
        """
        self._check_usable()
        upload = self._upload_of(owner, holder, file_id, offset, name)
        if upload.busy:
            raise InvalidArgument("the file has another part under way", hint="send one at a time")
        upload.busy = True
        try:
            self._check_part(upload, data)
            await self._make_space(owner.user, len(data))
            if not file_id:
                await self.in_writer(self.store.create, upload.row.id)
            await self.in_writer(self.store.append, upload.row.id, offset, data)
        except BaseException as exc:
            await self._end_upload(upload)
            if isinstance(exc, OSError):
                self._note_state(str(exc))
                raise not_written(exc) from None
            raise
        finally:
            upload.busy = False
        upload.row.bytes += len(data)
        self._used[owner.user] += len(data)
        return upload.row

    def _upload_of(
        self, owner: Owner, holder: object, file_id: str, offset: int, name: str
    ) -> Upload:
        if file_id:
            upload = self._uploads.get(file_id)
            if upload is None or upload.holder is not holder:
                raise no_file(file_id)
            if offset != upload.row.bytes:
                raise InvalidArgument(
                    f"the part is at {offset}, but the file has {upload.row.bytes} bytes",
                    hint="send the parts in their order",
                )
            return upload
        if offset:
            raise InvalidArgument(
                f"a new file begins at 0, not at {offset}", hint="send the parts in their order"
            )
        own = [u for u in self._uploads.values() if u.row.owner.user == owner.user]
        if len(own) >= UPLOADS_USER_MAX:
            raise QuotaExceeded(
                f"{len(own)} uploads of the user have not ended; the limit is {UPLOADS_USER_MAX}",
                hint="end or disconnect another one first",
                data={"bound": "uploads-user-max", "retry_after_s": 1.0},
            )
        row = StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            owner=owner,
            name=name,
            bytes=0,
            lines=0,
            created_at=self.now(),
        )
        upload = self._uploads[row.id] = Upload(row, holder)
        return upload

    def _check_part(self, upload: Upload, data: bytes) -> None:
        """Count the lines of a part.

        :raises TooLarge: the file has too many lines or bytes, or too long a line.
        """
        row, limits = upload.row, self.limits
        size, lines = row.bytes + len(data), row.lines + data.count(b"\n")
        if size > limits.file_bytes_max or lines > limits.lines_max:
            raise TooLarge(
                f"the file has more than {limits.lines_max} lines or {limits.file_bytes_max} bytes",
                hint="submit several jobs with a part of the requests each, or raise"
                " jobs-lines-max and jobs-file-bytes-max",
                data={"lines_max": limits.lines_max, "bytes_max": limits.file_bytes_max},
            )
        first, *rest = data.split(b"\n") if b"\n" in data else [data]
        longest = max(upload.line_bytes + len(first), *map(len, rest), 0)
        if longest > LINE_BYTES_MAX:
            raise line_too_long(row.lines)
        upload.line_bytes = len(rest[-1]) if rest else upload.line_bytes + len(first)
        row.lines = lines

    async def end_of_upload(self, file_id: str) -> StoredFile:
        """Note that an upload is whole, from which on the file stays.

        :raises BackendError: the row cannot be written; the upload then ends.
        """
        upload = self._uploads[file_id]
        upload.row.lines += upload.line_bytes > 0
        try:
            await self._save(upload.row)
        except BaseException:
            await self._end_upload(upload)
            raise
        del self._uploads[file_id]
        self._files[file_id] = upload.row
        return upload.row

    async def _end_upload(self, upload: Upload) -> None:
        if self._uploads.pop(upload.row.id, None) is not None:
            self._used[upload.row.owner.user] -= upload.row.bytes
            with anyio.CancelScope(shield=True):
                await self.in_writer(
                    partial(self.store.path(upload.row.id).unlink, missing_ok=True)
                )

    async def end_uploads(self, holder: object) -> None:
        """Delete the unfinished uploads of a connection that was closed."""
        for upload in [u for u in self._uploads.values() if u.holder is holder]:
            await self._end_upload(upload)

    def has_uploads(self, holder: object) -> bool:
        """Return whether a connection has unfinished uploads."""
        return any(upload.holder is holder for upload in self._uploads.values())

    def files(self, owner: Owner) -> list[FileFacts]:
        """Return the files of an owner, the latest first."""
        rows = [row for row in self._rows() if owner.includes(row.owner)]
        rows.sort(key=lambda row: (row.created_at, row.id), reverse=True)
        return [facts for row in rows for facts in self._facts_of(row)]

    def file(self, owner: Owner, file_id: str) -> FileFacts:
        """Return one file of an owner.

        :raises NotFound: the owner has no such file.
        """
        if (row := self._files.get(file_id)) is not None and owner.includes(row.owner):
            return self._facts_of(row)[0]
        name = file_id.removeprefix("file-").removesuffix("-output").removesuffix("-errors")
        if (job := self._jobs.get(name)) is not None and owner.includes(job.row.owner):
            for facts in self._facts_of(job.row):
                if facts.id == file_id:
                    return facts
        raise no_file(file_id)

    def _facts_of(self, row: StoredFile | StoredJob) -> list[FileFacts]:
        if isinstance(row, StoredFile):
            return [FileFacts(row.id, row, "input", row.bytes, row.lines, None)]
        job = self._jobs[row.id]
        lines = job.events if row.events else row.completed
        found = (
            FileFacts(output_of(row.id), row, "output", job.output_bytes, lines, job),
            FileFacts(errors_of(row.id), row, "errors", job.error_bytes, row.failed, job),
        )
        return [facts for facts in found if facts.bytes or not job.ended]

    async def read(
        self, owner: Owner, file_id: str, offset: int, wait_s: float
    ) -> tuple[bytes, FileFacts]:
        """Return a part of a file; wait for at most *wait_s* if there is none yet.

        :raises NotFound: the owner has no such file.
        """
        with anyio.move_on_after(wait_s):
            while True:
                facts = self.file(owner, file_id)
                if offset < facts.bytes or facts.job is None or facts.job.ended:
                    break
                await facts.job.changed.wait()
        facts = self.file(owner, file_id)
        size = min(READ_BYTES, facts.bytes - offset)
        if size <= 0:
            return b"", facts
        return await self.in_reader(self.store.read, file_id, offset, size), facts

    async def delete_file(self, owner: Owner, file_id: str) -> bool:
        """Delete a file with requests, wholly uploaded or not; return whether there was one.

        :raises InvalidArgument: a job needs it, or wrote it.
        """
        upload = self._uploads.get(file_id)
        if upload is not None and owner.includes(upload.row.owner):
            await self._end_upload(upload)
            return True
        try:
            facts = self.file(owner, file_id)
        except NotFound:
            return False
        if facts.job is not None:
            raise InvalidArgument(
                f"the file belongs to the job {facts.job.row.id!r}",
                hint="delete the job, with its results",
            )
        if file_id in self._needed():
            raise InvalidArgument(
                "a job that has not ended needs the file", hint="cancel the job first"
            )
        await self._delete(facts.row)
        return True

    def _needed(self) -> set[str]:
        """Return the input files of jobs that have not ended."""
        return {job.row.file for job in self.unfinished()} | set(self._reserved.values())

    # Space.

    def _spaces(self, user: int) -> list[Space]:
        """Return a user's files and jobs that may be deleted for newer ones."""
        needed = self._needed()
        files = [
            Space(row.id, row.created_at, row.bytes)
            for row in self._files.values()
            if row.owner.user == user and row.id not in needed
        ]
        jobs = [
            Space(job.row.id, job.row.ended_at or job.row.created_at, job.bytes)
            for job in self._jobs.values()
            if job.row.owner.user == user and job.ended
        ]
        return files + jobs

    @property
    def bytes_used(self) -> int:
        """The size of the files of all users."""
        return self._used.total()

    def _entries_of(self, user: int) -> int:
        return sum(row.owner.user == user for row in self._rows())

    async def _make_space(self, user: int, size: int, entries: int = 0) -> None:
        """Delete the oldest results of a user, if there is no space for *size* more bytes, or for
        as many *entries*.

        :raises QuotaExceeded: the space would not suffice even then, so nothing was deleted.
        """
        limits, used = self.limits, self._used[user]
        excesses = {
            "jobs-user-bytes-max": used + size - limits.user_bytes_max,
            "jobs-bytes-max": self._used.total() + size - limits.bytes_max,
        }
        more = self._entries_of(user) + entries - limits.user_max if entries else 0
        excess = max(excesses.values())
        spaces = self._spaces(user) if excess > 0 or more > 0 else []
        chosen = to_delete(spaces, excess, more)
        total = len(self._files) + len(self._jobs)
        if chosen is None or total + entries > limits.entries_max:
            count = self._entries_of(user)
            bound = (
                "jobs-user-max" if excess <= 0 else max(excesses, key=lambda name: excesses[name])
            )
            raise QuotaExceeded(
                f"the user has {count} jobs and files, of {used} bytes; a user may have"
                f" {limits.user_max}, of {limits.user_bytes_max} bytes, and all users together"
                f" {limits.entries_max}, of {limits.bytes_max} bytes",
                hint="delete jobs and files, or raise jobs-user-bytes-max and jobs-bytes-max",
                data={"bound": bound, "bytes": used, "retry_after_s": 60.0},
            )
        await self._delete_all(chosen)

    async def _delete_all(self, ids: Sequence[str]) -> None:
        for each in ids:
            row = self._files.get(each) or (self._jobs[each].row if each in self._jobs else None)
            if row is not None:
                log.info("jobs.deleted", id=each, user=row.owner.user)
                await self._delete(row)

    async def _delete(self, row: Row) -> None:
        """Delete a row and its files.

        :raises BackendError: they cannot be deleted.
        """
        try:
            await self.in_writer(self.store.delete, row)
        except (OSError, sqlite3.Error) as exc:
            self._note_state(str(exc))
            raise not_written(exc) from None
        self._used[row.owner.user] -= self._bytes_of(row) if self._has(row) else 0
        if isinstance(row, StoredFile):
            self._files.pop(row.id, None)
        elif (job := self._jobs.pop(row.id, None)) is not None:
            job.report_change()

    def _has(self, row: Row) -> bool:
        return row.id in (self._files if isinstance(row, StoredFile) else self._jobs)

    # Jobs.

    async def submit(self, row: StoredJob) -> Job:
        """Add a job whose input file the owner has.

        :raises InferdError: a line is not a request, a bound is exceeded, or the id is in use.
        """
        self._check_usable()
        self.file(row.owner, row.file)
        if not _ID.fullmatch(row.id):
            raise InvalidArgument(
                f"the id {row.id[:64]!r} of a job has other characters than letters, digits, _, -",
                hint="leave it out, and one is made",
            )
        if row.id in self._jobs or row.id in self._reserved:
            raise InvalidArgument(f"there is a job {row.id!r}", hint="use another id")
        self._reserved[row.id] = row.file
        try:
            row.requests = await self.in_reader(
                partial(self.store.check_requests, row.file, row.endpoint, single=row.events)
            )
            await self._make_space(row.owner.user, 0, 1)
            await self._save(row)
            job = self._jobs[row.id] = Job(row)
        finally:
            del self._reserved[row.id]
        self.wake.set()
        self._submitted.set()
        return job

    def new_id(self) -> str:
        """Return an id for a job."""
        return f"batch_{secrets.token_hex(12)}"

    def jobs(self, owner: Owner | None) -> list[Job]:
        """Return the jobs of an owner, or with None of all, the latest first."""
        found = [j for j in self._jobs.values() if owner is None or owner.includes(j.row.owner)]
        return sorted(found, key=lambda job: (job.row.created_at, job.row.id), reverse=True)

    def find(self, job_id: str) -> Job | None:
        """Return a job, of any owner."""
        return self._jobs.get(job_id)

    def job(self, owner: Owner, job_id: str) -> Job:
        """Return a job of an owner.

        :raises NotFound: the owner has no such job.
        """
        job = self._jobs.get(job_id)
        if job is None or not owner.includes(job.row.owner):
            raise no_job(job_id)
        return job

    async def wait(self, job: Job, revision: int, wait_s: float) -> None:
        """Wait until a job's revision is another one, for at most *wait_s*."""
        with anyio.move_on_after(wait_s):
            while job.revision == revision and not job.ended:
                await job.changed.wait()

    def unfinished(self) -> list[Job]:
        """Return the jobs that have not ended, the oldest first."""
        return [job for job in self._jobs.values() if not job.ended]

    async def end(self, job: Job, state: str, error: str = "") -> None:
        """End a job that has not ended; requests under way have no result.

        :raises BackendError: its row cannot be written. It ends, but begins again after a restart.
        """
        if job.ended:
            return
        job.row.state, job.row.error, job.row.ended_at = state, error, self.now()
        self.requests_ended["given_up"] += job.left
        job.done = set()
        job.report_change()
        self.wake.set()
        log.info(
            "jobs.ended",
            job=job.row.id,
            state=state,
            completed=job.row.completed,
            failed=job.row.failed,
        )
        self._unsaved.add(job.row.id)
        await self._save(job.row)
        self._unsaved.discard(job.row.id)

    async def delete_job(self, job: Job) -> None:
        """Delete a job and its results, and its input file unless another job has it."""
        if not job.ended:
            with suppress(BackendError):  # its row is deleted next
                await self.end(job, "cancelled")
        async with job.lock:  # a result may be under way to the disk
            await self._delete(job.row)
        row = self._files.get(job.row.file)
        if row is not None and not any(j.row.file == row.id for j in self._jobs.values()):
            await self._delete(row)

    # Results.

    async def start(self, job: Job) -> None:
        """Note that a request of a job has begun."""
        job.running += 1
        if job.row.state == "waiting":
            job.row.state, job.row.started_at = "running", self.now()
        job.report_change()

    async def add_result(self, job: Job, line: Line, data: bytes, *, failed: bool) -> None:
        """Store the result of a request, and end the job with the last one.

        :raises BackendError: it cannot be written now.
        """
        if job.ended or line.number in job.done:
            return
        await self._append(job, data, failed=failed)
        if job.ended:
            return
        job.done.add(line.number)
        job.row.completed += not failed
        job.row.failed += failed
        self.requests_ended["failed" if failed else "completed"] += 1
        job.report_change()
        if len(job.done) >= job.row.requests:
            await self.end(job, "completed")

    async def add_event(self, job: Job, number: int, data: bytes) -> None:
        """Store an event of a job's only response, unless an earlier attempt has stored it.

        :raises BackendError: it cannot be written now.
        """
        if not job.ended and number >= job.events:
            await self._append(job, data + b"\n", failed=False)
            job.events += 1
            job.report_change()

    async def end_events(self, job: Job) -> None:
        """Note that the last event of a job's response is stored.

        :raises BackendError: the job's row cannot be written now.
        """
        if not job.ended:
            job.row.completed = 1
            self.requests_ended["completed"] += 1
            await self.end(job, "completed")

    async def _append(self, job: Job, data: bytes, *, failed: bool) -> None:
        """Write a line of results, for which older results of the user may be deleted."""
        async with job.lock:
            if job.ended:  # while it waited
                return
            try:
                await self._make_space(job.row.owner.user, len(data))
            except QuotaExceeded as exc:
                await self.end(job, "failed", exc.message)
                return
            name = errors_of(job.row.id) if failed else output_of(job.row.id)
            size = job.error_bytes if failed else job.output_bytes
            try:
                await self.in_writer(self.store.append, name, size, data)
            except OSError as exc:
                self._note_state(str(exc))
                raise not_written(exc) from None
            self._used[job.row.owner.user] += len(data)
            if failed:
                job.error_bytes += len(data)
            else:
                job.output_bytes += len(data)
        self._note_state(None)


def no_file(file_id: str) -> NotFound:
    """Return the error for an id with which the caller has no file."""
    return NotFound(
        f"there is no file {file_id[:100]!r}",
        hint="`inferd jobs` lists the caller's jobs; files are deleted with them, and by age",
    )


def no_job(job_id: str) -> NotFound:
    """Return the error for an id with which the caller has no job."""
    return NotFound(
        f"there is no job {job_id[:100]!r}", hint="`inferd jobs` lists the caller's jobs"
    )
