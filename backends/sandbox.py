"""Child processes of a worker within limits of the kernel: their main loop, and the worker's end,
which reports why they ended.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress

from .child_process import present_bytes
from .fd_frames import receive_frame, send_frame

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
        send_frame(self._socket, request)

    def waits_longer(self, seconds: float) -> bool:
        """Return whether no reply arrives within *seconds*."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(1000 * seconds)

    def lower_priority(self) -> None:
        """Let the process compute only while little else does."""
        with suppress(PermissionError):  # a sandbox may forbid it
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
    size = present_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    sock = socket.socket(fileno=0)
    requests = sock.makefile("rb")
    while request := receive_frame(requests):
        signal.setitimer(signal.ITIMER_PROF, cpu_s_max)
        try:
            reply = handle(request)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        send_frame(sock, reply)


_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_VERSION = 1
"""The flag that requests the version of the kernel's Landlock."""
_FILE_RIGHTS = 0x1FF3
"""Execute a file, write one, and make, rename or remove files and folders; not reading."""
_TRUNCATE, _CONNECT = 1 << 14, 0x3
_SCOPES = 0x3
"""No abstract sockets of other processes, and no signals to them."""
_PR_SET_NO_NEW_PRIVS = 38


def forbid_new_files() -> bool:
    """Forbid this process and its children, for good, to write, make, remove or execute files, to
    use TCP and to send signals to other processes; return whether the kernel can do that (Landlock,
    the signals since Linux 6.12). Open descriptors stay usable.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    if version < 1:
        return False
    rights = _FILE_RIGHTS | (_TRUNCATE if version >= 3 else 0)
    fields = [rights]
    if version >= 4:
        fields.append(_CONNECT)
    if version >= 6:
        fields.append(_SCOPES)
    rules = struct.pack(f"<{len(fields)}Q", *fields)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ruleset = libc.syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    if ruleset < 0:
        return False
    try:
        return bool(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)
