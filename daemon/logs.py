"""How the daemon logs: events with fields, to standard error."""

from __future__ import annotations

import logging
import os
import sys

import structlog
from structlog.typing import EventDict

__all__ = ("configure_logging", "set_level")


_LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


class _Threshold:
    """The least level that is logged. A level that is fixed in the loggers stays in those that were
    used before.
    """

    least = logging.INFO

    def __call__(self, logger: object, method: str, event: EventDict) -> EventDict:
        """Let an event pass, or drop it."""
        if _LEVELS.get(method, logging.ERROR) < self.least:
            raise structlog.DropEvent
        return event


_threshold = _Threshold()


def set_level(level: str) -> None:
    """Log from *level* on."""
    _threshold.least = _LEVELS[level]


def configure_logging(level: str, form: str) -> None:
    """Log from *level* on, as `console` lines or `json`; `auto` is console on a terminal."""
    set_level(level)
    console = form == "console" or (form == "auto" and not os.environ.get("JOURNAL_STREAM"))
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if console:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            _threshold,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
