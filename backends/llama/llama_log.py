"""What llama.cpp says: its log lines, in one bounded ring for the whole process, and passed on.

llama.cpp has one log callback a process and prints to stderr without it.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque

from llama_cpp import llama_cpp as lib

from ..library_log import library_log

LINES_MAX = 400
LINE_CHARACTERS_MAX = 500
LEVEL_DEBUG, LEVEL_INFO, LEVEL_WARNING, LEVEL_ERROR, LEVEL_CONTINUE = 1, 2, 3, 4, 5
"""As in ggml.h; the comments in the bindings name other numbers."""
_PASSED_ON = {LEVEL_INFO: "debug", LEVEL_WARNING: "warning", LEVEL_ERROR: "error"}
"""A load says 150 lines of information: few want them."""


class LogRing:
    """The last lines of llama.cpp's log, each with its level. Appended to from any thread."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque(maxlen=LINES_MAX)
        # ctypes keeps no reference: without ours the callback would be freed under llama.cpp.
        self._callback = lib.llama_log_callback(self._write)

    def install(self) -> None:
        """Take llama.cpp's log away from stderr."""
        # An abort would start gdb for a backtrace, and the process be seconds longer in dying.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        lib.llama_log_set(self._callback, ctypes.c_void_p(0))

    def clear(self) -> None:
        """Forget all lines."""
        self._lines.clear()

    def lines(self) -> list[str]:
        """Return the lines kept, oldest first."""
        return [text for _, text in self._lines]

    def cause(self) -> str:
        """Return the first error line: llama.cpp tells the cause first, then who gave up on it."""
        errors = [text for level, text in self._lines if level == LEVEL_ERROR]
        return errors[0] if errors else "llama.cpp gave no reason"

    def _write(self, level: int, text: bytes, _data: object) -> None:
        if level == LEVEL_DEBUG:
            return  # a context alone says 300 such lines: the sizes would be lost among them
        line = text.decode("utf-8", "replace").rstrip("\n")[:LINE_CHARACTERS_MAX]
        if line.strip(" .") and level != LEVEL_CONTINUE:
            self._lines.append((level, line))
            if level in _PASSED_ON:
                library_log.log_line(_PASSED_ON[level], line)


_ring = LogRing()


def capture() -> LogRing:
    """Return the process's ring, installed."""
    _ring.install()
    return _ring
