"""Readers of the log of a daemon that logs in JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from inferd.testing import RunningDaemon

__all__ = ("Event", "events", "named", "until")

Event = dict[str, Any]
SECONDS_MAX = 20.0
JSON = "[daemon]\nlog-format = 'json'\n"


def events(daemon: RunningDaemon) -> list[Event]:
    """Return the events in a daemon's standard error; each line is one."""
    return [msgspec.json.decode(line) for line in daemon.log.splitlines()]


def named(daemon: RunningDaemon, *names: str) -> list[Event]:
    """Return the events with one of these names."""
    return [event for event in events(daemon) if event["event"] in names]


def until(condition: Callable[[], Any]) -> Any:
    """Wait until *condition* returns a true value, and return it."""
    end = time.monotonic() + SECONDS_MAX
    while not (found := condition()):
        assert time.monotonic() < end, "the condition was never met"
        time.sleep(0.005)
    return found
