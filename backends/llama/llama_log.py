"""llama.cpp's log lines, in one bounded ring per process, and forwarded to `library_log`.

llama.cpp has one log callback per process, and prints to stderr without it.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llama_cpp import llama_cpp as lib

from ..library import library_log

LINES_MAX = 400
LINE_CHARACTERS_MAX = 500
LEVEL_DEBUG, LEVEL_INFO, LEVEL_WARNING, LEVEL_ERROR, LEVEL_CONTINUE = 1, 2, 3, 4, 5
"""As in ggml.h; the comments in the bindings name other numbers."""
_PASSED_ON = {LEVEL_INFO: "debug", LEVEL_WARNING: "warning", LEVEL_ERROR: "error"}
"""Loading a model logs 150 lines of information, so these are debug lines here."""
_EXPECTED = "but [0] was specified"
"""The end of a warning about every embedding context of a model whose file names a pooling. It is
expected, because no pooling is requested of llama.cpp, so that each request may have its own.
"""


class LogRing:
    """The last lines of llama.cpp's log with their levels. Any thread may append lines."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=LINES_MAX)
        # ctypes keeps no reference: without this one the callback would be freed while in use.
        self._callback = lib.llama_log_callback(self._write)
        self._is_muted = False

    def install(self) -> None:
        """Redirect llama.cpp's log from stderr to this ring."""
        # On an abort ggml would start gdb for a backtrace, and the exit would take seconds longer.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    @property
    def callback(self) -> Any:
        """The callback of the ring, for other libraries of llama.cpp with a log of their own."""
        return self._callback

    def clear(self) -> None:
        """Drop all lines."""
        self._lines.clear()

    def lines(self) -> list[str]:
        """Return the lines, oldest first."""
        return [text for _, text in self._lines]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Forward no lines meanwhile; the ring has them all."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def cause(self) -> str:
        """Return the first error line: llama.cpp logs the cause, then the callers that failed."""
        errors = (text for level, text in self._lines if level == LEVEL_ERROR)
        return next(errors, "llama.cpp gave no reason")

    def _write(self, level: int, text: bytes, _data: object) -> None:
        if level == LEVEL_DEBUG:
            return  # each context logs 300 such lines, which would push out the sizes
        line = text.decode("utf-8", "replace").rstrip("\n")[:LINE_CHARACTERS_MAX]
        if line.strip(" .") and level != LEVEL_CONTINUE:
            self._lines.append((level, line))
            if level in _PASSED_ON and not (self._is_muted or line.endswith(_EXPECTED)):
                library_log.log_line(_PASSED_ON[level], line)


_ring = LogRing()


def capture() -> LogRing:
    """Install the process's ring, and return it."""
    _ring.install()
    return _ring
