"""The machine's memory: free bytes, and the time in which tasks waited for memory.

Each value is read anew from /proc and the version 2 cgroup of this process. A value whose file is
missing or unreadable is unknown; only /proc/meminfo must exist.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Iterable
from pathlib import Path

import anyio

from .cgroups import cgroup_free_bytes, cgroup_limit_bytes, parse_cgroup_path
from .sizes import headroom_bytes

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
        free = parse_available_bytes((self._proc / "meminfo").read_text())
        limited = cgroup_free_bytes(self._cgroups, self._cgroup())
        return free if limited is None else min(free, limited)

    def total_bytes(self) -> int:
        """Return the bytes that there are: the machine's, or its cgroups' limit."""
        total = parse_total_bytes((self._proc / "meminfo").read_text())
        limit = cgroup_limit_bytes(self._cgroups, self._cgroup())
        return total if limit is None else min(total, limit)

    def anonymous_bytes(self, pid: int) -> int:
        """Return the memory of a process that free memory does not count any more."""
        fields = _text(self._proc / f"{pid}/statm").split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if fields else 0

    def stalled_s(self) -> float | None:
        """Return the seconds in which a task anywhere waited for memory; None: it is not told."""
        return parse_stalled_s(_text(self._machine_pressure))

    def own_stalled_s(self) -> float | None:
        """Return the seconds in which a task of this cgroup did."""
        path = self._own_pressure
        return parse_stalled_s(_text(path)) if path is not None else None

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


def parse_available_bytes(meminfo: str) -> int:
    """Return the available bytes in a text in the form of /proc/meminfo, less the headroom."""
    return _meminfo(meminfo, "MemAvailable") - headroom_bytes(parse_total_bytes(meminfo))


def parse_total_bytes(meminfo: str) -> int:
    """Return all bytes in a text in the form of /proc/meminfo."""
    return _meminfo(meminfo, "MemTotal")


def _meminfo(text: str, key: str) -> int:
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields[key].split()[0]) * 1024


def parse_stalled_s(text: str) -> float | None:
    """Return for how long some task waited, by a text in the form of /proc/pressure/memory; None:
    the text has no such line.
    """
    found = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
    return int(found[1]) / 1e6 if found is not None else None
