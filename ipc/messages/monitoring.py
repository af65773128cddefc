"""Messages of calls on the daemon itself: lists, statistics, log levels, draining."""

from __future__ import annotations

from typing import Any

from .base import Map

__all__ = (
    "DrainParams",
    "LogLevelParams",
    "LogLevelResult",
    "QueueParams",
    "QueueResult",
    "SessionsParams",
    "SessionsResult",
    "StatsResult",
)


class SessionsParams(Map):
    """`sessions`; `dormant` adds those that sleep under their id, `all` shows an operator those of
    all users.
    """

    dormant: bool = False
    all: bool = False


class SessionsResult(Map):
    """One map a session."""

    sessions: list[dict[str, Any]]


class QueueParams(Map):
    """`queue`; `all` shows an operator the tasks of all users."""

    all: bool = False


class QueueResult(Map):
    """One map a task that waits or runs."""

    tasks: list[dict[str, Any]]


class StatsResult(Map):
    """The daemon's figures."""

    stats: dict[str, Any]


class LogLevelParams(Map):
    """`log_level`: levels by logger, from now on."""

    levels: dict[str, str] = {}


class LogLevelResult(Map):
    """The least level that is logged, by logger."""

    levels: dict[str, str]


class DrainParams(Map):
    """`drain`: finish what runs, take nothing new; with `stop` the daemon then ends."""

    stop: bool = False
