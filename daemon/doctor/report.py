"""The report of `inferd doctor`: data for a bug report, without any text of users.

This module lists all that goes into it. It has no prompt, no answer and no session id, and of texts
among the models' parameters only the length. Of the log it has the last warnings and errors, with
those fields of their events that are listed here: the log always has ids of sessions, and with
`log-text` also prompts and answers.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from ... import __version__
from ...backends.errors import InvalidArgument, PermissionDenied
from ...backends.library import LLAMA_COMMIT
from ...backends.params import BY_NAME
from ..config.settings import Config
from ..config.show import InForce, Value, toml_of
from ..logs.log_lines import SystemdJournal, lines_backwards, log_place
from ..printable import escape_controls
from .checks.units import UNIT, Units
from .examination import Examination, Facts
from .finding import Finding
from .time_limits import Probe, ProbeFailed

STATS_KEYS = (
    "uptime_s", "draining", "socket_activated", "connections", "sessions", "sessions_max",
    "sessions_dormant", "sessions_expired", "waiting", "running", "parked", "refused", "recovered",
    "cores", "memory", "journal", "components", "metrics", "pending_restart",
)  # fmt: skip
"""Keys of the daemon's `stats` that go into the report."""


def text_of(findings: Iterable[Finding]) -> str:
    """Return findings as text, each with its remedy below."""
    lines: list[str] = []
    for finding in findings:
        first, *others = finding.found.splitlines() or [""]
        lines.append(f"{finding.status:<4}  {finding.check:<13}  {first}")
        lines += [f"{'':21}{line}" for line in others]
        if finding.remedy:
            lines.append(f"{'':21}→ {finding.remedy}")
    return "\n".join(lines)


def report(examination: Examination, now: datetime.datetime) -> str:
    """Return the report's text."""
    parts = {
        "findings": text_of(examination.findings),
        "versions": "\n".join(_versions(examination.facts)),
        "configuration": _configuration(examination.facts),
        "daemon": _daemon(examination.facts),
        "log": _log(examination.facts),
    }
    head = f"# inferd doctor, {now.isoformat(timespec='seconds')}\n"
    return head + "".join(f"\n## {name}\n\n{text}\n" for name, text in parts.items())


def _versions(facts: Facts) -> Iterator[str]:
    yield f"inferd {__version__}, llama.cpp {LLAMA_COMMIT}"
    yield f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    packages = facts.installed.packages if facts.installed is not None else {}
    yield ", ".join(f"{name} {version or 'missing'}" for name, version in packages.items())
    if facts.engine is not None:
        yield f"engine: {' '.join(facts.engine.system_info.split()) or facts.engine.failure}"
        yield f"devices: {', '.join(d.name for d in facts.engine.devices) or 'none'}"


def _configuration(facts: Facts) -> str:
    if facts.settings is None or facts.settings.shown is None:
        return "none that is valid"
    return toml_of(without_texts(facts.settings.shown), origins=True).rstrip()


def without_texts(shown: InForce) -> InForce:
    """Return the values in force, with the length instead of texts that users may have written."""
    return msgspec.structs.replace(
        shown,
        defaults=_lengths(shown.defaults),
        models={name: _lengths(values) for name, values in shown.models.items()},
    )


def _lengths(values: Mapping[str, Value]) -> dict[str, Value]:
    return {name: Value(_length(name, v.value), v.origin) for name, v in values.items()}


def _length(name: str, value: Any) -> Any:
    parameter = BY_NAME.get(name)
    is_text = isinstance(value, str | list | dict) and value
    if parameter is None or parameter.choices or not is_text:
        return value
    return f"({len(value)} {'characters' if isinstance(value, str) else 'items'})"


def _daemon(facts: Facts) -> str:
    selected = {name: facts.stats[name] for name in STATS_KEYS if name in facts.stats}
    return msgspec.json.format(msgspec.json.encode(selected), indent=1).decode()


def _log(facts: Facts) -> str:
    try:
        end = Probe(partial(read_log_end, facts.stats, facts.config, facts.units)).wait_result()
    except ProbeFailed as exc:
        return f"cannot be read: {exc}"
    if not end.place:
        return "on the daemon's standard error, which is not kept"
    other = f"; {end.other} lines that are not events are left out" if end.other else ""
    head = f"{end.place}: the last {len(end.lines)} warnings and errors{other}"
    return "\n".join([head, *end.lines])


def write_new(path: Path, text: str) -> None:
    """Write a new file that only its owner can read.

    :raises InvalidArgument: it exists already, or cannot be created.
    :raises PermissionDenied: the caller has no permission to write there.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise InvalidArgument(
            f"{path} exists already", hint="name another file: nothing is overwritten"
        ) from None
    except PermissionError:
        raise PermissionDenied(
            f"{path} may not be written", hint="name a file in a folder of your own"
        ) from None
    except OSError as exc:
        raise _write_error(path, exc) from None
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as exc:
        path.unlink(missing_ok=True)  # a partial report would look complete
        raise _write_error(path, exc) from None


def _write_error(path: Path, error: OSError) -> InvalidArgument:
    return InvalidArgument(f"{path} cannot be written: {error.strerror}", hint="name another file")


# The end of the log.


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
