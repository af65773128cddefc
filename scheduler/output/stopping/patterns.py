"""The condition that a regular expression matches; the match is cut off."""

from __future__ import annotations

from ....backends.incremental_regex import Matcher, Pattern, byte_size
from .condition import WITHHELD_BYTES_MAX, Stop
from .ending import StopReason


class PatternCondition:
    """One pattern. If a match is longer than the withheld text, only its last part is cut."""

    reason = StopReason("pattern", cuts_text=True)

    def __init__(self, pattern: str):
        self._name = pattern
        self._matcher = Matcher(Pattern.cached(pattern))
        self._end = 0

    @property
    def undecided(self) -> int | None:
        """The beginning of the text that may become a match."""
        pending = self._matcher.pending
        return None if pending is None else max(pending, self._end - WITHHELD_BYTES_MAX)

    def check_text(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.check_text`."""
        found = self._matcher.feed(text, at)
        if found is None:
            self._end = at + byte_size(text)
            return None
        begin, end = found
        return Stop(end, max(begin, end - WITHHELD_BYTES_MAX), self.reason, self._name)
