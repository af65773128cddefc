"""The thread that starts worker processes: it has none of the descriptors that clients pass.

A new process begins with a copy of its parent's descriptors, and closes all but its own. A client
can pass a descriptor whose close never ends (a file of its own FUSE server), or takes as long as it
wants (a TCP socket with SO_LINGER). The daemon, which waits for the new process, would wait, too.
So this thread has a table of descriptors of its own (`close_range(2)`), and gets those of a worker
through a socket pair. Numbers of descriptors mean other files in it than elsewhere.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

import anyio

_CLOSE_RANGE = 436
"""The system call's number, the same on all architectures."""
_UNSHARE = 2
_LAST = 0xFFFF_FFFF
_DESCRIPTORS_MAX = 8
Command = Callable[[Sequence[int]], Sequence[str]]


class SpawnedProcess:
    """A child process that has been started. Lives on the event loop."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.pid = process.pid
        self._process = process

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait for the process to exit, and return its exit code."""
        descriptor = os.pidfd_open(self.pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
        return self._process.wait()


class Spawner:
    """Starts processes, one at a time."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._command: Command = lambda _: ()
        self._environment: Mapping[str, str] = {}
        self._result: subprocess.Popen[bytes] | OSError = OSError()
        started = threading.Event()
        threading.Thread(
            target=self._run, args=(theirs.fileno(), started), name="spawner", daemon=True
        ).start()
        started.wait()
        theirs.close()

    async def spawn(
        self,
        command: Command,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        stderr: int,
    ) -> SpawnedProcess:
        """Start a process that has *descriptors* and *stderr*. *command* gets the numbers that the
        descriptors have there.

        :raises OSError: the process cannot be started.
        """
        async with self._lock:
            self._command, self._environment = command, environment
            self._socket.send(b"\0")
            socket.send_fds(self._socket, [b"\0"], [stderr, *descriptors])
            with anyio.CancelScope(shield=True):  # the answer belongs to this request
                await anyio.wait_readable(self._socket)
            self._socket.recv(1)
            if isinstance(self._result, OSError):
                raise self._result
            return SpawnedProcess(self._result)

    def _run(self, number: int, started: threading.Event) -> None:
        """Start the requested processes until the process ends.

        The thread blocks all signals: Python's handler would write to the event loop's descriptor,
        which this thread does not have. The garbage collector never runs here, as it could close
        sockets of other threads by their numbers: nothing between two requests allocates an object
        that would start it.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        _leave_descriptors(number)
        requests = socket.socket(fileno=os.dup(number))
        started.set()
        while requests.recv(1):
            gc.disable()
            self._result = self._start_process(requests)
            gc.enable()
            requests.send(b"\0")

    def _start_process(self, requests: socket.socket) -> subprocess.Popen[bytes] | OSError:
        _, descriptors, _, _ = socket.recv_fds(requests, 1, _DESCRIPTORS_MAX)
        stderr, *passed = descriptors
        try:
            return subprocess.Popen(
                self._command(passed),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=passed,
                env=self._environment,
            )
        except OSError as exc:
            return exc
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _leave_descriptors(kept: int) -> None:
    """Give this thread a table of descriptors of its own, with *kept* and the standard ones, if the
    kernel can and may: it is Linux 5.9 or newer.
    """
    arguments = ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(kept + 1), ctypes.c_uint(_LAST)
    if ctypes.CDLL(None).syscall(*arguments, ctypes.c_int(_UNSHARE)) == 0:
        os.closerange(3, kept)


_spawner: Spawner | None = None


def start_spawner() -> Spawner:
    """Return the spawner; start it first, best before a client has passed a descriptor."""
    global _spawner
    if _spawner is None:
        _spawner = Spawner()
    return _spawner
