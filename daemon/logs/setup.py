"""How the daemon logs: events with fields, from a level on that each room has, to a file, to
systemd's journal, or to standard error.

One of it a process. Owned by the daemon's event loop; before that runs, by the thread that starts
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

from ...backends.library_log import LEVELS, SYSLOG_PRIORITIES
from ...scheduler import messages as m
from ..config.log_levels import ROOMS
from ..config.settings import Config
from .log_file import LogFile
from .stderr import StandardError

DEFAULT_ROOM = "daemon"
WORKER_ROOMS = ("scheduler", "backends", "llama")
"""Those that a worker process has events of."""
LIBRARY_CHARACTERS_MAX = 2000
"""Of what a Python library logs."""
JOURNAL_BYTES_MAX = 47_000
"""Of an event that goes to the journal: past `LineMax=` (48 KiB) that cuts a line in two."""
_FIRST_FIELDS = ("timestamp", "level", "room", "event")
_CONTROLS = {c: None for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\t\n"}
_STDERR = 2


class Logs:
    """The levels in force, and where events go; `apply_config` takes them from a configuration."""

    def __init__(self) -> None:
        self.texts = False
        """Prompts and answers are logged, too."""
        self.in_journal = False
        """Standard error is the journal's."""
        self._note_file: Callable[[str | None], None] = lambda _: None
        self._levels = dict.fromkeys(ROOMS, "info")
        self._least = dict.fromkeys(ROOMS, LEVELS["info"])
        self._file: LogFile | None = None
        self._stderr: StandardError
        self._lost = 0
        """Events that found no room there since the last one that did."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner = threading.get_ident()
        self._terminal = False
        self._console: Processor | None = None
        self._json = structlog.processors.JSONRenderer()

    def configure(self, config: Config, note_file: Callable[[str | None], None]) -> None:
        """Log as *config* says from now on, including the log of Python's libraries. *note_file*
        gets the reason why the log file cannot be written, or None when it can again.
        """
        self._note_file = note_file
        self._stderr, self._terminal = StandardError(_STDERR), os.isatty(_STDERR)
        self.in_journal = is_journal(os.environ, _STDERR)
        console = config.log_format == "console"
        if config.log_format == "auto":
            console = not self.in_journal
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
        """Call *log* in the owner's thread, from any thread; soon, if that is another one."""
        if self._loop is None or threading.get_ident() == self._owner:
            log()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon has ended
                self._loop.call_soon_threadsafe(log)

    def apply_config(self, config: Config) -> None:
        """Let the levels, the file and the rest of *config* hold."""
        self.texts = config.log_text
        self.set_levels(dict.fromkeys(ROOMS, config.log_level) | config.log_levels)
        path = None if self._file is None else self._file.path
        if path == config.log_file:
            return
        if self._file is not None:
            self._file.close()
            self._note_file(None)
        path = config.log_file
        self._file = None if path is None else LogFile(path, self._note_file)

    def set_levels(self, levels: Mapping[str, str]) -> None:
        """Log from these levels on in the rooms that *levels* names."""
        self._levels |= levels
        self._least = {room: LEVELS[level] for room, level in self._levels.items()}

    def reopen_file(self) -> None:
        """Open the file again, after a rotation."""
        if self._file is not None:
            self._file.reopen()

    @property
    def levels(self) -> dict[str, str]:
        """The least level that is logged, by room."""
        return dict(self._levels)

    def is_logged(self, room: str, level: str) -> bool:
        """Whether an event would be logged: for frequent events that are usually not logged."""
        return LEVELS[level] >= self._least[room]

    def for_workers(self) -> m.Logging:
        """Return what a worker is to log."""
        levels = {room: self._levels[room] for room in WORKER_ROOMS}
        return m.Logging(levels, self.texts)

    def describe(self) -> dict[str, Any]:
        """Return where the log is and what is in it, for `stats`."""
        return {
            "file": None if self._file is None else str(self._file.path),
            "journal": journal_of(_own_cgroup()) if self.in_journal else None,
            "levels": self.levels,
            "texts": self.texts,
        }

    def _pass_or_drop(self, logger: object, method: str, event: EventDict) -> EventDict:
        room = event.setdefault("room", DEFAULT_ROOM)
        if LEVELS.get(method, LEVELS["error"]) < self._least.get(room, 0):
            raise structlog.DropEvent
        return event

    def _write(self, event: EventDict) -> None:
        """Write an event to the file; to standard error where there is none, where it cannot be
        written, or where somebody sits before it.
        """
        if self._file is not None:
            data = _bytes(self._json(None, "", dict(event)))
            if self._file.write(data) and not self._terminal:
                return
        data = self._line(event)
        if self._lost:
            data = self._line(_loss(event, self._lost)) + data
        self._lost = 0 if self._stderr.write(data) else self._lost + 1

    def _line(self, event: EventDict) -> bytes:
        """Return the line that an event is in standard error."""
        if self._console is not None:
            return _bytes(self._console(None, "", _for_terminal(event)))
        if self.in_journal:
            return _bytes(f"<{SYSLOG_PRIORITIES.get(event['level'], 3)}>{self._whole(event)}")
        return _bytes(self._json(None, "", event))

    def _whole(self, event: EventDict) -> str:
        """Return an event as a line that the journal does not cut in two: as JSON of
        `JOURNAL_BYTES_MAX` at most, with texts that are too long for that cut.
        """
        line = str(self._json(None, "", event))
        characters = JOURNAL_BYTES_MAX
        while len(line) > JOURNAL_BYTES_MAX and characters:  # ASCII alone: a byte a character
            characters //= 2
            cut = {k: v[:characters] if isinstance(v, str) else v for k, v in event.items()}
            line = str(self._json(None, "", cut))
        return line


logs = Logs()


class _Sink:
    """The logger that structlog passes events to: one method a level."""

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
        self._owner.call_in_owner(partial(log, "library.said", **fields))


def _hand_over(
    _logger: object, _method: str, event: EventDict
) -> tuple[tuple[Any], dict[str, Any]]:
    """Pass the event itself to the sink, with the fields of all events first."""
    head = {key: event.pop(key) for key in _FIRST_FIELDS if key in event}
    return ({**head, **event},), {}


def _console(terminal: bool) -> Processor:
    colors = terminal and not os.environ.get("NO_COLOR")
    # A formatter of structlog's own choice shows local variables, and in them what users wrote.
    return structlog.dev.ConsoleRenderer(
        colors=colors, exception_formatter=structlog.dev.plain_traceback
    )


def _for_terminal(event: EventDict) -> EventDict:
    """Return an event as the console shows it: its room as the logger's name, and no character
    that could steer the terminal, of what clients have sent.
    """
    shown = {k: v.translate(_CONTROLS) if isinstance(v, str) else v for k, v in event.items()}
    shown["logger"] = shown.pop("room")
    return shown


def _loss(event: EventDict, count: int) -> EventDict:
    """Return the event that reports, before *event*, how many events were not written."""
    head = {"timestamp": event["timestamp"], "level": "warning", "room": DEFAULT_ROOM}
    return {**head, "event": "log.lost", "events": count}


def _bytes(line: Any) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def is_journal(environ: Mapping[str, str], descriptor: int) -> bool:
    """Return whether a descriptor is the journal's: systemd names its device and inode."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _own_cgroup() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/cgroup").read_text()
    return ""


def journal_of(cgroup: str) -> dict[str, Any]:
    """Return the unit whose journal is written, and whether it is a user's, by /proc/self/cgroup;
    where that names none, the daemon's process.
    """
    for line in cgroup.splitlines():
        path = line.rpartition(":")[2]
        unit = path.rpartition("/")[2]
        if unit.endswith(".service"):
            return {"unit": unit, "user": "/user@" in path}
    return {"unit": None, "user": False}
