"""The standard error of a worker process, read as log events.

Lines of the library under its backend come with a priority (`<4>`); the others are what a process
says as it dies: a failed assertion in llama.cpp, a traceback.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable

from ...backends.library_log import SYSLOG_PRIORITIES

PIPE_READ_BYTES = 1 << 16
READS_LEFT_MAX = 4
"""Reads once the process has exited: a pipe holds one read."""
STDERR_LINE_BYTES_MAX = 1 << 16
"""A line that is longer is cut up."""
EVENT_CHARACTERS_MAX = 2000
LEFT_OUT = "\n…\n"
GATHER_S = 0.2
"""Lines without a priority that come within this are one event, as those of a traceback."""
_LEVELS = {priority: level for level, priority in SYSLOG_PRIORITIES.items()}
_PRIORITY = re.compile(r"<([0-7])>")
_QUOTES = ("accepting piece:",)
"""After these llama.cpp quotes what was generated."""

LogLine = Callable[[str, str, str], None]
"""Logs a level, an event and a text."""


class WorkerLines:
    """Reads a pipe whose other end is `writer`, and calls *log_line* for each event. Lives on the
    daemon's event loop. The writer never waits: lines that the pipe has no room for are lost.
    """

    def __init__(self, log_line: LogLine):
        self._log_line = log_line
        self._rest = b""
        self._gathered = ""
        self._quoted = False
        """The lines that follow quote generated text."""
        self._timer: asyncio.TimerHandle | None = None
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def close_writer(self) -> None:
        """Leave the pipe to the process that has it now."""
        writer, self.writer = self.writer, -1
        if writer >= 0:
            os.close(writer)

    def close(self) -> None:
        """Log the rest, once the process has exited."""
        self.close_writer()
        for _ in range(READS_LEFT_MAX):  # a process that it has started may talk on for ever
            if self._reader < 0 or not self._read():
                break
        self._end()

    def _read(self) -> bool:
        """Log the lines that have come; return whether there may be more."""
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
                self._log_line(level, "llama.output", text[:EVENT_CHARACTERS_MAX])
            elif text.strip():
                self._gather(text)

    def _gather(self, line: str) -> None:
        if not self._quoted:
            kept = cut_quotes(line)
            self._quoted = kept != line
            self._gathered = _shortened(f"{self._gathered}{kept}\n")
        if self._timer is None:
            self._timer = self._loop.call_later(GATHER_S, self._log_gathered)

    def _log_gathered(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        gathered, self._gathered, self._quoted = self._gathered, "", False
        if gathered:
            self._log_line("error", "worker.output", gathered.rstrip("\n"))


def split_priority(line: str) -> tuple[str | None, str]:
    """Return the level that a line begins with, if it does, and the rest."""
    found = _PRIORITY.match(line)
    level = None if found is None else _LEVELS.get(int(found[1]))
    return (None, line) if found is None or level is None else (level, line[found.end() :])


def _shortened(text: str) -> str:
    """Return a text that is not too long: a failed assertion begins it, a traceback's error ends
    it.
    """
    if len(text) <= EVENT_CHARACTERS_MAX:
        return text
    half = (EVENT_CHARACTERS_MAX - len(LEFT_OUT)) // 2
    return text[:half] + LEFT_OUT + text[-half:]


def cut_quotes(text: str) -> str:
    """Return *text* up to where it quotes what was generated."""
    for mark in _QUOTES:
        before, found, _ = text.partition(mark)
        text = before + found
    return text
