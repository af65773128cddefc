"""A thread for operations that may block for as long as another program wants."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable

IDLE_S = 2.0
"""Time after which a thread without operations ends."""
INTERRUPT = signal.SIGURG
"""The kernel ignores it in a process that has not called `allow_interrupts`."""

Operation = Callable[[], None]


def allow_interrupts() -> None:
    """Let `BlockingThread.interrupt` end system calls of this process; call it in the main
    thread.
    """
    signal.signal(INTERRUPT, lambda *_: None)


class BlockingThread:
    """Runs operations in their order, in a thread that exists while there are any."""

    def __init__(self, name: str):
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Operation, bool]] = deque()
        self._thread: threading.Thread | None = None
        self._can_interrupt = False

    def submit(self, operation: Operation, *, can_interrupt: bool = False) -> None:
        """Run *operation*, which raises nothing, after those submitted before."""
        with self._changed:
            self._waiting.append((operation, can_interrupt))
            if self._thread is not None:
                self._changed.notify()
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads now: the next operation tries again
                self._thread = None

    def interrupt(self) -> bool:
        """Send a signal to the thread if it runs an operation that may be interrupted. Return
        whether it runs one, or has other operations to run.

        The signal ends the wait of a socket's last close, not that of an unanswered FUSE request.
        """
        with self._changed:
            if self._thread is None:
                return False
            if self._can_interrupt:
                assert self._thread.ident is not None, "it was started"
                signal.pthread_kill(self._thread.ident, INTERRUPT)
            return self._can_interrupt or bool(self._waiting)

    def _run(self) -> None:
        while (operation := self._next_operation()) is not None:
            operation()
            del operation  # it may hold the last reference to this thread's owner

    def _next_operation(self) -> Operation | None:
        with self._changed:
            self._can_interrupt = False
            if not self._changed.wait_for(lambda: self._waiting, IDLE_S):
                self._thread = None
                return None
            operation, self._can_interrupt = self._waiting.popleft()
            return operation
