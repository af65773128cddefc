"""Memory and CPU limits of the version 2 cgroups that a process is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .sizes import headroom_bytes

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def cores_usable(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the number of cores that this process may use: its affinity or its cgroups' quota."""
    folders = _with_ancestors(cgroups, _own_cgroup(proc))
    quotas = [quota for quota in map(_quota_in, folders) if quota is not None]
    return max(1, round(min([len(os.sched_getaffinity(0)), *quotas])))


def memory_usable(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that this process may use: the machine's, or its cgroups' limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_limit_bytes(cgroups, _own_cgroup(proc))
    return machine if limit is None else min(machine, limit)


def _own_cgroup(proc: Path) -> str:
    try:
        return parse_cgroup_path((proc / "self/cgroup").read_text())
    except (OSError, UnicodeDecodeError):
        return "/"


def parse_cgroup_path(text: str) -> str:
    """Return the path of the version 2 cgroup in the text of a /proc/self/cgroup."""
    paths = (line.removeprefix("0::") for line in text.splitlines() if line.startswith("0::"))
    return next(paths, "/")


def cgroup_free_bytes(root: Path, path: str) -> int | None:
    """Return the free bytes within the limits of a cgroup and its ancestors; None: no limit is set.

    The page cache counts as free, as in MemAvailable: the kernel drops it when memory is needed.
    """
    found = [_free_in(folder) for folder in _with_ancestors(root, path)]
    return min((free for free in found if free is not None), default=None)


def cgroup_limit_bytes(root: Path, path: str) -> int | None:
    """Return the tightest limit of a cgroup and its ancestors; None: no limit is set."""
    found = [_limit_in(folder) for folder in _with_ancestors(root, path)]
    return min((limit for limit in found if limit is not None), default=None)


def _with_ancestors(root: Path, path: str) -> Iterator[Path]:
    folder = root / path.lstrip("/")
    for ancestor in (folder, *folder.parents):
        yield ancestor
        if ancestor == root:
            return


def _limit_in(folder: Path) -> int | None:
    try:
        return int((folder / "memory.max").read_text())
    except (OSError, ValueError):  # no limit ("max"), or no memory controller here
        return None


def _quota_in(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # no quota ("max"), or no cpu controller here
        return None


def _free_in(folder: Path) -> int | None:
    limit = _limit_in(folder)
    if limit is None:
        return None
    try:
        used = int((folder / "memory.current").read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    statistics = dict(line.split(" ", 1) for line in lines if " " in line)
    cache = sum(int(statistics.get(key, "0")) for key in ("active_file", "inactive_file"))
    return limit - (used - min(used, cache)) - headroom_bytes(limit)
