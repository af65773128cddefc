"""Child processes of a worker within limits of the kernel: their frames, their main loop, and the
worker's end, which reports why they ended.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_PREFIX_BYTES = 4


def send_frame(sock: socket.socket, body: bytes) -> None:
    """Send a frame: a length of 4 bytes, and *body*."""
    sock.sendall(len(body).to_bytes(_PREFIX_BYTES, "little") + body)


def receive_frame(file: BinaryIO) -> bytes:
    """Return the next frame's body, which is cut off or empty if the other side has closed."""
    return file.read(int.from_bytes(file.read(_PREFIX_BYTES), "little"))


WAIT_S_MAX = 10
"""Maximum time of one reply by default. A busy machine or a low priority may delay it."""
SLOW_NICE = 10


class SandboxEnded(Exception):
    """The process has ended without a reply, with the exit *status* that `Popen` returned."""

    def __init__(self, status: int):
        super().__init__(f"it ended with status {status}")
        self.status = status

    @property
    def used_up_cpu(self) -> bool:
        """Whether the limit on CPU time ended it."""
        return self.status == -signal.SIGPROF

    @property
    def overflowed(self) -> bool:
        """Whether its stack was full, as far as the status shows that."""
        return self.status == -signal.SIGSEGV

    @property
    def crashed(self) -> bool:
        """Whether it crashed, because it found no memory or its stack was full."""
        return self.status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


class SandboxProcess:
    """A process that runs *module*, which calls `serve_requests` as a program. A reply may take
    *wait_s_max*.
    """

    def __init__(self, module: str, wait_s_max: float = WAIT_S_MAX):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._socket.settimeout(wait_s_max)
        self._replies = self._socket.makefile("rb")

    def send(self, request: bytes) -> None:
        """Send a request."""
        send_frame(self._socket, request)

    def waits_longer(self, seconds: float) -> bool:
        """Return whether no reply arrives within *seconds*."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(1000 * seconds)

    def lower_priority(self) -> None:
        """Let the process compute only while little else does."""
        with suppress(PermissionError):  # systemd's unit forbids it
            os.setpriority(os.PRIO_PROCESS, self._process.pid, SLOW_NICE)

    def receive_reply(self) -> bytes:
        """Return the next reply.

        :raises SandboxEnded: the process has ended.
        :raises TimeoutError: the reply takes longer than *wait_s_max*.
        """
        body = receive_frame(self._replies)
        if not body:
            raise SandboxEnded(self.end())
        return body

    def end(self) -> int:
        """End the process; return its exit status, which is its own if it had already ended."""
        self._process.kill()
        status = self._process.wait()  # a thread that still reads from it has then stopped
        self._replies.close()
        self._socket.close()
        return status


def serve_requests(handle: Callable[[bytes], bytes], cpu_s_max: float, memory_bytes: int) -> None:
    """Reply with *handle* to requests on standard input, a socket, until it is closed.

    The process may take *memory_bytes* besides its present memory. A request that takes more than
    *cpu_s_max* seconds of CPU time ends the process.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _limit_memory(memory_bytes)
    sock = socket.socket(fileno=0)
    requests = sock.makefile("rb")
    while request := receive_frame(requests):
        signal.setitimer(signal.ITIMER_PROF, cpu_s_max)
        try:
            reply = handle(request)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        send_frame(sock, reply)


def _limit_memory(memory_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
