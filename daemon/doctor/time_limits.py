"""Probes with a time limit, for operations that may never return, such as a lost network folder.

Each probe has its own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

PROBE_S_MAX = 5.0

T = TypeVar("T")


class ProbeFailed(Exception):
    """A probe failed or took too long; the message is the reason."""


class Probe(Generic[T]):
    """A function that runs in a thread from now on, for at most *seconds*."""

    def __init__(self, function: Callable[[], T], seconds: float = PROBE_S_MAX):
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._future: Future[T] = Future()
        # A daemon thread, which does not keep the process if it never ends.
        threading.Thread(target=self._run, args=(function,), daemon=True).start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._future.set_result(function())
        except Exception as exc:  # a failure must not stop the other probes
            self._future.set_exception(exc)

    def wait_result(self) -> T:
        """Wait for the result and return it.

        :raises ProbeFailed: the function raised, or the time is over.
        """
        try:
            error = self._future.exception(max(0.0, self._deadline - time.monotonic()))
        except TimeoutError:
            raise ProbeFailed(f"no answer within {self._seconds:g} s") from None
        if error is not None:
            raise ProbeFailed(_reason(error)) from error
        return self._future.result()


def _reason(error: BaseException) -> str:
    if isinstance(error, ProbeFailed):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
