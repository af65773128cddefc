"""Readers of the log of a daemon that logs in JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from inferd.testing import RunningDaemon

__all__ = ("Event", "events", "named")

Event = dict[str, Any]
JSON = "[daemon]\nlog-format = 'json'\n"


def events(daemon: RunningDaemon) -> list[Event]:
    """Return the events in a daemon's standard error; each line is one, if it is complete."""
    lines, _, _ = daemon.log.rpartition("\n")  # the last one may be under way
    return [msgspec.json.decode(line) for line in lines.splitlines()]


def named(daemon: RunningDaemon, *names: str) -> list[Event]:
    """Return the events with one of these names."""
    return [event for event in events(daemon) if event["event"] in names]
