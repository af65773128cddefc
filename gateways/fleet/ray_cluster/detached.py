"""Processes that outlive the process that starts them, each found by the lock that it holds.

`python -m inferd.gateways.fleet.ray_cluster.detached LOCK LOG COMMAND…` starts one, unless its lock
is held. It takes the lock between fork and exec, so that there is never a second one. The kernel
releases the lock when the process ends. As the processes are not children, their ends are waited
for by descriptors.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ....backends.errors import BackendError


def has_ended_within(process: int, seconds: float | None, *others: int) -> bool:
    """Wait until the process of the descriptor *process* (pidfd) has ended, or one of the *others*
    can be read, and return whether it has ended.
    """
    return process in _readable(seconds, process, *others)


def wait_readable(seconds: float, descriptor: int) -> bool:
    """Wait until *descriptor* can be read, and return whether it can."""
    return bool(_readable(seconds, descriptor))


def _readable(seconds: float | None, *descriptors: int) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    found = poll.poll(None if seconds is None else 1000 * seconds)
    return [descriptor for descriptor, _ in found]


MODULE = "inferd.gateways.fleet.ray_cluster.detached"
END_S_MAX = 30.0
"""Time that a process has to end after SIGTERM."""
START_S_MAX = 30.0
_FLOCK = struct.Struct("hhqqi4x")
"""The kernel's `struct flock`: type, whence, start, length, process id."""


class Detached(NamedTuple):
    """A process that is to run: its lock, the file of its output, its command."""

    lock: Path
    log: Path
    command: Sequence[str]
    environment: Mapping[str, str]

    def find(self) -> int | None:
        """Return a descriptor of the process (pidfd), or None if it does not run."""
        process = holder_of(self.lock)
        if process is None:
            return None
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            return None
        if holder_of(self.lock) == process:  # else the id may be another process's by now
            return descriptor
        os.close(descriptor)
        return None

    def start(self) -> None:
        """Start the process, unless it runs.

        :raises BackendError: it cannot be started.
        """
        launcher = (sys.executable, "-P", "-m", MODULE, str(self.lock), str(self.log))
        found = subprocess.run(
            [*launcher, *self.command],
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=START_S_MAX,
            check=False,
        )
        if found.returncode:
            cause = (found.stderr.strip().splitlines() or ["unknown"])[-1]
            raise BackendError(f"{self.command[0]} cannot be started: {cause}")

    def end(self) -> None:
        descriptor = self.find()
        if descriptor is None:
            return
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
            if not has_ended_within(descriptor, END_S_MAX):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                has_ended_within(descriptor, END_S_MAX)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)


def holder_of(lock: Path) -> int | None:
    """Return the id of the process that holds *lock*, if there is one."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, query))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else int(process)


def launch(lock: str, log: str, command: Sequence[str]) -> int:
    """Start *command* in a session of its own; return 0 once it holds the lock or another does."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    if os.fork():
        os.close(writer)
        return 0 if os.read(reader, 1) == b"." else 1
    os.setsid()
    # Closing any descriptor of the file releases the lock, so the process keeps this one for life.
    held = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(held, True)
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.write(writer, b".")
        os._exit(0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(output, 1)
    os.write(writer, b".")
    os.dup2(output, 2)
    os.execv(command[0], list(command))


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1], sys.argv[2], sys.argv[3:]))
