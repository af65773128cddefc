"""A file to which events or spans are appended, even if it is moved or removed meanwhile.

Like `logging.handlers.WatchedFileHandler` it checks before each line whether the open file is still
the one at its path. It has no buffer: a line that a full disk refused is not written later.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""O_NONBLOCK: a pipe without a reader is an error, not a wait."""
_MODE = 0o600
_CLOSED = -1


class LogFile:
    """A file of at most *bytes_max* bytes, opened with its first line. *on_change* is called with
    the cause when `write_line` begins to fail, and with None when it works again. Owned by the one
    thread that writes.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[str | None], None] = lambda _: None,
        *,
        bytes_max: int | None = None,
    ):
        self.path, self._bytes_max = path, bytes_max
        self.cause: str | None = None
        """The reason why the last line was not written, or None."""
        self._on_change = on_change
        self._file = _CLOSED
        self._id: tuple[int, int] | None = None
        self._torn = False

    def write_line(self, line: bytes) -> bool:
        """Append a line; return whether it was written."""
        try:
            self.append_lines(line)
        except OSError as exc:
            self._note(f"{self.path}: {exc.strerror}")
            return False
        self._note(None)
        return True

    def reopen(self) -> None:
        """Close the file; the next line opens it again, since it was moved or will be."""
        file, self._file = self._file, _CLOSED
        if file != _CLOSED:
            with contextlib.suppress(OSError):  # each write has reported its own failure
                os.close(file)

    close = reopen

    def append_lines(self, lines: bytes) -> None:
        """Append whole lines.

        :raises OSError: the lines were not written, or only in part; the next append starts a new
            line.
        """
        if not self._is_current():
            self.reopen()
            self._open()
        data = b"\n" + lines if self._torn else lines
        self._check_size(len(data))
        while data:
            written = os.write(self._file, data)
            data = data[written:]
            self._torn = bool(data)

    def _check_size(self, more: int) -> None:
        if self._bytes_max is not None and os.fstat(self._file).st_size + more > self._bytes_max:
            raise OSError(errno.EFBIG, f"has reached its limit of {self._bytes_max} bytes")

    def _is_current(self) -> bool:
        if self._file == _CLOSED:
            return False
        try:
            return _id_of(os.stat(self.path)) == self._id
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        self._file = os.open(self.path, _FLAGS, _MODE)
        before, self._id = self._id, _id_of(os.fstat(self._file))
        self._torn = self._torn and self._id == before

    def _note(self, cause: str | None) -> None:
        before, self.cause = self.cause, cause
        if (before is None) != (cause is None):
            self._on_change(cause)


def _id_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
