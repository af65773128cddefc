"""How right the times were that refusals told: each is compared with when there was room."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from .forecast import Ticket

RATIOS = (0.25, 0.5, 0.8, 1.25, 2.0, 4.0)
"""Upper bounds of the histogram's buckets: told by measured seconds. One more has the rest."""
OPEN_MAX = 32
"""Refusals that are followed at a time; later ones are not."""
SECONDS_MIN = 1e-3


class _Refusal(NamedTuple):
    ticket: Ticket
    at: float
    told_s: float


class Accuracy:
    """A histogram of `retry_after_s` by what it was in the end. Owned by the ledger."""

    def __init__(self) -> None:
        self.counts = [0] * (len(RATIOS) + 1)
        self.sum = 0.0
        """Of the ratios that were counted."""
        self._open: deque[_Refusal] = deque()

    def refused(self, ticket: Ticket, at: float, told_s: float) -> None:
        """Follow a refusal, unless too many are followed already."""
        if len(self._open) < OPEN_MAX:
            self._open.append(_Refusal(ticket, at, told_s))

    def moved(self, at: float, has_room: Callable[[Ticket], bool]) -> None:
        """Count those refused turns for which there is room now."""
        for refusal in [r for r in self._open if has_room(r.ticket)]:
            self._open.remove(refusal)
            ratio = refusal.told_s / max(at - refusal.at, SECONDS_MIN)
            self.counts[bisect_left(RATIOS, ratio)] += 1
            self.sum += ratio

    def histogram(self) -> dict[str, int]:
        """Return the counts by the buckets' upper bounds."""
        return dict(zip((*map(str, RATIOS), "inf"), self.counts, strict=True))
