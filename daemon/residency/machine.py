"""What the machine says of its memory: free bytes, and the time in which tasks waited for some.

Read from /proc and the version 2 cgroup that this process is in, anew each time. Where a file is
missing or may not be read, what it would say is not known; only /proc/meminfo must be there.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Iterable
from pathlib import Path

import anyio

from .cgroups import cgroup_free_bytes, cgroup_limit_bytes, parse_cgroup_path
from .fit import available_bytes, stalled_s, total_bytes

__all__ = ("MachineMemory", "StallAlarm")

TRIGGER = b"some 200000 2000000\0"
"""200 ms of stalls within 2 s, as systemd's `MemoryPressureThresholdSec=`. Without privileges the
kernel takes windows of whole multiples of 2 s alone (Documentation/accounting/psi.rst).
"""


class MachineMemory:
    """What the machine and this process's cgroups have; read anew each time."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")):
        self._proc, self._cgroups = proc, cgroups

    def free_bytes(self) -> int:
        """Return the bytes that models may take now."""
        free = available_bytes((self._proc / "meminfo").read_text())
        limited = cgroup_free_bytes(self._cgroups, self._cgroup())
        return free if limited is None else min(free, limited)

    def total_bytes(self) -> int:
        """Return the bytes that there are: the machine's, or its cgroups' limit."""
        total = total_bytes((self._proc / "meminfo").read_text())
        limit = cgroup_limit_bytes(self._cgroups, self._cgroup())
        return total if limit is None else min(total, limit)

    def anonymous_bytes(self, pid: int) -> int:
        """Return the memory of a process that free memory does not count any more."""
        fields = _text(self._proc / f"{pid}/statm").split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if fields else 0

    def stalled_s(self) -> float | None:
        """Return the seconds in which a task anywhere waited for memory; None: it is not told."""
        return stalled_s(_text(self._machine_pressure))

    def own_stalled_s(self) -> float | None:
        """Return the seconds in which a task of this cgroup did."""
        path = self._own_pressure
        return stalled_s(_text(path)) if path is not None else None

    def alarm(self) -> StallAlarm:
        """Return what wakes when tasks stall."""
        return StallAlarm(p for p in (self._machine_pressure, self._own_pressure) if p is not None)

    @property
    def _machine_pressure(self) -> Path:
        return self._proc / "pressure" / "memory"

    @property
    def _own_pressure(self) -> Path | None:
        cgroup = self._cgroup().strip("/")
        return self._cgroups / cgroup / "memory.pressure" if cgroup else None

    def _cgroup(self) -> str:
        return parse_cgroup_path(_text(self._proc / "self/cgroup"))


class StallAlarm:
    """Triggers of the kernel's pressure stall information, until they are closed. One task waits.

    A file that is not there, or may not be written, has none: then it is looked at now and then.
    """

    def __init__(self, files: Iterable[Path]):
        self._epoll = select.epoll()
        self._triggers: dict[int, Path] = {}
        for path in files:
            with contextlib.suppress(OSError):
                self._arm(path)

    def __len__(self) -> int:
        return len(self._triggers)

    async def wait(self, seconds: float) -> bool:
        """Wait for an alarm, but no longer than *seconds*; tell whether there was one."""
        with anyio.move_on_after(seconds) as scope:
            if not self._triggers:
                await anyio.sleep_forever()
            await anyio.wait_readable(self._epoll)
        for fd, events in self._epoll.poll(0):
            if events & select.EPOLLERR:  # its cgroup is gone, and it would wake for ever
                self._disarm(fd)
        return not scope.cancelled_caught

    def _arm(self, path: Path) -> None:
        """Write a trigger; the kernel tells of it once a window, as long as the file is open.

        :raises OSError: there is none to be had.
        """
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # An ordinary file cannot be polled, and is not to be written to.
            self._epoll.register(fd, select.EPOLLPRI)
            self._epoll.unregister(fd)
            os.write(fd, TRIGGER)
            self._epoll.register(fd, select.EPOLLPRI)  # anew: now there is something to wait for
        except OSError:
            os.close(fd)
            raise
        self._triggers[fd] = path

    def _disarm(self, fd: int) -> None:
        del self._triggers[fd]
        os.close(fd)

    def close(self) -> None:
        """Let go of the triggers."""
        for fd in tuple(self._triggers):
            self._disarm(fd)
        self._epoll.close()


def _text(path: Path) -> str:
    """Return what a file says; nothing where it may not be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
