"""Looking at what may never answer, as a folder on a network that is gone: each look has a thread
of its own, and a bound on its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

LOOK_S_MAX = 5.0

T = TypeVar("T")


class Unseen(Exception):
    """Something could not be looked at, or not in time."""


class Look(Generic[T]):
    """Looks at something from now on, for *seconds* at most."""

    def __init__(self, look: Callable[[], T], seconds: float = LOOK_S_MAX):
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._done = threading.Event()
        self._seen: list[T] = []
        self._error: Exception | None = None
        # A daemon thread: one that never ends does not keep the process.
        threading.Thread(target=self._run, args=(look,), daemon=True).start()

    def _run(self, look: Callable[[], T]) -> None:
        try:
            self._seen.append(look())
        except Exception as exc:  # whatever one look meets, the others go on
            self._error = exc
        finally:
            self._done.set()

    def facts(self) -> T:
        """Return what was seen.

        :raises Unseen: nothing, for the reason that it says.
        """
        if not self._done.wait(max(0.0, self._until - time.monotonic())):
            raise Unseen(f"no answer within {self._seconds:g} s")
        if self._error is not None:
            raise Unseen(_told(self._error)) from self._error
        return self._seen[0]


def _told(error: Exception) -> str:
    if isinstance(error, Unseen):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
