"""The daemon's log: events with fields, filtered by a level per logger, written to a file, to
systemd's journal, or to standard error.

A process has one log, `logs`. The daemon's event loop owns it; before the loop runs, the thread
that starts the daemon does. One thread writes, and owns the destinations.

`LogFile` also serves spans. Like `logging.handlers.WatchedFileHandler` it checks before each line
whether the open file is still the one at its path, since it may be moved or removed. It has no
buffer: a line that a full disk refused is not written later.

`StandardError` writes without waiting for its reader. A reader may stop: a terminal by Ctrl-S, a
pager at the end of a page, a journal that hangs. A wait for it would block the daemon's event loop
and with it all clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from ...backends.library import LEVELS, SYSLOG_PRIORITIES
from ...backends.recent_dict import RecentDict
from ...scheduler import messages as m
from ..config.forms import LOGGERS
from ..config.settings import Config
from ..printable import are_colors_wanted, escape_controls

_FILE_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""With O_NONBLOCK, opening a pipe without a reader fails instead of waiting."""
_FILE_MODE = 0o600
_CLOSED = -1
_STDERR_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class LogFile:
    """A file of at most *bytes_max* bytes, opened with its first line. *on_change* is called with
    the cause when `write_line` begins to fail, and with None when it works again.

    With *rotates*, a full file is renamed to `previous_file`, where it replaces an older file, and
    a new one begins.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[str | None], None] = lambda _: None,
        *,
        bytes_max: int | None = None,
        rotates: bool = False,
    ):
        self.path, self.bytes_max, self._rotates = path, bytes_max, rotates
        self.cause: str | None = None
        """The reason why the last line was not written, or None."""
        self._on_change = on_change
        self._file = _CLOSED
        self._status: os.stat_result | None = None
        self._torn = False

    def write_line(self, line: bytes) -> bool:
        """Append a line; return whether it was written."""
        try:
            self.append_lines(line)
        except OSError as exc:
            self._note(f"{self.path}: {exc.strerror}")
            return False
        self._note(None)
        return True

    def reopen(self) -> None:
        """Close the file, which was moved or will be; the next line opens its path again."""
        file, self._file = self._file, _CLOSED
        if file != _CLOSED:
            with contextlib.suppress(OSError):  # each write has reported its own failure
                os.close(file)

    close = reopen

    def append_lines(self, lines: bytes) -> None:
        """Append whole lines.

        :raises OSError: the lines were not written, or only in part; the next append starts a new
            line.
        """
        if not self._is_current():
            self.reopen()
            self._open()
        data = b"\n" + lines if self._torn else lines
        self._make_space(len(data))
        while data:
            written = os.write(self._file, data)
            data = data[written:]
            self._torn = bool(data)

    def _make_space(self, more: int) -> None:
        size = os.fstat(self._file).st_size
        if self.bytes_max is None or size + more <= self.bytes_max:
            return
        if not self._rotates:
            raise OSError(errno.EFBIG, f"has reached its limit of {self.bytes_max} bytes")
        if size:  # a single line may be longer than the limit
            os.replace(self.path, previous_file(self.path))
            self.reopen()
            self._open()

    def _is_current(self) -> bool:
        if self._status is None or self._file == _CLOSED:
            return False
        try:
            return os.path.samestat(os.stat(self.path), self._status)
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        self._file = os.open(self.path, _FILE_FLAGS, _FILE_MODE)
        previous, self._status = self._status, os.fstat(self._file)
        if previous is None or not os.path.samestat(previous, self._status):
            self._torn = False

    def _note(self, cause: str | None) -> None:
        previous, self.cause = self.cause, cause
        if (previous is None) != (cause is None):
            self._on_change(cause)


def previous_file(path: Path) -> Path:
    """Return the path to which a full log file is renamed."""
    return path.with_name(f"{path.name}.1")


class StandardError:
    """Writes to *descriptor*.

    Other programs share the descriptor, such as a shell its terminal. So it is not made
    non-blocking, but opened again, or written with `MSG_DONTWAIT`.
    """

    def __init__(self, descriptor: int = 2):
        self._socket: socket.socket | None = None
        self._opened = -1
        self._send = self._sender(descriptor)
        self._rest = b""
        """The unwritten rest of an event, which is written before the next event."""

    def _sender(self, descriptor: int) -> Callable[[bytes], int]:
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISSOCK(mode):
                self._socket = own = socket.socket(fileno=os.dup(descriptor))
                return lambda data: own.send(data, socket.MSG_DONTWAIT)
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                self._opened = os.open(f"/proc/self/fd/{descriptor}", _STDERR_FLAGS)
                return partial(os.write, self._opened)
        except OSError:  # it belongs to another user, or /proc is missing
            pass
        return partial(os.write, descriptor)

    def write(self, data: bytes) -> bool:
        """Write *data*, its end perhaps before the next event; return False if none was written."""
        try:
            if not self._drain():
                return False
            self._rest = data
            if not self._drain() and len(self._rest) == len(data):
                self._rest = b""
                return False
        except OSError:  # its reader has closed it, or the disk is full
            self._rest = b""
            return False
        return True

    def _drain(self) -> bool:
        """Write the rest as far as possible; return whether all of it is written."""
        while self._rest:
            try:
                self._rest = self._rest[self._send(self._rest) :]
            except BlockingIOError:
                return False
        return True

    def close(self) -> None:
        """Close the additional descriptor or socket."""
        if self._socket is not None:
            self._socket.close()
        if self._opened >= 0:
            os.close(self._opened)


EVENTS_MAX = 20
"""Events of one user that are logged per `INTERVAL_S`."""
INTERVAL_S = 60.0
_USERS_MAX = 4096
"""Users whose events are counted; the longest idle one is forgotten first."""


@dataclass
class _Interval:
    begin_s: float
    events: int = 0


class RepeatLimit:
    """The number of recent events by user: a bound on events that one user can cause at will, so
    that no user can fill the log. Decisions are synchronous.
    """

    def __init__(self) -> None:
        self._intervals = RecentDict[int, _Interval](_USERS_MAX)

    def count_event(self, uid: int, now_s: float) -> int | None:
        """Count an event. Return how many events of the user were omitted since the last logged
        one, or None if this one must be omitted, too.
        """
        interval = self._intervals.get(uid) or _Interval(now_s)
        omitted = 0
        if now_s >= interval.begin_s + INTERVAL_S:
            omitted = max(0, interval.events - EVENTS_MAX)
            interval = _Interval(now_s)
        interval.events += 1
        self._intervals[uid] = interval
        return None if interval.events > EVENTS_MAX else omitted


DEFAULT_LOGGER = "daemon"
WORKER_LOGGERS = ("scheduler", "backends", "llama")
"""The loggers of a worker process's events."""
LIBRARY_CHARACTERS_MAX = 2000
"""The most characters of a Python library's log text."""
SYSTEMD_JOURNAL_BYTES_MAX = 47_000
"""Maximum of bytes of an event: systemd's journal splits lines above `LineMax=` (48 KiB)."""
_FIRST_FIELDS = ("timestamp", "level", "logger", "event")
_STDERR = 2


class Logs:
    """The levels in force and the destinations of events; `apply_config` sets both."""

    def __init__(self) -> None:
        self.texts = False
        """Whether prompts and answers are logged, too."""
        self.to_systemd_journal = False
        """Whether standard error goes to systemd's journal."""
        self._note_file: Callable[[str | None], None] = lambda _: None
        self._levels = dict.fromkeys(LOGGERS, "info")
        self._thresholds = dict.fromkeys(LOGGERS, LEVELS["info"])
        self._file: LogFile | None = None
        self._stderr: StandardError
        self._lost = 0
        """Events that standard error did not accept since the last one that it accepted."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner = threading.get_ident()
        self._terminal = False
        self._console: Processor | None = None
        self._json = structlog.processors.JSONRenderer()

    def configure(self, config: Config, note_file: Callable[[str | None], None]) -> None:
        """Log by *config* from now on, including the log of Python's libraries. *note_file* gets
        the cause when the log file cannot be written, and None when it can again.
        """
        self._note_file = note_file
        self._stderr, self._terminal = StandardError(_STDERR), os.isatty(_STDERR)
        self.to_systemd_journal = is_systemd_journal(os.environ, _STDERR)
        by_default = "json" if self.to_systemd_journal else "console"
        console = (config.log_format if config.log_format != "auto" else by_default) == "console"
        self._console = _console(self._terminal) if console else None
        self.apply_config(config)
        structlog.configure(
            processors=[
                self._pass_or_drop,
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                _hand_over,
            ],
            wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
            logger_factory=lambda *_: _Sink(self._write),
            cache_logger_on_first_use=True,
        )
        logging.basicConfig(handlers=[LibraryHandler(self)], level=logging.WARNING, force=True)

    def bind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make *loop*, which runs in this thread, the owner from now on."""
        self._loop, self._owner = loop, threading.get_ident()

    def call_in_owner(self, log: Callable[[], object]) -> None:
        """Call *log* in the owner's thread: at once from that thread, soon from another."""
        if self._loop is None or threading.get_ident() == self._owner:
            log()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                self._loop.call_soon_threadsafe(log)

    def apply_config(self, config: Config) -> None:
        """Use the levels, the file and the other log settings of *config*."""
        self.texts = config.log_text
        self.set_levels(dict.fromkeys(LOGGERS, config.log_level) | config.log_levels)
        path, bytes_max = config.log_file, config.log_file_bytes_max or None
        if self._file is not None and path == self._file.path:
            self._file.bytes_max = bytes_max
            return
        if self._file is not None:
            self._file.close()
            self._note_file(None)
            self._file = None
        if path is not None:
            self._file = LogFile(path, self._note_file, bytes_max=bytes_max, rotates=True)

    def set_levels(self, levels: Mapping[str, str]) -> None:
        """Set the lowest logged level of the loggers in *levels*."""
        self._levels |= levels
        self._thresholds = {logger: LEVELS[level] for logger, level in self._levels.items()}

    def reopen_file(self) -> None:
        """Reopen the file after a rotation."""
        if self._file is not None:
            self._file.reopen()

    @property
    def levels(self) -> dict[str, str]:
        """The lowest level that is logged, by logger."""
        return dict(self._levels)

    def is_logged(self, logger: str, level: str) -> bool:
        """Return whether an event would be logged, to check before frequent events."""
        return LEVELS[level] >= self._thresholds[logger]

    def for_workers(self) -> m.Logging:
        """Return the levels and settings for a worker."""
        levels = {logger: self._levels[logger] for logger in WORKER_LOGGERS}
        return m.Logging(levels, self.texts)

    def describe(self) -> dict[str, Any]:
        """Return the destinations, the levels and whether texts are logged, for `stats`."""
        return {
            "file": None if self._file is None else str(self._file.path),
            "journal": systemd_journal_of(_own_cgroup()) if self.to_systemd_journal else None,
            "levels": self.levels,
            "texts": self.texts,
        }

    def _pass_or_drop(self, _: object, method: str, event: EventDict) -> EventDict:
        event.setdefault("logger", event.pop("logger_name", DEFAULT_LOGGER))
        logger: str = event["logger"]
        if LEVELS.get(method, LEVELS["error"]) < self._thresholds.get(logger, 0):
            raise structlog.DropEvent
        return event

    def _write(self, event: EventDict) -> None:
        """Write an event to the file; write it to standard error if there is no file, the file
        fails, or standard error is a terminal.
        """
        if self._file is not None:
            data = _bytes(self._json(None, "", dict(event)))
            if self._file.write_line(data) and not self._terminal:
                return
        data = self._stderr_line(event)
        if self._lost:
            data = self._stderr_line(_loss_event(event, self._lost)) + data
        self._lost = 0 if self._stderr.write(data) else self._lost + 1

    def _stderr_line(self, event: EventDict) -> bytes:
        """Return an event as a line for standard error."""
        if self._console is not None:
            return _bytes(self._console(None, "", _for_terminal(event)))
        if self.to_systemd_journal:
            return _bytes(
                f"<{SYSLOG_PRIORITIES.get(event['level'], 3)}>{self._systemd_journal_line(event)}"
            )
        return _bytes(self._json(None, "", event))

    def _systemd_journal_line(self, event: EventDict) -> str:
        """Return an event as JSON of at most `SYSTEMD_JOURNAL_BYTES_MAX`; longer texts are cut."""
        line = str(self._json(None, "", event))
        characters = SYSTEMD_JOURNAL_BYTES_MAX
        while len(line) > SYSTEMD_JOURNAL_BYTES_MAX and characters:  # ASCII: one byte per character
            characters //= 2
            cut = {k: v[:characters] if isinstance(v, str) else v for k, v in event.items()}
            line = str(self._json(None, "", cut))
        return line


logs = Logs()


class _Sink:
    """The logger to which structlog passes events, with one method per level."""

    def __init__(self, write: Callable[[EventDict], None]):
        self.debug = self.info = self.warning = self.error = self.critical = write


class LibraryHandler(logging.Handler):
    """Logs the records of Python's libraries, such as asyncio's, from any of their threads."""

    def __init__(self, owner: Logs):
        super().__init__()
        self._owner = owner

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record."""
        level = "error" if record.levelno >= logging.ERROR else "warning"
        text = record.getMessage()[:LIBRARY_CHARACTERS_MAX]
        log = getattr(structlog.get_logger(), level)
        fields = {"source": record.name, "text": text, "exc_info": record.exc_info}
        self._owner.call_in_owner(partial(log, "library.output", **fields))


def _hand_over(
    _logger: object, _method: str, event: EventDict
) -> tuple[tuple[Any], dict[str, Any]]:
    """Pass the event to the sink as one dict that begins with the fields of all events."""
    head = {key: event.pop(key) for key in _FIRST_FIELDS if key in event}
    return ({**head, **event},), {}


def _console(terminal: bool) -> Processor:
    colors = terminal and are_colors_wanted()
    # structlog's default formatter shows local variables, which contain users' texts.
    return structlog.dev.ConsoleRenderer(
        colors=colors, exception_formatter=structlog.dev.plain_traceback
    )


def _for_terminal(event: EventDict) -> EventDict:
    """Return an event for the console, whose texts users could have chosen."""
    return {k: escape_controls(v) if isinstance(v, str) else v for k, v in event.items()}


def _loss_event(event: EventDict, count: int) -> EventDict:
    """Return an event, dated like *event*, that reports how many events were lost before it."""
    head = {"timestamp": event["timestamp"], "level": "warning", "logger": DEFAULT_LOGGER}
    return {**head, "event": "log.lost", "events": count}


def _bytes(line: Any) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def is_systemd_journal(environ: Mapping[str, str], descriptor: int) -> bool:
    """Return whether *descriptor* has the device and inode that systemd names for its journal."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _own_cgroup() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/cgroup").read_text()
    return ""


def systemd_journal_of(cgroup: str) -> dict[str, Any]:
    """Return the unit under which the journal keeps the log, and whether it is a user's unit.

    *cgroup* is the text of /proc/self/cgroup. The unit is None outside a service.
    """
    for line in cgroup.splitlines():
        path = line.rpartition(":")[2]
        unit = path.rpartition("/")[2]
        if unit.endswith(".service"):
            return {"unit": unit, "user": "/user@" in path}
    return {"unit": None, "user": False}
