"""A user's folders for tests of commands that start daemons; all of its processes end with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.daemon.command_line import inferd_process
from tests.processes import command_of

__all__ = ("COMMAND_S_MAX", "Done", "Home", "home_of", "wait_ended")

COMMAND_S_MAX = 60.0


class Done:
    """A command that has ended."""

    def __init__(self, status: int, stdout: bytes, stderr: bytes):
        self.status, self.stdout, self.stderr = status, stdout.decode(), stderr.decode()

    def __repr__(self) -> str:
        return f"status {self.status}, {self.stdout!r}, {self.stderr!r}"


class Home:
    """Folders of a user, which the environment of this process names."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.socket = folder / "run" / "inferd" / "inferd.sock"
        self.state = folder / "state" / "inferd"
        self.log = self.state / "inferd.log"
        self.config = folder / "config" / "inferd" / "config.toml"

    def inferd(self, *arguments: str, socket: str = "", stdin: int = subprocess.DEVNULL) -> Done:
        """Run a command to its end."""
        with inferd_process(*arguments, socket=socket, stdin=stdin) as process:
            try:
                output = process.communicate(timeout=COMMAND_S_MAX)
            except BaseException:
                process.kill()
                raise
        return Done(process.returncode, *output)

    def configure(self, text: str) -> None:
        """Write the configuration file."""
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(text)

    def daemons(self) -> list[psutil.Process]:
        """Return the daemons, without their workers."""
        return [p for p in self._processes() if "serve" in command_of(p)]

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                ours = process.environ().get("XDG_RUNTIME_DIR") == str(self.folder / "run")
                if ours and process.pid != os.getpid():
                    yield process

    def close(self) -> None:
        """Kill all processes of this user."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


@contextmanager
def home_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """Yield the folders of a user without a daemon."""
    folder = Path(tempfile.mkdtemp(prefix="inferd-"))  # a socket's path has at most 107 bytes
    for name in ("run", "data", "state", "config"):
        (folder / name).mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    for name in ("data", "state", "config"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(folder / name))
    monkeypatch.setenv("INFERD_METRICS", "off")
    home = Home(folder)
    try:
        yield home
    finally:
        home.close()
        shutil.rmtree(folder, ignore_errors=True)


def wait_ended(process: psutil.Process) -> None:
    """Wait until a process has ended; an unreaped process counts as ended."""
    with suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(COMMAND_S_MAX)
