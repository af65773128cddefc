"""The machine's memory, stalls and cores, within the limits of this process's cgroups.

Each value is read from /proc and the cgroups of versions 1 and 2 on each call. A value is unknown
if its file is missing or unreadable; only /proc/meminfo must exist.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import anyio

PROC, CGROUPS, DEV = Path("/proc"), Path("/sys/fs/cgroup"), Path("/dev")
GPUS = ("nvidia[0-9]*", "kfd", "dri/renderD*")
"""Device files of GPUs."""
TRIGGER = b"some 200000 2000000\0"
"""200 ms of stalls within 2 s, as systemd's `MemoryPressureThresholdSec=`. Without privileges the
kernel accepts only windows that are multiples of 2 s (Documentation/accounting/psi.rst).
"""
HEADROOM_BYTES_MAX = 1 << 30


def headroom_bytes(total: int) -> int:
    """Return the headroom for other programs: a twentieth of *total* bytes, at most 1 GiB."""
    return min(total // 20, HEADROOM_BYTES_MAX)


def cores_usable(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return how many cores this process may use by its affinity and by its cgroups' quota."""
    quota = _tightest(_quota_in, cgroup_folders(cgroups, _membership(proc), "cpu"))
    affinity = len(os.sched_getaffinity(0))
    return max(1, round(affinity if quota is None else min(affinity, quota)))


def address_space_limit() -> int | None:
    """Return the bytes of address space that each process may have (`ulimit -v`), or None."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def has_gpus(dev: Path = DEV) -> bool:
    """Return whether the machine has a device that may run layers, whether it is used or not."""
    return any(next(dev.glob(pattern), None) is not None for pattern in GPUS)


class MachineMemory:
    """The memory of the machine and of this process's cgroups."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS):
        self._proc, self._cgroups = proc, cgroups
        self._machine_pressure = proc / "pressure" / "memory"

    def free_bytes(self) -> int:
        """Return the bytes that models may allocate now."""
        free = parse_available_bytes((self._proc / "meminfo").read_text())
        limited = cgroup_free_bytes(self._memory_folders())
        return free if limited is None else min(free, limited)

    def total_bytes(self) -> int:
        """Return the machine's bytes, or its cgroups' limit."""
        total = parse_total_bytes((self._proc / "meminfo").read_text())
        limit = _tightest(_limit_in, self._memory_folders())
        return total if limit is None else int(min(total, limit))

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

    def _memory_folders(self) -> list[Path]:
        return cgroup_folders(self._cgroups, _membership(self._proc), "memory")

    @property
    def _own_pressure(self) -> Path | None:
        """The file of this cgroup's stalls; only version 2 has one."""
        cgroup = parse_cgroup_path(_membership(self._proc)).strip("/")
        return _unified(self._cgroups) / cgroup / "memory.pressure" if cgroup else None


class OomKills:
    """The processes of this cgroup, or of the machine, that the kernel killed to free memory."""

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS):
        self._proc, self._cgroups = proc, cgroups
        self._claimed = self._count()

    def note_kills(self) -> None:
        """Disregard the kills until now, which were of other processes."""
        self._claimed = self._count()

    def claim_kill(self) -> bool:
        """Return whether there was a kill that no earlier call has claimed."""
        if self._count() <= self._claimed:
            return False
        self._claimed += 1
        return True

    def _count(self) -> int:
        found = _cgroups(self._cgroups, _membership(self._proc), "memory")
        counters = [own / version.oom_kills for own, *_ in found for version in _MEMORY]
        # The root cgroup of version 2 has no counter of its own.
        for counter in (*counters, self._proc / "vmstat"):
            if (kills := parse_oom_kills(_text(counter))) is not None:
                return kills
        return 0


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


# Cgroups.


class _MemoryFiles(NamedTuple):
    """The files of a cgroup's memory, and the fields of its statistics that count page cache."""

    limit: str
    used: str
    oom_kills: str
    cache_fields: tuple[str, str]


_MEMORY = (
    _MemoryFiles("memory.max", "memory.current", "memory.events", ("active_file", "inactive_file")),
    # The fields without "total_" leave out the cgroups below, which the other files count.
    _MemoryFiles(
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.oom_control",
        ("total_active_file", "total_inactive_file"),
    ),
)
"""The files of versions 2 and 1."""
_UNLIMITED_V1 = 1 << 62
"""Version 1 writes the largest multiple of a page below 2**63 where no limit is set."""


def cgroup_folders(cgroups: Path, membership: str, controller: str) -> list[Path]:
    """Return the folders of a process's cgroups that may limit *controller*, each followed by its
    ancestors. *membership* is the text of its /proc/self/cgroup, and *cgroups* the folder in which
    the hierarchies are mounted.

    A container may see the path of its cgroup on the host, but only its own cgroup in place of the
    root. Such a path has no folder here, so its ancestors lead to that root.
    """
    return [folder for found in _cgroups(cgroups, membership, controller) for folder in found]


def _cgroups(cgroups: Path, membership: str, controller: str) -> Iterator[list[Path]]:
    """Yield the folders of `cgroup_folders` by hierarchy; at least its root is among them."""
    for line in membership.splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mounts = [_unified(cgroups)] if number == "0" and not controllers else []
        if controller in controllers.split(","):
            mounts = [cgroups / name for name in (controllers, controller)]
        mount = next(filter(os.path.isdir, mounts), None)  # Path.is_dir can raise
        if mount is not None:
            folder = mount / path.lstrip("/")
            parts = [f for f in (folder, *folder.parents) if f.is_relative_to(mount)]
            yield list(filter(os.path.isdir, parts))


def _unified(cgroups: Path) -> Path:
    """Return the mount of version 2, which is a folder beside those of version 1 if both exist."""
    unified = cgroups / "unified"
    return unified if os.path.isdir(unified) else cgroups


def cgroup_free_bytes(folders: Iterable[Path]) -> int | None:
    """Return the free bytes within the limits of the cgroups in *folders*; None: no limit is set.

    The page cache counts as free, as in MemAvailable, since the kernel drops it when memory is
    needed.
    """
    free = _tightest(_free_in, folders)
    return None if free is None else int(free)


def _membership(proc: Path) -> str:
    return _text(proc / "self/cgroup")


def _tightest(read: Callable[[Path], float | None], folders: Iterable[Path]) -> float | None:
    """Return the least value that *read* returns for one of *folders*, or None."""
    return min((value for f in folders if (value := read(f)) is not None), default=None)


def _limit_in(folder: Path) -> int | None:
    for version in _MEMORY:
        limit = _number(folder / version.limit)
        if limit is not None and limit < _UNLIMITED_V1:
            return limit
    return None  # no limit ("max"), or no memory controller here


def _quota_in(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()  # version 2: a quota or "max", and the period
    if not words:
        words = [_text(folder / f"cpu.cfs_{file}_us").strip() for file in ("quota", "period")]
    try:
        quota, period = map(int, words)
    except ValueError:  # no quota, or no cpu controller here
        return None
    return quota / period if quota > 0 and period > 0 else None  # version 1: -1 without a quota


def _free_in(folder: Path) -> int | None:
    limit = _limit_in(folder)
    if limit is None:
        return None
    for version in _MEMORY:
        used = _number(folder / version.used)
        if used is not None:
            statistics = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.M))
            cache = sum(int(statistics.get(field, "0")) for field in version.cache_fields)
            return limit - (used - min(used, cache)) - headroom_bytes(limit)
    return None


def _number(file: Path) -> int | None:
    try:
        return int(_text(file))
    except ValueError:
        return None


# Texts of the kernel.


def _text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def parse_cgroup_path(text: str) -> str:
    """Return the path of the version 2 cgroup in the text of a /proc/self/cgroup."""
    found = re.search(r"^0::(.*)", text, re.MULTILINE)
    return found[1] if found is not None else "/"


def parse_available_bytes(meminfo: str) -> int:
    """Return the available bytes in the text of a /proc/meminfo, minus the headroom."""
    return _meminfo(meminfo, "MemAvailable") - headroom_bytes(parse_total_bytes(meminfo))


def parse_total_bytes(meminfo: str) -> int:
    """Return all bytes in the text of a /proc/meminfo."""
    return _meminfo(meminfo, "MemTotal")


def _meminfo(text: str, key: str) -> int:
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields[key].split()[0]) * 1024


def parse_oom_kills(text: str) -> int | None:
    """Return the OOM kills in the text of a memory.events or a /proc/vmstat; None: unknown."""
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return None if found is None else int(found[1])


def parse_stalled_s(text: str) -> float | None:
    """Return the stalled seconds in the text of a /proc/pressure/memory; None: it has none."""
    found = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
    return int(found[1]) / 1e6 if found is not None else None
