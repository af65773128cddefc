"""The process that runs `sandbox.py`, as its worker sees it."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import msgspec

from .exchange import Limit, Reply, receive_frame, send_frame

WAIT_S_MAX = 10
"""Time of one rendering, on a busy machine or at low priority."""
SLOW_NICE = 10


class SandboxEnded(Exception):
    """The process has ended without a reply."""


class SandboxProcess:
    """A process of `sandbox.py`, which compiles *source* as soon as it has started."""

    def __init__(self, source: bytes):
        self._socket, theirs = socket.socketpair()
        self.compiled = False
        """Whether the reply to the source was read."""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "inferd.backends.llama.text.sandbox"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._socket.settimeout(WAIT_S_MAX)
        self._replies = self._socket.makefile("rb")
        self.send(source)

    def send(self, request: bytes) -> None:
        """Send a request."""
        send_frame(self._socket, request)

    def waits_longer(self, seconds: float) -> bool:
        """Return whether no reply arrives within *seconds*."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(1000 * seconds)

    def lower_priority(self) -> None:
        """Compute only while little else does."""
        with suppress(PermissionError):  # systemd's unit forbids it
            os.setpriority(os.PRIO_PROCESS, self._process.pid, SLOW_NICE)

    def receive_reply(self) -> Reply:
        """Return the next reply; raise `SandboxEnded` if the process has ended."""
        body = receive_frame(self._replies)
        if body:
            return msgspec.msgpack.decode(body, type=Reply)
        if self.end() == -signal.SIGPROF:
            return Reply(limit=Limit.CPU_S)
        raise SandboxEnded

    def end(self) -> int:
        """End the process; return its exit status, its own if it had ended."""
        self._process.kill()
        status = self._process.wait()  # a thread that still reads from it has then stopped
        self._replies.close()
        self._socket.close()
        return status
