"""Durations of actions, of which other programs of the machine may delay some."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ("check_duration",)

ATTEMPTS = 8


def check_duration(seconds_max: float, action: Callable[[], object]) -> None:
    """Check that *action* takes less than *seconds_max*. It is repeated if it takes longer, and one
    short time is enough.
    """
    durations: list[float] = []
    while not durations or (durations[-1] >= seconds_max and len(durations) < ATTEMPTS):
        began = time.monotonic()
        action()
        durations.append(time.monotonic() - began)
    assert durations[-1] < seconds_max, durations
