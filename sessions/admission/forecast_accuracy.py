"""Accuracy of the waiting times in refusals, compared with the time until a bound had room."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .forecast import Ticket

RATIOS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Upper bounds of the histogram's buckets: predicted by measured seconds. Another has the rest."""
OPEN_MAX = 32
"""Refusals that are followed at a time; others are ignored."""
SECONDS_MIN = 1e-3


class _OpenRefusal(NamedTuple):
    ticket: Ticket
    at: float
    predicted_s: float


class ForecastAccuracy:
    """A histogram of `retry_after_s` divided by the measured time. Owned by the ledger."""

    def __init__(self) -> None:
        self.counts = [0] * (len(RATIOS) + 1)
        self.sum = 0.0
        """Sum of all ratios."""
        self._open: deque[_OpenRefusal] = deque()

    def add_refusal(self, ticket: Ticket, at: float, predicted_s: float) -> None:
        """Follow a refusal, unless `OPEN_MAX` are followed already."""
        if len(self._open) < OPEN_MAX:
            self._open.append(_OpenRefusal(ticket, at, predicted_s))

    def count_admissible(self, at: float, admits: Callable[[Ticket], bool]) -> None:
        """Count the refused turns that would be admitted now."""
        for refusal in [r for r in self._open if admits(r.ticket)]:
            self._open.remove(refusal)
            ratio = refusal.predicted_s / max(at - refusal.at, SECONDS_MIN)
            self.counts[bisect_left(RATIOS, ratio)] += 1
            self.sum += ratio

    def histogram(self) -> dict[str, int]:
        """Return the counts by the buckets' upper bounds."""
        return dict(zip((*map(str, RATIOS), "inf"), self.counts, strict=True))
