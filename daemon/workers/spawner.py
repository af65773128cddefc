"""The thread that starts worker processes, without the descriptors that clients pass.

A new process begins with a copy of its parent's descriptors, and closes all but its own. A client
can pass a descriptor whose close never ends (a file of its own FUSE server), or takes as long as it
wants (a TCP socket with SO_LINGER). The daemon, which waits for the new process, would wait, too.
So this thread has a table of descriptors of its own (`close_range(2)`), and gets those of a worker
through a socket pair. Numbers of descriptors mean other files in it than elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence

import anyio

from ...backends.errors import LoadFailed
from ...wire.descriptors import read_with_descriptors

QUIT_S = 5.0
"""The time after which a process that should exit is killed if it still runs."""
KILLED_S = 10.0
"""Maximum wait for a killed process to exit."""
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
        # Opened now: at the exit no descriptor may be free, and the tasks would wait for ever.
        self._pidfd = os.pidfd_open(process.pid)

    async def wait(self) -> int | None:
        """Wait for the process to exit, and kill it after `QUIT_S`; return its exit code. Return
        None if it still exists after `KILLED_S`, kept by a system call on a file that a client
        passed.
        """
        for seconds in (QUIT_S, KILLED_S):
            with anyio.move_on_after(seconds):
                await anyio.wait_readable(self._pidfd)
                os.close(self._pidfd)
                return self._process.wait()
            self._process.kill()
        return None  # `wait_exited` needs the descriptor

    async def wait_exited(self) -> None:
        """Wait until a process that could not be ended has exited after all."""
        try:
            await anyio.wait_readable(self._pidfd)
        finally:
            os.close(self._pidfd)
        self._process.wait()


class Spawner:
    """Starts processes, one at a time."""

    _popen: type[subprocess.Popen[bytes]] = subprocess.Popen

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._command: Command = lambda _: ()
        self._environment: Mapping[str, str] = {}
        self._result: subprocess.Popen[bytes] | OSError | None = None
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
        """Start a process that has *descriptors* and *stderr*. *command* gets the descriptors'
        numbers in the new process.

        :raises OSError: the process cannot be started.
        :raises LoadFailed: the thread has ended.
        """
        async with self._lock:
            self._command, self._environment = command, environment
            with contextlib.suppress(ConnectionError):  # the thread has ended
                socket.send_fds(self._socket, [b"\0"], [stderr, *descriptors])
                with anyio.CancelScope(shield=True):  # the answer belongs to this request
                    await anyio.wait_readable(self._socket)
                self._socket.recv(1)
            # Not stored: the thread would free an error's frames, and close sockets in them by
            # numbers that mean other files there.
            result, self._result = self._result, None
            if result is None:
                raise LoadFailed(
                    "the thread that starts worker processes has ended",
                    hint="restart the daemon: its standard error has the cause",
                )
            if isinstance(result, OSError):
                raise result
            try:
                return SpawnedProcess(result)
            except OSError:
                result.kill()
                result.wait()
                raise

    def _run(self, number: int, started: threading.Event) -> None:
        """Start the requested processes until the process ends.

        The thread blocks all signals: Python's handler would write to the event loop's descriptor,
        which this thread does not have. The garbage collector must never run here, because it could
        close sockets of other threads by their numbers. It is disabled during a request, and
        nothing between two requests allocates an object that would start it.
        """
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            _leave_descriptors(number)
            requests = socket.socket(fileno=os.dup(number))
        finally:
            started.set()
        with requests:  # its number means another file elsewhere, so it is closed here
            while requests.recv(1, socket.MSG_PEEK):
                gc.disable()
                try:
                    self._result = self._start_process(requests)
                finally:
                    gc.enable()
                requests.send(b"\0")

    def _start_process(self, requests: socket.socket) -> subprocess.Popen[bytes] | OSError:
        descriptors: list[int] = []
        try:
            _, descriptors, flags = read_with_descriptors(requests, 1, _DESCRIPTORS_MAX)
            if flags & socket.MSG_CTRUNC:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            stderr, *passed = descriptors
            return self._popen(
                self._command(passed),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=passed,
                env=self._environment,
            )
        except OSError as exc:
            return exc
        except (ValueError, subprocess.SubprocessError) as exc:
            return OSError(errno.EINVAL, str(exc))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _leave_descriptors(kept: int) -> None:
    """Give this thread a table of descriptors of its own, with *kept* and the standard ones, if the
    kernel supports that (Linux 5.9 or newer) and permits it.
    """
    arguments = ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(kept + 1), ctypes.c_uint(_LAST)
    if ctypes.CDLL(None).syscall(*arguments, ctypes.c_int(_UNSHARE)) == 0:
        os.closerange(3, kept)


_spawner: Spawner | None = None


def start_spawner() -> Spawner:
    """Return the spawner. The first call starts it, best before a client passes a descriptor."""
    global _spawner
    if _spawner is None:
        _spawner = Spawner()
    return _spawner
