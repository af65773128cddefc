"""A thread that takes the turn of the engine's thread while that computes by itself for long.

To hand a computation over to a lane and its result back takes longer than many computations. The
engine's thread therefore makes those by itself that are known to be short, or during which nothing
is expected to arrive. It gives the turn, the right to use the engine and the link, up meanwhile. If
such a computation takes long after all, the standby takes the turn until its end, so that commands
are read and other lanes compute.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..call_thread import CallResult

CHECK_S = 0.005
"""The standby takes the turn when a computation has taken longer than one to two of these times."""
CHECKS_MAX = 40
"""The standby rests after this many checks without a computation, until the next one."""


class Standby:
    """Makes calls in the engine's thread, whose turn it is from the beginning.

    *drive* handles commands and results until a descriptor is readable, or until the function that
    it gets returns True; it runs each step within the turn, which is its third argument.
    """

    def __init__(self, drive: Callable[[int, Callable[[], bool], threading.Lock], None]) -> None:
        self.takeovers = 0
        """The number of computations during which the standby has had the turn."""
        self._drive = drive
        self.turn = threading.Lock()
        self.turn.acquire()
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._call: object | None = None
        """The call under way."""
        self.is_resting = True
        """Whether it does not watch calls; the next one wakes it."""
        self._ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once a call has ended during which the standby may have had the turn."""
        self._thread = threading.Thread(target=self._run, name="standby", daemon=True)

    def start(self) -> None:
        """Start the thread.

        :raises RuntimeError: the system has no more threads.
        """
        self._thread.start()

    def make_call(self, function: Callable[[], Any]) -> CallResult:
        """Call *function* without the turn, and return its result or exception."""
        taken, self._call = self.takeovers, object()
        if self.is_resting:
            self.is_resting = False
            self._wanted.put(True)
        self.turn.release()
        started = time.monotonic()
        try:
            outcome = function()
        except Exception as exc:  # for the engine to handle
            outcome = exc
        seconds = time.monotonic() - started
        self._call = None
        if self.takeovers != taken:
            os.eventfd_write(self._ended, 1)
        self.turn.acquire()
        try:
            return CallResult(outcome, seconds)
        finally:
            del outcome  # an exception keeps this frame, which would keep it in turn

    def close(self) -> None:
        """End the thread; no call is under way."""
        self._wanted.put(False)
        if self._thread.ident is not None:
            self.turn.release()
            self._thread.join()
            self.turn.acquire()
        os.close(self._ended)

    def _run(self) -> None:
        while self._wanted.get():
            self._watch()
            self.is_resting = True
            if self._call is not None and self.is_resting:  # it began before that line
                self.is_resting = False
                self._wanted.put(True)

    def _watch(self) -> None:
        checks = 0
        while checks < CHECKS_MAX and self._wanted.empty():
            call = self._call
            time.sleep(CHECK_S)
            checks = checks + 1 if call is None else 0
            if call is not None and self._call is call:
                self._take_turn(call)

    def _take_turn(self, call: object) -> None:
        with self.turn:
            if self._call is not call:
                return
            with suppress(BlockingIOError):  # of an earlier call
                os.eventfd_read(self._ended)
            self.takeovers += 1  # from here on the end of the call is announced
        self._drive(self._ended, lambda: self._call is not call, self.turn)
