"""A worker's process: its start, its environment, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

import anyio
import anyio.abc

from ...backends.errors import LoadFailed
from ...scheduler.process.build import EXIT_OTHER_BUILD, build_id

QUIT_S = 5.0
"""A worker that still runs so long after its socket was closed is killed."""
BUILD_ID = build_id()
"""The build that this daemon was loaded from: an upgrade may replace the files while it runs."""
SPINS, SPIN_COUNT = "GOMP_SPINCOUNT", 10_000
"""libgomp's variable; two tenths of a millisecond. Threads that sleep at once wait for each other
in the kernel, many times a step: a third of the speed.
"""


async def spawn_worker(line: socket.socket, record: int, stderr: int) -> anyio.abc.Process:
    """Start a worker process with its end of the *line* and the *record* that it writes its
    activity into.
    """
    arguments = [BUILD_ID, str(line.fileno()), str(os.getpid()), str(record)]
    return await anyio.open_process(
        [sys.executable, "-P", "-m", "inferd.scheduler.process.worker", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        pass_fds=(line.fileno(), record),
        env=_environment(),
    )


async def wait_for_exit(process: anyio.abc.Process) -> int:
    """Wait for a process to exit, and kill it after `QUIT_S`; return its exit code."""
    with anyio.move_on_after(QUIT_S):
        return await process.wait()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


def describe_exit(code: int | None) -> str:
    """Return in words how a process exited; None: its exit code is unknown."""
    if code is None:
        return "it is gone"
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"exit status {code}"


def load_failed(model: str, code: int | None) -> LoadFailed:
    """Return the error of a load whose process ended before the model was loaded."""
    if code == EXIT_OTHER_BUILD:
        return LoadFailed(
            f"{model!r} cannot be loaded: the daemon's files on disk are those of another version"
            " of inferd",
            hint="restart the daemon: it was upgraded while it ran",
            data={"cause": "upgraded"},
        )
    return LoadFailed(
        f"loading {model!r} ended the worker process ({describe_exit(code)})",
        hint="the file is probably damaged, or memory ran out: see the daemon's log",
        data={"cause": "died"},
    )


def _environment() -> dict[str, str]:
    """Return a worker's environment. Where llama.cpp was built with OpenMP, its threads spin for a
    moment between steps, unless the operator configures how they wait.

    They would for milliseconds, and hold the core on which the daemon is to wake with the step's
    tokens: it then takes the worker's own. (Two cores, SmolLM2, one stream, 2026-11-22: with
    30 000 the step's tokens were told before they slept, and daemon and client took the worker's
    core for 0.3 ms a token, while the other one spun: 144 tokens/s instead of 150.)
    """
    if os.environ.keys() & {"OMP_WAIT_POLICY", SPINS}:
        return dict(os.environ)
    return os.environ | {SPINS: str(SPIN_COUNT)}
