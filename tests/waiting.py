"""Waits for states of other processes, of which no event comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ("wait_until",)

SECONDS_MAX = 60.0
POLL_S = 0.002
Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found | None], seconds: float = SECONDS_MAX) -> Found:
    """Wait until *condition* returns a true value, and return it.

    The pauses leave the cores to the processes that are waited for, and to other tests.
    """
    end, pause = time.monotonic() + seconds, threading.Event()
    while not (found := condition()):
        assert time.monotonic() < end, f"the condition was not met in {seconds:g} s"
        pause.wait(POLL_S)
    return found
