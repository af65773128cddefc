"""What the library under a backend says, line by line, for whoever runs the backend.

llama.cpp has one log a process, so there is one here, `library_log`. Nobody hears it until its
`tell` is set, as a worker process does.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
SYSLOG_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}
"""syslog's, as in sd-daemon(3)."""
LINES_MAX, WINDOW_S = 200, 10.0
"""A load says some 150 lines."""
REPEAT_S = 60.0
"""A line that was told is not told again for this long: reckoning, loading and embedding make
contexts of one model, and llama.cpp warns of each."""
REMEMBERED_MAX = 256


class Bound:
    """Lets *lines_max* lines pass in each *window_s*, and counts the others."""

    def __init__(
        self,
        lines_max: int = LINES_MAX,
        window_s: float = WINDOW_S,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self._lines_max, self._window_s, self._seconds = lines_max, window_s, seconds
        self._ends = 0.0
        self._left = self._dropped = 0

    def admit(self) -> int | None:
        """Let a line pass, and return how many were dropped before it; None: drop it, too."""
        now = self._seconds()
        if now >= self._ends:
            self._ends, self._left = now + self._window_s, self._lines_max
        if self._left <= 0:
            self._dropped += 1
            return None
        self._left -= 1
        dropped, self._dropped = self._dropped, 0
        return dropped


class LibraryLog:
    """Lines from *least* on go to `write_line`, with their level; called from any thread."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic):
        self.least = LEVELS["warning"]
        self.write_line: Callable[[str, str], None] | None = None
        self._seconds = seconds
        self._bound = Bound(seconds=seconds)
        self._told_at: dict[str, float] = {}

    def say(self, level: str, text: str) -> None:
        """Tell a line, unless it is below the level, was told just now, or is one too many."""
        if self.write_line is None or LEVELS[level] < self.least:
            return
        now = self._seconds()
        if now < self._told_at.get(text, -REPEAT_S) + REPEAT_S:
            return
        dropped = self._bound.admit()
        if dropped is None:
            return
        if len(self._told_at) >= REMEMBERED_MAX:
            self._told_at.clear()
        self._told_at[text] = now
        if dropped:
            self.write_line("warning", f"{dropped} lines were left out")
        self.write_line(level, text)


library_log = LibraryLog()
