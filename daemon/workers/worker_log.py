"""The log of one worker process: the events that it sends, and its standard error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from ...backends.library_log import LEVELS
from ...scheduler import messages as m
from ..logs.setup import logs
from .worker_stderr import WorkerLines

log = structlog.get_logger()


class WorkerLog:
    """Logs the events with the *fields* of the process. Lives on the daemon's event loop."""

    def __init__(self, fields: Callable[[], dict[str, Any]]):
        self._fields = fields
        self._lines = WorkerLines(self._log_line)
        self._levels = logs.for_workers()

    @property
    def writer(self) -> int:
        """The descriptor that becomes the standard error of the process."""
        return self._lines.writer

    def close_writer(self) -> None:
        """Leave the descriptor to the process."""
        self._lines.close_writer()

    def read_levels(self) -> tuple[m.Logging, bool]:
        """Return the levels in force, and whether they have changed since the last time."""
        before, self._levels = self._levels, logs.for_workers()
        return self._levels, self._levels != before

    def log_event(self, level: str, event: str, room: str, fields: dict[str, Any]) -> None:
        """Log an event of the process."""
        logged = {**fields, "room": room, **self._fields()}
        log.log(LEVELS.get(level, LEVELS["error"]), event, **logged)

    def close(self) -> None:
        """Log the rest of its standard error, once the process has exited."""
        self._lines.close()

    def _log_line(self, level: str, event: str, text: str) -> None:
        self.log_event(level, event, "llama", {"text": text})
