"""Daemons whose listening sockets the tests open, as systemd does."""

from __future__ import annotations

import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from inferd.testing import RunningDaemon

__all__ = ("LAUNCH", "ActivatedDaemon")

LAUNCH = """
import os, sys
os.dup2(int(sys.argv.pop()), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "inferd.socket"}
from inferd.cli import main
main()
"""
"""The steps of systemd before it starts a service with its opened socket, and the service, in a
process that can be forked from a server.
"""


class ActivatedDaemon(RunningDaemon):
    """A daemon whose listening socket belongs to this process over all restarts."""

    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="inferd-"))
        self.socket = str(self.directory / "inferd.sock")
        (self.directory / "config.toml").write_text(self._config)
        (self.directory / "models").mkdir()
        self.listener = self.make_listener()
        self.start_again()

    def make_listener(self) -> socket.socket:
        """Return a socket that listens at `self.socket`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.socket)
        listener.listen(128)
        return listener

    def __exit__(self, *ending: Any) -> None:
        super().__exit__(*ending)
        self.listener.close()

    def _descriptors(self) -> tuple[int, ...]:
        return (self.listener.fileno(),)

    def _command(self) -> list[str]:
        _, _, _, *words = super()._command()
        return [sys.executable, "-c", LAUNCH, *words, str(self.listener.fileno())]
