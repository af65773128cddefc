"""A bound on events that one user can cause at will, so that no user can fill the log."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

EVENTS_MAX = 20
"""Events of one user that are logged per `INTERVAL_S`."""
INTERVAL_S = 60.0
_USERS_MAX = 4096
"""Users whose events are counted; the longest idle one is forgotten first."""


@dataclass
class _Interval:
    begin_s: float
    events: int = 0


class RepeatLimit:
    """The number of recent events by user. Decisions are synchronous."""

    def __init__(self) -> None:
        self._intervals: OrderedDict[int, _Interval] = OrderedDict()

    def count_event(self, uid: int, now_s: float) -> int | None:
        """Count an event. Return how many events of the user were omitted since the last logged
        one, or None if this one must be omitted, too.
        """
        interval = self._intervals.pop(uid, None) or _Interval(now_s)
        omitted = 0
        if now_s >= interval.begin_s + INTERVAL_S:
            omitted = max(0, interval.events - EVENTS_MAX)
            interval = _Interval(now_s)
        interval.events += 1
        self._intervals[uid] = interval
        if len(self._intervals) > _USERS_MAX:
            self._intervals.popitem(last=False)
        return None if interval.events > EVENTS_MAX else omitted
