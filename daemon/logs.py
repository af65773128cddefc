"""How the daemon logs: events with fields, to standard error."""

from __future__ import annotations

import logging
import os
import sys

import structlog

__all__ = ("configure_logging",)


def configure_logging(level: str, form: str) -> None:
    """Log from *level* on, as `console` lines or `json`; `auto` is console on a terminal."""
    console = form == "console" or (form == "auto" and not os.environ.get("JOURNAL_STREAM"))
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if console:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=False),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
