"""The memory of processes, as the kernel reports it."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    """Return the memory that a process occupies now: its own, and pages of files such as mapped
    weights (RSS; `Pss` would need a walk over all pages). It is 0 if the process has exited.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
