"""Start, environment and exit of a worker's process."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...backends.errors import LoadFailed
from ...scheduler.process.build import build_id
from .spawner import SpawnedProcess, start_spawner

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
