"""The main loop of a sandbox, and the limits that the kernel enforces on it."""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from .frames import receive_frame, send_frame


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
