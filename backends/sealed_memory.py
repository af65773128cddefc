"""Sealed memory (memfd): bytes that nobody can change or cut off, for another process to map.

The reader of a mapping whose file is cut off would be ended by SIGBUS, so it checks the seals.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence

_REQUIRED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def sealed_memory(parts: Sequence[bytes | memoryview]) -> int:
    """Return a descriptor of sealed memory with *parts* one after the other; the caller closes it.

    :raises OSError: too many files are open, or memory ran out.
    """
    descriptor = os.memfd_create("inferd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            view = memoryview(part)
            while view.nbytes:
                view = view[os.write(descriptor, view) :]
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _REQUIRED | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sealed_bytes(descriptor: int) -> int:
    """Return the size of the sealed memory behind *descriptor*; -1 if it is anything else."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _REQUIRED != _REQUIRED:
            return -1
        return os.fstat(descriptor).st_size
    except (OSError, ValueError):  # ValueError: a negative number
        return -1
