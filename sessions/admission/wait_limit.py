"""The limit of a wait by a call's timeouts."""

from __future__ import annotations

import math
from typing import NamedTuple

from ...backends.errors import Timeout


class WaitLimit(NamedTuple):
    """The earlier one of a call's timeouts, `total` or `queue`."""

    timeout: str
    seconds: float

    @classmethod
    def of(cls, timeout_s: float, queue_timeout_s: float) -> WaitLimit:
        """Return the limit by these timeouts; 0 means no timeout."""
        limits = (cls("total", timeout_s), cls("queue", queue_timeout_s))
        given = (limit for limit in limits if limit.seconds)
        return min(given, key=lambda limit: limit.seconds, default=cls("total", math.inf))

    def error(self, lacking: str, hint: str = "") -> Timeout:
        """Return the error of a call at this limit; *lacking* states why the wait has not ended."""
        name = "timeout" if self.timeout == "total" else f"{self.timeout} timeout"
        text = f"the {name} of {self.seconds:g} s has passed: {lacking}"
        return Timeout(text, hint=hint, data={"timeout": self.timeout})
