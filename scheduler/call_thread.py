"""A thread that makes calls for its owner, and announces their results by a descriptor."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..backends.errors import BackendError

_STOP_RANK = -1


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call, or its exception; *seconds* is the time that it took."""

    outcome: Any
    seconds: float


class CallThread:
    """Makes calls one after another, those of a lower rank first, and times them by *seconds*.

    Its methods belong to the owner's thread. The thread starts with the first call, or by
    `start`; its niceness is raised by *nice*. *take_result* is called in the thread with each
    result, which is announced if it returns False.
    """

    def __init__(
        self,
        name: str,
        seconds: Callable[[], float] = time.monotonic,
        nice: int = 0,
        take_result: Callable[[CallResult], bool] | None = None,
    ):
        self._seconds, self._nice, self._take_result = seconds, nice, take_result
        self._calls: list[tuple[int, int, Callable[[], Any] | None]] = []
        """A heap. Each change is one call of C code on integers, which no other thread interrupts.
        """
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        """An item for each call, because `PriorityQueue` takes 20 us to hand one over."""
        self._numbers = itertools.count()
        self._results: queue.SimpleQueue[CallResult] = queue.SimpleQueue()
        self._event = -1
        """A descriptor that counts the results that were not returned; -1 until it is needed."""
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def queue_call(self, call: Callable[[], Any], rank: int = 0) -> None:
        """Make a call, after the earlier ones of its rank."""
        self.start()
        self._put(rank, next(self._numbers), call)

    def _put(self, rank: int, number: int, call: Callable[[], Any] | None) -> None:
        heapq.heappush(self._calls, (rank, number, call))
        self._wakes.put(None)

    def _next_call(self) -> Callable[[], Any] | None:
        self._wakes.get()
        return heapq.heappop(self._calls)[2]

    def start(self) -> None:
        """Start the thread, unless it has started.

        :raises BackendError: the system has no more threads.
        """
        self.fileno()
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as exc:
                raise BackendError(
                    f"the thread {self._thread.name!r} cannot be started: {exc}",
                    hint="raise the limit on threads: TasksMax of the service, or ulimit -u",
                ) from None

    def results(self, wait_s: float = 0) -> list[CallResult]:
        """Return the results since the last call; wait up to *wait_s* for one."""
        if wait_s:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLIN)
            poll.poll(1000 * wait_s)
        try:
            count = os.eventfd_read(self.fileno())
        except BlockingIOError:
            return []
        return [self._results.get_nowait() for _ in range(count)]

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are results."""
        if self._event < 0:
            self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return self._event

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread after its present call, and wait for that up to *timeout_s*."""
        if self._thread.ident is not None:
            self._put(_STOP_RANK, 0, None)
            self._thread.join(timeout_s)
        if self._event >= 0 and not self._thread.is_alive():  # it would still announce a result
            os.close(self._event)

    def _work(self) -> None:
        if self._nice:
            with contextlib.suppress(OSError):
                os.nice(self._nice)  # of this thread
        while (call := self._next_call()) is not None:
            started = self._seconds()
            try:
                outcome = call()
            except Exception as exc:  # for the owner to handle
                outcome = exc
            result = CallResult(outcome, self._seconds() - started)
            if self._take_result is None or not self._take_result(result):
                self._results.put(result)
                os.eventfd_write(self._event, 1)
            del call, outcome, result  # they may hold much memory until the next call
