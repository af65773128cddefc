"""A turn ends where a regular expression matches; the match is cut off."""

from __future__ import annotations

from ....backends.incremental_regex import Matcher, Pattern, byte_size
from .condition import WITHHELD_BYTES_MAX, Stop
from .ending import StopReason


class PatternCondition:
    """One pattern. Of a match that is longer than what is withheld only the last part is cut."""

    reason = StopReason("pattern", cuts_text=True)

    def __init__(self, pattern: str):
        self._name = pattern
        self._matcher = Matcher(Pattern.cached(pattern))
        self._end = 0

    @property
    def undecided(self) -> int | None:
        """Where the text begins that may become a match."""
        pending = self._matcher.pending
        return None if pending is None else max(pending, self._end - WITHHELD_BYTES_MAX)

    def feed(self, text: str, at: int) -> Stop | None:
        """See `TextCondition.feed`."""
        found = self._matcher.feed(text, at)
        if found is None:
            self._end = at + byte_size(text)
            return None
        begin, end = found
        return Stop(end, max(begin, end - WITHHELD_BYTES_MAX), self.reason, self._name)
