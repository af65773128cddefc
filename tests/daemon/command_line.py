"""Runners of `inferd` for the tests: in this process, in another process, or on a terminal."""

from __future__ import annotations

import codecs
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import psutil
import typer.testing

from inferd.cli import app
from tests.fork_server import ForkedProcess

__all__ = ("Result", "Terminal", "inferd", "inferd_process", "on_terminal", "terminal_of")

Result = Any
WAIT_S_MAX = 60.0
# Tests that a shell starts in the background ignore Ctrl-C, and so would the command.
_MAIN = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from inferd.cli import main
main()
"""
_TERMINAL_MAIN = f"import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{_MAIN}"


def inferd(*arguments: str, socket: str = "", text: str | None = None) -> Result:
    """Run a command in this process; *text* is its standard input."""
    environ = {"INFERD_SOCKET": socket or "/nonexistent/inferd.sock"}
    return typer.testing.CliRunner().invoke(app, list(arguments), input=text, env=environ)


def document(result: Result) -> Any:
    """Return the JSON that a command wrote."""
    return msgspec.json.decode(result.stdout)


def inferd_process(
    *arguments: str, socket: str = "", main: str = _MAIN, **more: Any
) -> subprocess.Popen[bytes]:
    """Start a command as a process of its own, with pipes for its output."""
    environ = {**os.environ, "INFERD_SOCKET": socket, "TERM": "dumb"}
    more.setdefault("stdin", subprocess.DEVNULL)
    for name in ("stdout", "stderr"):
        more.setdefault(name, subprocess.PIPE)
    start = ForkedProcess if main is _MAIN else subprocess.Popen  # *main* may prepare the imports
    return start([sys.executable, "-c", main, *arguments], env=environ, **more)


class Terminal:
    """The other end of a command's terminal, which reads its output and types its input."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]):
        self.process = process
        self.descriptor = descriptor
        self._shown = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def type(self, text: str) -> None:
        """Type *text*; \\x04 is Ctrl-D."""
        os.write(self.descriptor, text.encode())

    def interrupt(self) -> None:
        """Type Ctrl-C once the command waits for a line. A signal between its prompt and that wait
        would not end the wait.
        """
        deadline, process = time.monotonic() + WAIT_S_MAX, psutil.Process(self.process.pid)
        while process.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < deadline, "the command never waits"
            time.sleep(0.001)
        self.type("\x03")

    def until(self, text: str) -> str:
        """Return the output up to and including *text*."""
        deadline = time.monotonic() + WAIT_S_MAX
        while text not in self._shown:
            more = self._read(deadline)
            assert more, f"the command has ended without {text!r}; it showed {self._shown!r}"
        found, _, self._shown = self._shown.partition(text)
        return found + text

    def until_end(self) -> str:
        """Return the output up to the end of the command."""
        deadline = time.monotonic() + WAIT_S_MAX
        while self._read(deadline):
            pass
        found, self._shown = self._shown, ""
        return found

    def _read(self, deadline: float) -> bool:
        """Wait for output, and return whether there was some: not after the command's end."""
        ready, _, _ = select.select([self.descriptor], [], [], deadline - time.monotonic())
        assert ready, f"no more is shown after {self._shown!r}"
        try:
            data = os.read(self.descriptor, 65536)
        except OSError:  # Linux reports so that the other end was closed
            return False
        self._shown += self._decoder.decode(data)  # a read may end within a character
        return bool(data)


@contextmanager
def on_terminal(*arguments: str, socket: str, **environ: str) -> Iterator[Terminal]:
    """Run a command on a terminal of its own."""
    command = [sys.executable, "-c", _TERMINAL_MAIN, *arguments]
    with terminal_of(command, {"INFERD_SOCKET": socket, "TERM": "dumb", **environ}) as terminal:
        yield terminal


@contextmanager
def terminal_of(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[Terminal]:
    """Run any program on a terminal of its own; *environ* extends this process's environment,
    without the size of another terminal.
    """
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    ours, theirs = pty.openpty()
    try:
        process = ForkedProcess(
            command,
            env={**own, **environ},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
