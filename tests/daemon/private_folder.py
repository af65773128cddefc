"""Private folders of users without a runtime folder, and programs of other users that listen in
them.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.daemon.activated_daemon import ActivatedDaemon
from tests.daemon.other_users import as_user

__all__ = ("OWN", "SQUATTER", "DaemonOfUser", "folder_of", "listening")

OWN, SQUATTER = 100_000 + os.getpid(), 99_999
"""Users without a name; no other process's tests have the folder of the first one."""


@contextmanager
def folder_of(owner: int, mode: int = 0o700) -> Iterator[Path]:
    """Yield the private folder of `OWN`, which *owner* has made."""
    folder = Path(f"/tmp/inferd-{OWN}")
    with as_user(owner):
        folder.mkdir()
        folder.chmod(mode)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def listening(path: Path, uid: int) -> Iterator[socket.socket]:
    """Yield a socket on which a program of *uid* listens; any user can connect to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        with as_user(uid):
            listener.listen()
        yield listener


class DaemonOfUser(ActivatedDaemon):
    """A daemon that listens in the private folder of `OWN` with the credentials of that user."""

    def make_listener(self) -> socket.socket:
        self.socket = f"/tmp/inferd-{OWN}/inferd.sock"
        with as_user(OWN):
            return super().make_listener()
