"""The threads that work on texts beside the engine's steps, each on one at a time."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NICE = 10
"""The niceness of a thread that computes: beside a busy thread of llama.cpp on its core it gets a
tenth of it.
"""


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call, or the error; *seconds* is the time that it took."""

    outcome: Any
    seconds: float


class TextThread:
    """Makes calls, which release the GIL and change nothing, one after another. *seconds* measures
    their time.

    Its methods belong to the engine's thread. The thread starts with the first call.
    """

    def __init__(self, seconds: Callable[[], float], nice: int = 0):
        self.busy = False
        """A call was begun whose result was not taken."""
        self._seconds, self._nice = seconds, nice
        self._calls: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self._event = -1
        self._thread: threading.Thread | None = None

    def begin_call(self, call: Callable[[], Any]) -> None:
        """Make a call; the previous one's result was taken."""
        assert not self.busy
        self.busy = True
        self.fileno()
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="texts", daemon=True)
            self._thread.start()

    def take_result(self) -> CallResult | None:
        """Return the result of the call, once it is there."""
        if not self.busy:
            return None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        try:
            result = self._results.get_nowait()
        except queue.Empty:
            return None
        self.busy = False
        return result

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is a result (and sometimes without)."""
        if self._event < 0:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._event

    def close(self) -> None:
        """End the thread after its call: it uses the model, which is freed next."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
        if self._event >= 0:
            os.close(self._event)

    def _work(self) -> None:
        if self._nice:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (call := self._calls.get()) is not None:
            started = self._seconds()
            try:
                outcome = call()
            except Exception as exc:  # the engine's thread raises it
                outcome = exc
            self._results.put(CallResult(outcome, self._seconds() - started))
            os.eventfd_write(self._event, 1)
