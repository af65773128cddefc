"""The machine's memory: free bytes, and the time for which tasks stalled on memory.

Each value is read from /proc and the version 2 cgroup of this process on each call. A value is
unknown if its file is missing or unreadable; only /proc/meminfo must exist.
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
kernel accepts only windows that are multiples of 2 s (Documentation/accounting/psi.rst).
"""


class MachineMemory:
    """The memory of the machine and of this process's cgroups."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")):
        self._proc, self._cgroups = proc, cgroups

    def free_bytes(self) -> int:
        """Return the bytes that models may allocate now."""
        free = parse_available_bytes((self._proc / "meminfo").read_text())
        limited = cgroup_free_bytes(self._cgroups, self._cgroup())
        return free if limited is None else min(free, limited)

    def total_bytes(self) -> int:
        """Return the machine's bytes, or its cgroups' limit."""
        total = parse_total_bytes((self._proc / "meminfo").read_text())
        limit = cgroup_limit_bytes(self._cgroups, self._cgroup())
        return total if limit is None else min(total, limit)

    def anonymous_bytes(self, pid: int) -> int:
        """Return the bytes of a process that the machine does not count as free."""
        fields = _text(self._proc / f"{pid}/statm").split()
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE") if fields else 0

    def stalled_s(self) -> float | None:
        """Return the seconds for which any task stalled on memory; None: unknown."""
        return parse_stalled_s(_text(self._machine_pressure))

    def own_stalled_s(self) -> float | None:
        """Return the seconds for which a task of this cgroup stalled; None: unknown."""
        path = self._own_pressure
        return parse_stalled_s(_text(path)) if path is not None else None

    def alarm(self) -> StallAlarm:
        """Return an alarm that wakes when tasks stall."""
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
    """Triggers of the kernel's pressure stall information (PSI). One task waits for them.

    A file that is missing or not writable has no trigger; its stalls are found by polling.
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
        """Wait for an alarm for at most *seconds*; return whether one came."""
        with anyio.move_on_after(seconds) as scope:
            if not self._triggers:
                await anyio.sleep_forever()
            await anyio.wait_readable(self._epoll)
        for fd, events in self._epoll.poll(0):
            if events & select.EPOLLERR:  # its cgroup was removed; it would wake forever
                self._disarm(fd)
        return not scope.cancelled_caught

    def _arm(self, path: Path) -> None:
        """Write a trigger. The kernel fires it at most once per window while the file is open.

        :raises OSError: the file has no triggers.
        """
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            # Fail here for an ordinary file, which must not be written to.
            self._epoll.register(fd, select.EPOLLPRI)
            self._epoll.unregister(fd)
            os.write(fd, TRIGGER)
            self._epoll.register(fd, select.EPOLLPRI)  # again: epoll sees the trigger only now
        except OSError:
            os.close(fd)
            raise
        self._triggers[fd] = path

    def _disarm(self, fd: int) -> None:
        del self._triggers[fd]
        os.close(fd)

    def close(self) -> None:
        """Close the triggers."""
        for fd in tuple(self._triggers):
            self._disarm(fd)
        self._epoll.close()


def _text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def parse_available_bytes(meminfo: str) -> int:
    """Return the available bytes in the text of a /proc/meminfo, minus the headroom."""
    return _meminfo(meminfo, "MemAvailable") - headroom_bytes(parse_total_bytes(meminfo))


def parse_total_bytes(meminfo: str) -> int:
    """Return all bytes in the text of a /proc/meminfo."""
    return _meminfo(meminfo, "MemTotal")


def _meminfo(text: str, key: str) -> int:
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields[key].split()[0]) * 1024


def parse_stalled_s(text: str) -> float | None:
    """Return the stalled seconds in the text of a /proc/pressure/memory; None: it has none."""
    found = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
    return int(found[1]) / 1e6 if found is not None else None
