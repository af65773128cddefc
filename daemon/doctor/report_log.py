"""The log's last warnings and errors, for the report: what is told of each, and where they are.

Nothing of a line comes into the report but what is named here, whatever the log has: with
`log-text` there are prompts and answers in it, and always names of sessions.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..config.settings import Config
from .checks.units import UNIT, Units
from .time_limits import Unseen

LOG_LINES_MAX = 200
LOG_BYTES_MAX = 1 << 16
READ_BYTES_MAX = 4 << 20
"""Of a file's end."""
CHARACTERS_MAX = 2000
"""Of one text in an event."""
ITEMS_MAX = 20
JOURNAL_S_MAX = 4.0
LEVELS = ("warning", "error", "critical")
FIELDS = (
    "timestamp", "level", "logger", "event", "model", "models", "pid", "component", "error",
    "cause", "missing", "remedy", "source", "seconds", "waited_s", "connection", "request",
    "requests", "task", "tasks", "uid", "by", "bytes", "free_bytes", "kv_bytes_freed",
)  # fmt: skip
"""What the report has of an event."""
QUOTING = frozenset(("task.failed", "call.refused", "session.not_deleted"))
"""Events whose causes may quote a text, or a session's id."""
SAID = frozenset(("llama.output", "worker.output"))
"""Events of the library and of dying processes, whose text has nothing of users."""
_FRAME = re.compile(r'  File ".*", line \d+, in \S+')
_RAISED = re.compile(r"[\w.]*(?:Error|Exception|Group|Exit|Interrupt)\b")
_CONTROLS = dict.fromkeys((*range(0x20), *range(0x7F, 0xA0)), " ")


class Journal(msgspec.Struct, frozen=True):
    """A log in systemd's journal: of a unit, or of a process without one."""

    unit: str = ""
    user: bool = False
    pid: int = 0


class LogEnd(msgspec.Struct, frozen=True):
    """The last warnings and errors, each a line of JSON, the oldest first."""

    place: str
    """Where they are from; empty: nobody keeps the log."""
    lines: list[str] = []
    other: int = 0
    """Lines that are no event, which are left out."""


def place_of(
    stats: Mapping[str, Any], config: Config | None, units: Units | None
) -> Path | Journal | None:
    """Return where the log is, a path or a `Journal`, as the daemon says, else as it would be by
    configuration and units; None: nobody keeps it.
    """
    told = stats.get("log")
    if told and told.get("file"):
        return Path(told["file"])
    if told and told.get("journal"):
        journal = told["journal"]
        return Journal(journal["unit"] or "", journal["user"], stats["pid"])
    if told:
        return None
    if config is not None and config.log_file is not None:
        return config.log_file
    return None if units is None else Journal(UNIT, units.user)


def look_at_log(stats: Mapping[str, Any], config: Config | None, units: Units | None) -> LogEnd:
    """Read the end of the log of a daemon that tells *stats*, or that would run as is configured.

    :raises OSError: it is not there, or the caller may not read it.
    :raises Unseen: it is no file, or the journal cannot be asked.
    """
    place = place_of(stats, config, units)
    if place is None:
        return LogEnd("")
    if isinstance(place, Path):
        return end_of(str(place), _file_lines(place))
    return end_of(f"the journal of {place.unit or f'process {place.pid}'}", _journal_lines(place))


def end_of(place: str, lines: Iterable[bytes]) -> LogEnd:
    """Return of *lines*, the newest first, as many as the report takes."""
    found: list[str] = []
    size = other = 0
    for line in lines:
        event = _event(line)
        if event is None:
            other += 1
        elif event.get("level") in LEVELS:
            told = told_of(event)
            size += len(told.encode()) + 1
            if size > LOG_BYTES_MAX or len(found) == LOG_LINES_MAX:
                break
            found.append(told)
    return LogEnd(place, found[::-1], other)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def told_of(event: Mapping[str, Any]) -> str:
    """Return what the report has of an event."""
    name = event.get("event")
    told = {field: _bounded(event[field]) for field in FIELDS if field in event}
    if name in QUOTING:
        told.pop("cause", None)
    if name in SAID:
        told["text"] = _bounded(event.get("text"))
    if "exception" in event:
        told["exception"] = list(_raised(str(event["exception"])))[-ITEMS_MAX:]
    return msgspec.json.encode(told).decode()


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return value[:CHARACTERS_MAX].translate(_CONTROLS)
    if isinstance(value, list):
        return [_bounded(item) for item in value[:ITEMS_MAX] if not isinstance(item, list | dict)]
    return None if isinstance(value, dict) else value


def _raised(traceback: str) -> Iterator[str]:
    """Return where an exception came from and its type; its message may quote a text."""
    for line in traceback.splitlines():
        found = _FRAME.fullmatch(line) or _RAISED.match(line)
        if found:
            yield found[0].strip()[:CHARACTERS_MAX].translate(_CONTROLS)


def _file_lines(path: Path) -> Iterator[bytes]:
    # Without O_NONBLOCK a pipe would be waited for.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Unseen(f"{path} is no file")
        begin = max(0, status.st_size - READ_BYTES_MAX)
        data = os.pread(fd, READ_BYTES_MAX, begin)
    finally:
        os.close(fd)
    lines = data.split(b"\n")
    if begin:
        del lines[0]  # it is cut
    yield from filter(None, reversed(lines))


def _journal_lines(journal: Journal) -> Iterator[bytes]:
    if shutil.which("journalctl") is None:
        raise Unseen("it is in systemd's journal, and there is no journalctl here")
    command = ["journalctl", "--quiet", "--no-pager", "--output=cat", "--priority=warning"]
    command += [f"--lines={LOG_LINES_MAX}", *(["--user"] if journal.user else [])]
    command.append(f"--unit={journal.unit}" if journal.unit else f"_PID={journal.pid}")
    try:
        done = subprocess.run(command, capture_output=True, timeout=JOURNAL_S_MAX, check=False)
    except subprocess.TimeoutExpired:
        raise Unseen(f"journalctl gave no answer within {JOURNAL_S_MAX:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise Unseen(f"journalctl: {said[-1] if said else f'status {done.returncode}'}")
    yield from filter(None, reversed(done.stdout.split(b"\n")))
