"""Supervision of a node's daemon and relay, which outlive their supervisor.

The next supervisor finds them by their locks and goes on with them, so that a loss of Ray ends
neither a turn nor a session.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....backends.errors import InferdError, InvalidArgument
from ..certificates import write_private
from .detached import Detached, has_ended_within, wait_readable

PLAN_FILE = "node.json"
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
"""Time before a process that has ended soon after its start is started again."""
SOUND_S = 10.0
"""Time after which a process counts as started."""
MANAGER_VARIABLES = frozenset(
    (
        *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "JOURNAL_STREAM", "INVOCATION_ID"),
        *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
    )
)
"""Variables of a service manager, which concern only the process that the manager has started."""


class NodePlan(msgspec.Struct, frozen=True):
    """The address of a node for entries, and its processes: their commands and their environment.

    The environment is that of the node's command, because Ray hides the GPUs from its workers.
    """

    address: str
    commands: dict[str, list[str]]
    environment: dict[str, str]

    @property
    def digest(self) -> str:
        """The version of the plan: the same for the same address and commands."""
        encoded = msgspec.json.encode((self.address, self.commands))
        return hashlib.sha256(encoded).hexdigest()[:16]

    def write(self, folder: Path) -> None:
        """Write the plan to the node's state directory, for its user alone.

        :raises InvalidArgument: it cannot be written.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(folder / PLAN_FILE, msgspec.json.encode(self))
        except OSError as exc:
            raise InvalidArgument(
                f"the state directory {folder} cannot be used: {exc.strerror or exc}",
                hint="choose another with --state-dir",
            ) from None


def withdraw_plan(folder: Path) -> None:
    """Remove the plan of a node: no supervisor starts a process for it after this."""
    with _locked(folder):
        (folder / PLAN_FILE).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock that keeps a supervisor from starting a process while the plan is removed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_plan(folder: Path) -> NodePlan:
    """Return the plan in a node's state directory.

    :raises OSError: there is no plan.
    """
    return msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=NodePlan)


def members_of(plan: NodePlan, folder: Path) -> dict[str, Detached]:
    """Return the processes of a plan, with their files in the state directory."""
    return {
        name: Detached(
            folder / f"{name}.lock", folder / f"{name}.output", command, plan.environment
        )
        for name, command in plan.commands.items()
    }


class _Start(NamedTuple):
    at: float
    retry_s: float


class NodeSupervisor:
    """Keeps the processes of the node whose state directory is *folder* running.

    One thread follows each; *note* is called from these threads with what has happened.
    """

    def __init__(self, folder: Path, note: Callable[[str], object]):
        self.plan, self._folder = read_plan(folder), folder
        self._members = members_of(self.plan, folder)
        self._note = note
        self._ending, self._end = os.pipe2(os.O_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._supervise, args=(name, member), daemon=True)
            for name, member in self._members.items()
        ]

    def begin(self) -> None:
        """Start the processes that do not run, and supervise all."""
        for thread in self._threads:
            thread.start()

    def is_sound(self) -> bool:
        """Return whether all processes are supervised."""
        return all(thread.is_alive() for thread in self._threads)

    def end(self) -> None:
        """End the supervision, then the relay and the daemon."""
        os.write(self._end, b".")
        for thread in self._threads:
            thread.join()
        for member in reversed(self._members.values()):
            member.end()

    def _supervise(self, name: str, member: Detached) -> None:
        last = _Start(-SOUND_S, RETRY_S_MIN)
        while True:
            process = member.find()
            if process is None:
                pause = time.monotonic() - last.at < SOUND_S
                if pause and wait_readable(last.retry_s, self._ending):
                    return
                if not self._start(name, member):
                    return
                retry_s = min(2 * last.retry_s, RETRY_S_MAX) if pause else RETRY_S_MIN
                last = _Start(time.monotonic(), retry_s)
                continue
            try:
                if not has_ended_within(process, None, self._ending):
                    return
            finally:
                os.close(process)
            self._note(f"the {name} has ended")

    def _start(self, name: str, member: Detached) -> bool:
        """Start a process; return False if the node has no plan any longer."""
        with _locked(self._folder):
            if not (self._folder / PLAN_FILE).exists():
                return False
            try:
                member.start()
            except (InferdError, OSError, subprocess.SubprocessError) as exc:
                self._note(f"the {name} does not start: {exc}")
        return True
