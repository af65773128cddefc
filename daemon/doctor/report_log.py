"""The log's last warnings and errors, with the fields of their events that the report may have.

Only the fields listed here go into the report, because the log always has ids of sessions, and with
`log-text` also prompts and answers.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from ..config.settings import Config
from ..logs.log_lines import SystemdJournal, lines_backwards, log_place
from ..printable import escape_controls
from .checks.units import UNIT, Units
from .time_limits import ProbeFailed

LOG_LINES_MAX = 200
LOG_BYTES_MAX = 1 << 16
READ_BYTES_MAX = 4 << 20
"""Bytes that are read from the end of a file."""
CHARACTERS_MAX = 2000
"""Maximum length of one text in an event."""
LIST_MAX = 20
SYSTEMD_JOURNAL_S_MAX = 4.0
REPORTED_LEVELS = ("warning", "error", "critical")
FIELDS = (
    "timestamp", "level", "logger", "event", "model", "models", "pid", "component", "error",
    "cause", "missing", "remedy", "source", "seconds", "waited_s", "connection", "request",
    "requests", "task", "tasks", "uid", "by", "bytes", "free_bytes", "kv_bytes_freed",
)  # fmt: skip
"""Fields of an event that go into the report."""
QUOTING = frozenset(("task.failed", "call.refused", "session.not_deleted"))
"""Events whose causes may quote a text or a session id."""
LIBRARY_EVENTS = frozenset(("llama.output", "worker.output"))
"""Events of the library and of crashing processes, whose texts do not come from users."""
_FRAME = re.compile(r'  File ".*", line \d+, in \S+')
_RAISED = re.compile(r"[\w.]*(?:Error|Exception|Group|Exit|Interrupt)\b")


class LogEnd(msgspec.Struct, frozen=True):
    """The last warnings and errors, each a line of JSON, oldest first."""

    place: str
    """The place of the log; empty if no log is kept."""
    lines: list[str] = []
    other: int = 0
    """Number of lines that are not events; they are left out."""


def read_log_end(stats: Mapping[str, Any], config: Config | None, units: Units | None) -> LogEnd:
    """Return the end of the log of the daemon with *stats*, or of a daemon with *config*.

    :raises OSError: the log does not exist, or the caller may not read it.
    :raises ProbeFailed: the log is not a file, or the systemd journal cannot be read.
    """
    service = None if units is None else SystemdJournal(UNIT, units.user)
    place = log_place(stats, config, service)
    if place is None:
        return LogEnd("")
    if isinstance(place, Path):
        return last_events(str(place), _file_lines(place))
    subject = place.unit or f"process {place.pid}"
    return last_events(f"the journal of {subject}", _systemd_journal_lines(place))


def last_events(place: str, lines: Iterable[bytes]) -> LogEnd:
    """Return the warnings and errors in *lines*, which begin with the newest, up to the bounds of
    the report.
    """
    found: list[str] = []
    size = other = 0
    for line in lines:
        try:
            event = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            other += 1
            continue
        if event.get("level") in REPORTED_LEVELS:
            text = reported_fields(event)
            size += len(text.encode()) + 1
            if size > LOG_BYTES_MAX or len(found) == LOG_LINES_MAX:
                break
            found.append(text)
    return LogEnd(place, found[::-1], other)


def reported_fields(event: Mapping[str, Any]) -> str:
    """Return the fields of an event that go into the report, as JSON."""
    name = event.get("event")
    fields = {field: _bounded(event[field]) for field in FIELDS if field in event}
    if name in QUOTING:
        fields.pop("cause", None)
    if name in LIBRARY_EVENTS:
        fields["text"] = _bounded(event.get("text"))
    if "exception" in event:
        fields["exception"] = list(_raised(str(event["exception"])))[-LIST_MAX:]
    return escape_controls(msgspec.json.encode(fields).decode())


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return value[:CHARACTERS_MAX]
    if isinstance(value, list):
        return [_bounded(item) for item in value[:LIST_MAX] if not isinstance(item, list | dict)]
    return None if isinstance(value, dict) else value


def _raised(traceback: str) -> Iterator[str]:
    """Yield the frames and the type of an exception; omit its message, which may quote a text."""
    for line in traceback.splitlines():
        found = _FRAME.fullmatch(line) or _RAISED.match(line)
        if found:
            yield found[0].strip()[:CHARACTERS_MAX]


def _file_lines(path: Path) -> Iterator[bytes]:
    # Without O_NONBLOCK the open of a pipe would block.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ProbeFailed(f"{path} is not a file")
        begin = max(0, status.st_size - READ_BYTES_MAX)
        file = FileIO(fd, closefd=False)  # only after the check, since it refuses a folder
        yield from filter(None, lines_backwards(file, status.st_size, begin))
    finally:
        os.close(fd)


def _systemd_journal_lines(journal: SystemdJournal) -> Iterator[bytes]:
    command = journal.command(LOG_LINES_MAX, "warning")
    if shutil.which(command[0]) is None:
        raise ProbeFailed("it is in the systemd journal, but journalctl is not installed")
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=SYSTEMD_JOURNAL_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise ProbeFailed(f"journalctl gave no answer within {SYSTEMD_JOURNAL_S_MAX:g} s") from None
    if done.returncode:
        errors = done.stderr.decode(errors="replace").strip().splitlines()
        raise ProbeFailed(f"journalctl: {errors[-1] if errors else f'status {done.returncode}'}")
    yield from filter(None, reversed(done.stdout.split(b"\n")))
