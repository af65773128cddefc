"""Waits for the other end of a channel without giving up the core, while such waits are short."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", float, float | None)

SPIN_S = 4e-4
"""The longest wait that spins. Each wakeup of a thread that has blocked takes 30 to 50 us, and the
caches of its core may have lost what it needs: small calls take about half as long without them.
"""
SHORT_WAITS_MIN = 2
"""With one, each long wait would spin where short and long ones alternate."""
AWAY_S = 1e-4
"""A thread that was away for so long shares its core with another one, and ends its spinning."""


class Spinning:
    """The waits for one other end.

    A wait spins if the `SHORT_WAITS_MIN` before it were short: after a series of short ones, one
    spins in vain. Other threads of its session that have to run on the core go first.
    """

    def __init__(self) -> None:
        self._short_waits = 0
        """The short waits since the last other one."""

    def poll(self, poll: Callable[[T], list[tuple[int, int]]], timeout: T) -> list[tuple[int, int]]:
        """Return what *poll*, a method of `select.poll` or `select.epoll`, returns by *timeout*,
        in its unit, or up to `SPIN_S` later.
        """
        if timeout == 0:
            return poll(timeout)
        began = now = time.monotonic()
        spins = self._short_waits >= SHORT_WAITS_MIN
        if spins:
            while now < began + SPIN_S:
                if found := poll(0):
                    return found
                os.sched_yield()
                before, now = now, time.monotonic()
                if now > before + AWAY_S:
                    break
        found = poll(timeout)
        is_short = not spins and time.monotonic() < began + SPIN_S
        self._short_waits = self._short_waits + 1 if is_short else 0
        return found
