"""A service manager for tests, which receives a daemon's notifications on a datagram socket."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from inferd.testing import RunningDaemon
from tests.fork_server import ForkedProcess

__all__ = ("Manager", "manager_of", "serving")

SECONDS_MAX = 60.0
Message = dict[str, str]


class Manager:
    """Listens at *path*. `messages` are those received so far, each as a map of its lines."""

    def __init__(self, path: Path):
        path.unlink(missing_ok=True)
        self.path = path
        self.messages: list[Message] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(SECONDS_MAX)

    def next(self) -> Message:
        """Return the next message."""
        lines = self.socket.recv(8192).decode().split("\n")
        self.messages.append(dict(line.split("=", 1) for line in lines))
        return self.messages[-1]

    def until(self, fits: Callable[[Message], bool]) -> Message:
        """Return the next message that *fits*."""
        end = time.monotonic() + SECONDS_MAX
        while not fits(message := self.next()):
            assert time.monotonic() < end, f"no such message, but {self.messages[-5:]}"
        return message

    def status(self, beginning: str) -> str:
        """Return the next status with this beginning."""
        return self.until(lambda m: m.get("STATUS", "").startswith(beginning))["STATUS"]

    def serves(self) -> None:
        """Wait until the status is "serving", without a failing component."""
        self.until(lambda m: m.get("STATUS") == "serving")


@contextmanager
def manager_of(daemon: RunningDaemon) -> Iterator[Manager]:
    """Yield a service manager at the address to which *daemon* sends its notifications."""
    manager = Manager(daemon.directory / "notify")
    try:
        yield manager
    finally:
        manager.socket.close()


@contextmanager
def serving(
    daemon: RunningDaemon, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the stopped daemon in another *environment*."""
    with (daemon.directory / "log").open("ab") as log:
        process = ForkedProcess(daemon._command(), env={**os.environ, **environment}, stderr=log)
    try:
        while "daemon.ready" not in daemon.log.rsplit("daemon.stopped", 1)[1]:
            assert process.poll() is None, daemon.log
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_MAX)
        process.kill()
