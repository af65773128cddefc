"""The thread that tokenizes long texts beside the engine's steps, one at a time."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

NICE = 10
"""The thread's niceness: beside a busy thread of llama.cpp on its core it gets a tenth of it."""


@dataclass(frozen=True, slots=True)
class LongText:
    """A text to tokenize; see `Model.tokenize`."""

    text: bytes
    special: bool
    bos: bool


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a long text, or the error; *seconds* is the CPU time that it took."""

    outcome: list[int] | Exception
    seconds: float


class TextThread:
    """Calls *tokenize*, which releases the GIL and changes nothing, for one text after another.

    Its methods belong to the engine's thread. The thread starts with the first text.
    """

    def __init__(self, tokenize: Callable[..., list[int]]):
        self.busy = False
        """A text was begun whose result was not taken."""
        self._tokenize = tokenize
        self._texts: queue.SimpleQueue[LongText | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Tokenized] = queue.SimpleQueue()
        self._event = -1
        self._thread: threading.Thread | None = None

    def begin_text(self, text: LongText) -> None:
        """Tokenize a text; the previous one's result was taken."""
        assert not self.busy
        self.busy = True
        self.fileno()
        self._texts.put(text)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="texts", daemon=True)
            self._thread.start()

    def take_result(self) -> Tokenized | None:
        """Return the result of the text, once it is there."""
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
        """End the thread after its text: it uses the model, which is freed next."""
        if self._thread is not None:
            self._texts.put(None)
            self._thread.join()
        if self._event >= 0:
            os.close(self._event)

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (text := self._texts.get()) is not None:
            started = time.thread_time()
            outcome: list[int] | Exception
            try:
                outcome = self._tokenize(text.text, special=text.special, bos=text.bos)
            except Exception as exc:  # the engine's thread raises it
                outcome = exc
            self._results.put(Tokenized(outcome, time.thread_time() - started))
            os.eventfd_write(self._event, 1)
