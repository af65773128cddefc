"""Start, environment, exit and silence of a worker's process.

A new process begins with a copy of its parent's descriptors, and closes all but its own. A client
can pass a descriptor whose close never ends (a file of its own FUSE server), or takes as long as it
wants (a TCP socket with SO_LINGER). The daemon, which waits for the new process, would wait, too.
So the thread that starts workers has a table of descriptors of its own (`close_range(2)`), and gets
those of a worker through a socket pair. Numbers of descriptors mean other files in it than
elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from ...backends.errors import LoadFailed
from ...backends.fd_frames import read_with_descriptors
from ...scheduler.build import build_id
from ...scheduler.record import ActivityKind, Recorder

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

    def fileno(self) -> int:
        """Return the descriptor that is readable once the process has exited."""
        return self._pidfd

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

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
        self._first_is_stdin = False
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
        *,
        first_is_stdin: bool = False,
    ) -> SpawnedProcess:
        """Start a process that has *descriptors* and *stderr*. *command* gets the descriptors'
        numbers in the new process, in which the first one can be the standard input instead.

        :raises OSError: the process cannot be started.
        :raises LoadFailed: the thread has ended.
        """
        async with self._lock:
            self._command, self._environment = command, environment
            self._first_is_stdin = first_is_stdin
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
            stdin = passed.pop(0) if self._first_is_stdin else subprocess.DEVNULL
            return self._popen(
                self._command(passed),
                stdin=stdin,
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


BUILD_ID = build_id()
"""The build that this daemon runs; an upgrade may replace the files meanwhile."""
SPINS, SPIN_COUNT = "GOMP_SPINCOUNT", 10_000
"""libgomp's variable, and 0.2 ms of spinning. Threads that sleep at once wait for each other in the
kernel, many times a step.
"""
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""numpy's OpenBLAS, which nothing uses, starts a thread for each further core when it is imported.
They spin for a while: 0.05 s of CPU time of each worker's start, with two cores.
"""
_CPUCLOCK_SCHED = 2
"""The low bits of the id of a process's CPU clock, as in `clock_getcpuclockid` of glibc."""


async def spawn_worker(sock: socket.socket, record: int, stderr: int) -> SpawnedProcess:
    """Start a worker process with its end of the socket pair, *sock*, and the shared *record*, to
    which it writes its activity.
    """
    return await start_spawner().spawn(
        _command, environment_of_workers(), (sock.fileno(), record), stderr
    )


async def spawn_program(
    module: str, stdin: socket.socket, stderr: int, *arguments: str
) -> SpawnedProcess:
    """Start a program of inferd with its end of a socket pair as its standard input.

    :raises OSError: it cannot be started.
    :raises LoadFailed: the thread that starts processes has ended.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    return await start_spawner().spawn(
        lambda _: command,
        environment_of_workers(),
        (stdin.fileno(),),
        stderr,
        first_is_stdin=True,
    )


def _command(descriptors: Sequence[int]) -> list[str]:
    sock, record = map(str, descriptors)
    arguments = [BUILD_ID, sock, str(os.getpid()), record]
    return [sys.executable, "-P", "-m", "inferd.scheduler.worker", *arguments]


def describe_exit(code: int | None) -> str:
    """Return how a process exited, in words; *code* is None if it is unknown."""
    if code is None:
        return "exit status unknown"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit status {code}"


def other_build(model: str) -> LoadFailed:
    """Return the error of a load whose process ended with `EXIT_OTHER_BUILD`."""
    return LoadFailed(
        f"{model!r} cannot be loaded: the daemon's files on disk are those of another version"
        " of inferd",
        hint="restart the daemon: it was upgraded while it ran",
        data={"cause": "upgraded"},
    )


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, or 0 if it has exited."""
    try:
        return time.clock_gettime(~pid << 3 | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def usage_of(pid: int) -> tuple[bytes, ...]:
    """Return a process's counters of file access and memory, as values to compare."""
    used = []
    for name in ("io", "statm"):
        with suppress(OSError):  # it has exited, or hides them
            used.append(Path(f"/proc/{pid}/{name}").read_bytes())
    return tuple(used)


def environment_of_workers() -> dict[str, str]:
    """Return the environment of processes that compute. If llama.cpp was built with OpenMP, its
    threads spin for 0.2 ms between steps, unless the operator configures how they wait.

    By default they spin for milliseconds. They then occupy the core on which the daemon should wake
    to send the step's tokens, so the daemon runs on the worker's core. (Two cores, SmolLM2, one
    stream, 2026-11-22: with 30 000 spins the tokens were sent before the threads slept. Daemon and
    client used the worker's core for 0.3 ms a token while the other core spun: 144 tokens/s, not
    150.)
    """
    environment = os.environ | ONE_BLAS_THREAD
    if not environment.keys() & {"OMP_WAIT_POLICY", SPINS}:
        environment[SPINS] = str(SPIN_COUNT)
    return environment


CHECKS = 4
"""Number of checks within the time for which a worker with work may make no progress."""
BUSY_SHARE = 0.05
"""The least share of one core's time that a computation gets beside other programs."""


class HangDetector:
    """Calls *kill* if a worker with work (*is_awaited* returns True) has made no progress for
    *hang_s*. Lives on the daemon's event loop. No timer runs while the worker has no work.

    *cpu_s* returns the CPU time that the worker has used. A hung worker that uses none is stopped
    or waits for a file.
    """

    def __init__(
        self,
        recorder: Recorder,
        hang_s: float,
        is_awaited: Callable[[], bool],
        kill: Callable[[], None],
        seconds: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.process_time,
    ):
        self._recorder, self._hang_s = recorder, hang_s
        self._is_awaited, self._kill = is_awaited, kill
        self._seconds, self._cpu_s = seconds, cpu_s
        self.used_cpu = False
        """Whether the worker used CPU time between the last two checks."""
        self._cpu_before_s = 0.0
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def note_command(self) -> None:
        """Note that a command was sent, which the worker has to read."""
        if self._recorder.began_at >= self._sent_at:
            self._sent_at = self._seconds()  # else an earlier unread command counts
        self.watch()

    def watch(self) -> None:
        """Check the progress from now on, as long as the worker has work."""
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def overdue(self) -> bool:
        """Whether the worker should have been killed by now, and still has its work."""
        last_check_s = self._hang_s * (1 + 1 / CHECKS)
        return self._is_awaited() and self._silent_s() > last_check_s + KILLED_S

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._cpu_before_s = self._cpu_s()
        self._timer = loop.call_later(self._hang_s / CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_awaited():
            return
        if self._silent_s() > self._hang_s:
            used_s = self._cpu_s() - self._cpu_before_s
            self.used_cpu = used_s > BUSY_SHARE * self._hang_s / CHECKS
            self._kill()
        else:
            self._arm()

    def _silent_s(self) -> float:
        """Return the seconds for which its activity has not changed or a command was not read."""
        act, now = self._recorder.read_activity(), self._seconds()
        if act.kind is ActivityKind.IDLE:
            return now - self._sent_at if act.at < self._sent_at else 0.0
        return now - act.at


async def stands_still(
    ended: anyio.Event, hang_s: float, signs: Callable[[], object | None]
) -> bool:
    """Wait for *ended*, or until *signs* have stayed the same for *hang_s*; return whether they
    have. They are None while no progress is expected.
    """
    same = 0
    before: object | None = None
    # Checks are counted, not time, because the daemon may be frozen together with the worker.
    while same < CHECKS:
        with anyio.move_on_after(hang_s / CHECKS):
            await ended.wait()
            return False
        now = signs()
        same, before = same + 1 if before is not None and now == before else 0, now
    return True
