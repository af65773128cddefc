"""The claim of a graph on the cores, from the share of the time in which it computes.

A computation can take a tenth of a millisecond, and there can be thousands a second. A claim for
each would take a core from a language model, and give it back, as often. So a graph claims cores
while it is busy for about half of the time, and its rarer computations run beside the other models
without a claim.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from structlog.contextvars import clear_contextvars

from ...scheduler.owner import Requester

TICK_S = 0.05
"""The interval between samples while a graph has work."""
GAIN = 0.5
"""Weight of the last sample in the share."""
BUSY_AT, FREE_AT = 0.5, 0.3
"""The shares of the time from which a graph claims cores, and below which it no longer does, as for
the cores that other programs keep busy (`cores`).
"""


class GraphClaim:
    """The computations of a graph that are under way or wait. *changed* is called when the claim or
    its users change. Lives on the daemon's event loop; a timer runs while there is work or a claim.
    """

    def __init__(self, changed: Callable[[], None], seconds: Callable[[], float] = time.monotonic):
        self._changed, self._seconds = changed, seconds
        self._requests: defaultdict[Requester, int] = defaultdict(int)
        self._seen: set[Requester] = set()
        """The requesters since the last sample."""
        self._known: set[Requester] = set()
        """The requesters whose claim it is."""
        self._is_claimed = False
        self._share = self._busy_s = 0.0
        self._counted_at = self._sampled_at = 0.0
        self._awaits_report = self._was_reported = False
        """Whether a report follows soon, and whether one has come since the last sample."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of computations."""
        return sum(self._requests.values())

    @property
    def claim(self) -> int | None:
        """The highest class of the requests, or None; see `cores.CoreUser.claim`."""
        if not self._is_claimed:
            return None
        return max((requester.priority for requester in self._known), default=None)

    @property
    def users(self) -> set[int]:
        """The users whose claim it is."""
        return {requester.owner.user for requester in self._known} if self._is_claimed else set()

    @contextmanager
    def computing(self, requester: Requester) -> Iterator[None]:
        """Count a computation in the `with` block."""
        self.begin(requester)
        try:
            yield
        finally:
            self.end(requester)

    def begin(self, requester: Requester) -> None:
        """Count a computation until `end`."""
        self._count_time()
        self._requests[requester] += 1
        self._note_requester(requester)

    def end(self, requester: Requester) -> None:
        """End the count of a computation."""
        self._count_time()
        self._requests[requester] -= 1
        if not self._requests[requester]:
            del self._requests[requester]

    def count_busy(
        self, requesters: Iterable[Requester], seconds: float, *, reports_follow: bool
    ) -> None:
        """Count the time in which computations of *requesters*, which do not pass through the
        daemon, were under way up to now. With *reports_follow*, the next call comes soon.
        """
        self._count_time()
        self._awaits_report, self._was_reported = reports_follow, True
        self._busy_s = min(self._busy_s + seconds, self._counted_at - self._sampled_at)
        for requester in requesters:
            self._note_requester(requester)

    def _note_requester(self, requester: Requester) -> None:
        self._seen.add(requester)
        if self._is_claimed and requester not in self._known:
            self._known.add(requester)
            self._changed()
        if self._timer is None:
            self._sampled_at, self._busy_s = self._counted_at, 0.0
            self._arm()

    def _count_time(self) -> None:
        now = self._seconds()
        if self._requests:
            self._busy_s += now - self._counted_at
        self._counted_at = now

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self.take_sample)

    def take_sample(self) -> None:
        """Take a sample of the share; begin or end the claim."""
        clear_contextvars()  # a timer has those of the request that set it
        self._timer = None
        if self._awaits_report and not self._was_reported:
            self._awaits_report = False  # it is awaited for one more interval
            self._arm()
            return
        self._was_reported = False
        self._count_time()
        passed_s = self._counted_at - self._sampled_at
        if passed_s > 0:
            self._share += GAIN * (self._busy_s / passed_s - self._share)
        self._sampled_at, self._busy_s = self._counted_at, 0.0
        known = self._seen | self._requests.keys()
        had_work, self._seen = bool(known), set()
        is_claimed = self._share >= (FREE_AT if self._is_claimed else BUSY_AT)
        if is_claimed or self._is_claimed:
            known = known or self._known
            if (is_claimed, known) != (self._is_claimed, self._known):
                self._is_claimed, self._known = is_claimed, known
                self._changed()
        if had_work or self._is_claimed:
            self._arm()
        else:
            self._share = 0.0
