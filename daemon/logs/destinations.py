"""Destinations of the log: a file, and standard error. Owned by the one thread that writes.

`LogFile` also serves spans. Like `logging.handlers.WatchedFileHandler` it checks before each line
whether the open file is still the one at its path, since it may be moved or removed. It has no
buffer: a line that a full disk refused is not written later.

`StandardError` writes without waiting for its reader. A reader may stop: a terminal by Ctrl-S, a
pager at the end of a page, a journal that hangs. A wait for it would block the daemon's event loop
and with it all clients.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

_FILE_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
"""With O_NONBLOCK, opening a pipe without a reader fails instead of waiting."""
_FILE_MODE = 0o600
_CLOSED = -1
_STDERR_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


class LogFile:
    """A file of at most *bytes_max* bytes, opened with its first line. *on_change* is called with
    the cause when `write_line` begins to fail, and with None when it works again.

    With *rotates*, a full file is renamed to `previous_file`, where it replaces an older file, and
    a new one begins.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[str | None], None] = lambda _: None,
        *,
        bytes_max: int | None = None,
        rotates: bool = False,
    ):
        self.path, self.bytes_max, self._rotates = path, bytes_max, rotates
        self.cause: str | None = None
        """The reason why the last line was not written, or None."""
        self._on_change = on_change
        self._file = _CLOSED
        self._status: os.stat_result | None = None
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
        """Close the file, which was moved or will be; the next line opens its path again."""
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
        self._make_space(len(data))
        while data:
            written = os.write(self._file, data)
            data = data[written:]
            self._torn = bool(data)

    def _make_space(self, more: int) -> None:
        size = os.fstat(self._file).st_size
        if self.bytes_max is None or size + more <= self.bytes_max:
            return
        if not self._rotates:
            raise OSError(errno.EFBIG, f"has reached its limit of {self.bytes_max} bytes")
        if size:  # a single line may be longer than the limit
            os.replace(self.path, previous_file(self.path))
            self.reopen()
            self._open()

    def _is_current(self) -> bool:
        if self._status is None or self._file == _CLOSED:
            return False
        try:
            return os.path.samestat(os.stat(self.path), self._status)
        except FileNotFoundError:
            return False

    def _open(self) -> None:
        self._file = os.open(self.path, _FILE_FLAGS, _FILE_MODE)
        previous, self._status = self._status, os.fstat(self._file)
        if previous is None or not os.path.samestat(previous, self._status):
            self._torn = False

    def _note(self, cause: str | None) -> None:
        previous, self.cause = self.cause, cause
        if (previous is None) != (cause is None):
            self._on_change(cause)


def previous_file(path: Path) -> Path:
    """Return the path to which a full log file is renamed."""
    return path.with_name(f"{path.name}.1")


class StandardError:
    """Writes to *descriptor*.

    Other programs share the descriptor, such as a shell its terminal. So it is not made
    non-blocking, but opened again, or written with `MSG_DONTWAIT`.
    """

    def __init__(self, descriptor: int = 2):
        self._socket: socket.socket | None = None
        self._opened = -1
        self._send = self._sender(descriptor)
        self._rest = b""
        """The unwritten rest of an event, which is written before the next event."""

    def _sender(self, descriptor: int) -> Callable[[bytes], int]:
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISSOCK(mode):
                self._socket = own = socket.socket(fileno=os.dup(descriptor))
                return lambda data: own.send(data, socket.MSG_DONTWAIT)
            if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
                self._opened = os.open(f"/proc/self/fd/{descriptor}", _STDERR_FLAGS)
                return partial(os.write, self._opened)
        except OSError:  # it belongs to another user, or /proc is missing
            pass
        return partial(os.write, descriptor)

    def write(self, data: bytes) -> bool:
        """Write *data*, its end perhaps before the next event; return False if none was written."""
        try:
            if not self._drain():
                return False
            self._rest = data
            if not self._drain() and len(self._rest) == len(data):
                self._rest = b""
                return False
        except OSError:  # its reader has closed it, or the disk is full
            self._rest = b""
            return False
        return True

    def _drain(self) -> bool:
        """Write the rest as far as possible; return whether all of it is written."""
        while self._rest:
            try:
                self._rest = self._rest[self._send(self._rest) :]
            except BlockingIOError:
                return False
        return True

    def close(self) -> None:
        """Close the additional descriptor or socket."""
        if self._socket is not None:
            self._socket.close()
        if self._opened >= 0:
            os.close(self._opened)
