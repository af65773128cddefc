"""The log of one worker process: the events that it sends, and its standard error.

Lines that its backend's library logs begin with a priority (`<4>`). The other lines are the last
output of a dying process, such as a failed assertion in llama.cpp or a traceback.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from typing import Any

import structlog

from ...backends.library import LEVELS, SYSLOG_PRIORITIES
from ...scheduler import messages as m
from ..logs.setup import logs

PIPE_READ_BYTES = 1 << 16
READS_AFTER_EXIT_MAX = 4
"""Reads after the process has exited; one read empties a full pipe."""
STDERR_LINE_BYTES_MAX = 1 << 16
"""A longer line is split."""
EVENT_CHARACTERS_MAX = 2000
LEFT_OUT = "\n…\n"
GATHER_S = 0.2
"""Lines without a priority that arrive within this time are one event, such as a traceback."""
_LEVELS = {priority: level for level, priority in SYSLOG_PRIORITIES.items()}
_PRIORITY = re.compile(r"<([0-7])>")
_QUOTES = ("accepting piece:",)
"""llama.cpp quotes generated text after these words."""

LogLine = Callable[[str, str, str], None]
"""Logs a level, an event and a text."""
log = structlog.get_logger()


class WorkerLines:
    """Reads a pipe whose other end is `writer`, and calls *log_line* for each event. Lives on the
    daemon's event loop. The writer never waits: lines that do not fit into the pipe are lost.
    """

    def __init__(self, log_line: LogLine):
        self._emit = log_line
        self._rest = b""
        self._gathered = ""
        self._quoted = False
        """The next lines quote generated text."""
        self._timer: asyncio.TimerHandle | None = None
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def close_writer(self) -> None:
        """Close our copy of the pipe's writing end."""
        writer, self.writer = self.writer, -1
        if writer >= 0:
            os.close(writer)

    def close(self) -> None:
        """Log the rest, once the process has exited."""
        self.close_writer()
        for _ in range(READS_AFTER_EXIT_MAX):  # a child of the process may write forever
            if self._reader < 0 or not self._read():
                break
        self._end()

    def _read(self) -> bool:
        """Log the lines that have arrived; return whether there may be more."""
        try:
            data = os.read(self._reader, PIPE_READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > STDERR_LINE_BYTES_MAX:
            lines, self._rest = [*lines, self._rest], b""
        self._log_lines(lines)
        return True

    def _end(self) -> None:
        if self._reader >= 0:
            self._loop.remove_reader(self._reader)
            os.close(self._reader)
            self._reader = -1
        rest, self._rest = self._rest, b""
        self._log_lines([rest])
        self._log_gathered()

    def _log_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            level, text = split_priority(line.decode("utf-8", "replace"))
            if level is not None:
                self._emit(level, "llama.output", text[:EVENT_CHARACTERS_MAX])
            elif text.strip():
                self._gather(text)

    def _gather(self, line: str) -> None:
        if not self._quoted:
            own = cut_quotes(line)
            self._quoted = own != line
            self._gathered = _shortened(f"{self._gathered}{own}\n")
        if self._timer is None:
            self._timer = self._loop.call_later(GATHER_S, self._log_gathered)

    def _log_gathered(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered, self._quoted = self._gathered, "", False
        if gathered:
            self._emit("error", "worker.output", gathered.rstrip("\n"))


class WorkerLog(WorkerLines):
    """Logs the events and the standard error of a process, with its *fields*."""

    def __init__(self, fields: Callable[[], dict[str, Any]]):
        super().__init__(self._log_line)
        self._fields = fields
        self._levels = logs.for_workers()

    def read_levels(self) -> tuple[m.Logging, bool]:
        """Return the levels in force, and whether they have changed since the last call."""
        previous, self._levels = self._levels, logs.for_workers()
        return self._levels, self._levels != previous

    def log_event(self, level: str, event: str, logger: str, fields: dict[str, Any]) -> None:
        """Log an event of the process."""
        logged = {**fields, "logger": logger, **self._fields()}
        log.log(LEVELS.get(level, LEVELS["error"]), event, **logged)

    def _log_line(self, level: str, event: str, text: str) -> None:
        self.log_event(level, event, "llama", {"text": text})


def split_priority(line: str) -> tuple[str | None, str]:
    """Return the level of a line's priority (None without one), and the rest of the line."""
    found = _PRIORITY.match(line)
    level = None if found is None else _LEVELS.get(int(found[1]))
    return (None, line) if found is None or level is None else (level, line[found.end() :])


def _shortened(text: str) -> str:
    """Return *text*, or its start and end if it is too long, because a failed assertion is at the
    start, and a traceback's error at the end.
    """
    if len(text) <= EVENT_CHARACTERS_MAX:
        return text
    half = (EVENT_CHARACTERS_MAX - len(LEFT_OUT)) // 2
    return text[:half] + LEFT_OUT + text[-half:]


def cut_quotes(text: str) -> str:
    """Return *text* up to the place where it quotes generated text."""
    for mark in _QUOTES:
        before, found, _ = text.partition(mark)
        text = before + found
    return text
