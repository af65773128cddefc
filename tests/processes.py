"""Other processes, each of which may end at any moment, and the open files of this one."""

from __future__ import annotations

import gc
import os

import psutil

__all__ = ("command_of", "has_ended", "open_descriptors", "running_children")


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended; an unreaped one has."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def running_children(pid: int | None = None) -> list[psutil.Process]:
    """Return the children of a process, or of this one, that have not ended."""
    return [child for child in psutil.Process(pid).children() if not has_ended(child)]


def command_of(process: psutil.Process) -> list[str]:
    """Return the words of a process's command; none if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def open_descriptors() -> set[str]:
    """Return the descriptors of this process, without those of objects that nothing refers to:
    Python would close these at any moment.
    """
    gc.collect()
    found = os.listdir("/proc/self/fd")  # also that of the listing, which is closed now
    return {number for number in found if os.path.lexists(f"/proc/self/fd/{number}")}
