"""The state directory of one daemon: its lock, and the number of starts on it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..backends.errors import Busy, PermissionDenied
from .backup import finish_restoration
from .components import Components
from .state_files import replace_file

LOCK_FILE = "lock"
STARTS_FILE = "starts"
_HOLDER_BYTES_MAX = 4096


class _Holder(msgspec.Struct):
    """The content of the lock file: the daemon that has the lock. Without *socket* the process is
    none, but restores a backup.
    """

    pid: int
    socket: str


class StateDirectory:
    """The state directory, locked from `open` to `close`. The kernel frees the lock of a process
    that has exited.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lock_fd = -1

    def open(self, socket: str, components: Components) -> int:
        """Lock the directory for the daemon at *socket*. Return the number of daemon starts on it,
        the upper half of the daemon's handles.

        If the directory is unusable, return the time, which does not repeat either.

        :raises Busy: another daemon has the directory.
        :raises BackendError: the restoration of a backup was interrupted, and cannot be finished.
        """
        try:
            self._path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock(_Holder(os.getpid(), socket))
            finish_restoration(self._path)
            return self._count_start()
        except (OSError, ValueError) as exc:
            components.note("state", f"{self._path}: {getattr(exc, 'strerror', None) or exc}")
            return int(time.time())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the existing directory for a restoration.

        :raises Busy: a daemon has the directory.
        :raises PermissionDenied: this user may not write there.
        """
        try:
            self._lock(_Holder(os.getpid(), ""))
        except OSError as exc:
            raise PermissionDenied(
                f"the state directory {self._path} cannot be locked: {exc.strerror}",
                hint="run the command as the daemon's user or as root",
            ) from exc
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        """Free the lock. The file stays, as deleting it would free another daemon's lock, too."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self, holder: _Holder) -> None:
        fd = os.open(self._path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, msgspec.json.encode(holder), 0)
        except BlockingIOError:
            other = self._in_use(os.pread(fd, _HOLDER_BYTES_MAX, 0))
            os.close(fd)
            raise other from None
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd

    def _in_use(self, content: bytes) -> Busy:
        message = f"another daemon uses the state directory {self._path}"
        hint = "stop it, or choose another --state-dir"
        try:
            holder = msgspec.json.decode(content, type=_Holder)
        except msgspec.MsgspecError:  # it has just been locked
            return Busy(message, hint=hint)
        if not holder.socket:
            return Busy(
                f"`inferd restore` (pid {holder.pid}) uses the state directory {self._path}",
                hint="wait until it has ended",
            )
        return Busy(
            f"{message}: the process {holder.pid}, which listens on {holder.socket}",
            hint=f"use it, stop it with `inferd stop --socket {holder.socket}`, or choose another"
            " --state-dir",
            data={"pid": holder.pid, "socket": holder.socket},
        )

    def _count_start(self) -> int:
        path = self._path / STARTS_FILE
        number = int(path.read_text()) + 1 if path.exists() else 1
        replace_file(path, f"{number}\n".encode())
        return number & 0x7FFF_FFFF
