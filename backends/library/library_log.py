"""Log lines of the library under a backend, with their levels and a bound on their rate.

llama.cpp has one log per process, and so has this module: `library_log`. It drops lines until a
worker process sets `write_line`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
SYSLOG_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}
"""As in sd-daemon(3)."""
LINES_MAX, WINDOW_S = 200, 10.0
"""The most lines in a window, and its seconds; loading a model logs about 150 lines."""
REPEAT_S = 60.0
"""An emitted line is not repeated for this long, because llama.cpp warns for each context of a
model, and estimating, loading and embedding create one each."""
REMEMBERED_MAX = 256


class LibraryLog:
    """Passes lines of level *least* and above to `write_line`, with their level. Thread-safe."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic):
        self.least = LEVELS["warning"]
        self.write_line: Callable[[str, str], None] | None = None
        self._seconds = seconds
        self._emitted_at: dict[str, float] = {}
        self._window_end = 0.0
        self._lines_left = self._dropped = 0

    def log_line(self, level: str, text: str) -> None:
        """Emit a line, unless it is below `least`, a recent repetition, or over the bound."""
        if self.write_line is None or LEVELS[level] < self.least:
            return
        now = self._seconds()
        if now < self._emitted_at.get(text, -REPEAT_S) + REPEAT_S:
            return
        if now >= self._window_end:
            self._window_end, self._lines_left = now + WINDOW_S, LINES_MAX
        if not self._lines_left:
            self._dropped += 1
            return
        self._lines_left -= 1
        if len(self._emitted_at) >= REMEMBERED_MAX:
            self._emitted_at.clear()
        self._emitted_at[text] = now
        if self._dropped:
            self.write_line("warning", f"{self._dropped} lines were left out")
            self._dropped = 0
        self.write_line(level, text)


library_log = LibraryLog()
