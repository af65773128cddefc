"""Start, environment, exit and silence of a worker's process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from ...backends.errors import LoadFailed
from ...scheduler.process.build import build_id
from ...scheduler.record import ActivityKind, Recorder
from .spawner import KILLED_S, SpawnedProcess, start_spawner

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
    return await start_spawner().spawn(_command, _environment(), (sock.fileno(), record), stderr)


def _command(descriptors: Sequence[int]) -> list[str]:
    sock, record = map(str, descriptors)
    arguments = [BUILD_ID, sock, str(os.getpid()), record]
    return [sys.executable, "-P", "-m", "inferd.scheduler.process.worker", *arguments]


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


def _environment() -> dict[str, str]:
    """Return a worker's environment. If llama.cpp was built with OpenMP, its threads spin for
    0.2 ms between steps, unless the operator configures how they wait.

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
        if self._recorder.read_activity().at >= self._sent_at:
            self._sent_at = self._seconds()  # else an earlier unread command counts
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
