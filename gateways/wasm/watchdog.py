"""The forced end of a guest: at its deadline, or by Ctrl-C while it runs WebAssembly code."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Literal, Self, TypeAlias

Ending: TypeAlias = Literal["timeout", "interrupted"]
GRACE_S = 0.25
"""The time in which an interrupted guest has to end. One that takes longer waits in a function of
WASI, for input or a clock.
"""


class Watchdog:
    """A thread that ends a guest at its deadline or at SIGINT, while its `with` block runs.

    The main thread runs WebAssembly code, in which Python handles no signal. So this thread calls
    *interrupt*, which makes that code trap, and *give_up* if the guest has not ended after
    `GRACE_S`. `ending` is the reason, or None. A signal raises KeyboardInterrupt only while
    `may_raise` returns true; elsewhere the exception would crash the process in callbacks of
    wasmtime that do not expect it.
    """

    def __init__(
        self,
        timeout_s: float | None,
        interrupt: Callable[[], object],
        give_up: Callable[[Ending], object],
    ):
        self.ending: Ending | None = None
        self.may_raise: Callable[[], bool] = lambda: True
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._interrupt, self._give_up = interrupt, give_up
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="inferd-watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._signals, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._previous = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._handler = signal.getsignal(signal.SIGINT)
        if self._handler is signal.default_int_handler:  # otherwise Ctrl-C is ignored already
            signal.signal(signal.SIGINT, self._handle_interrupt)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        signal.signal(signal.SIGINT, self._handler)
        signal.set_wakeup_fd(self._previous)
        self._written.close()
        self._thread.join()
        self._signals.close()

    def _handle_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.may_raise():
            raise KeyboardInterrupt

    def _watch(self) -> None:
        self.ending = self._wait_for_reason()
        if self.ending is not None:
            self._interrupt()
            if not self._ended.wait(GRACE_S):
                self._give_up(self.ending)

    def _wait_for_reason(self) -> Ending | None:
        """Return why the guest has to end, or None when it has ended."""
        while True:
            wait_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            readable, _, _ = select.select([self._signals], [], [], wait_s)
            if not readable:
                return "timeout"
            numbers = self._signals.recv(4096)
            if not numbers:
                return None
            if signal.SIGINT in numbers:
                return "interrupted"
