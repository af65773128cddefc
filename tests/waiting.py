"""Waits for states of other processes, of which no event comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ("size_of", "wait_until")

SECONDS_MAX = 60.0
POLL_S, POLL_S_MAX = 0.002, 0.05
Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found | None], seconds: float = SECONDS_MAX) -> Found:
    """Wait until *condition* returns a true value, and return it.

    The pauses leave the cores to the processes that are waited for, and to other tests. They grow
    to a twentieth of the time waited.
    """
    begun, pause = time.monotonic(), threading.Event()
    while not (found := condition()):
        waited = time.monotonic() - begun
        assert waited < seconds, f"the condition was not met in {seconds:g} s"
        pause.wait(min(POLL_S_MAX, max(POLL_S, waited / 20)))
    return found


def size_of(file: Path) -> int:
    """Return the bytes of a file, which may come and go; 0 without it."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
