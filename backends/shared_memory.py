"""Memory that several processes map (memfd): of fixed size, which all of them write; and sealed,
which no process can change.

A reader of a mapping whose file was cut off would be ended by SIGBUS, and so would one of huge
pages that the system lacks. So the seals against another size are checked, and the file system.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import Sequence

from .errors import InvalidArgument, OutOfMemory, TooLarge

ALIGNMENT = 64
"""A tensor in a buffer begins at a multiple of this."""
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE, which Python 3.11 does not name."""
_NO_WRITES = fcntl.F_SEAL_WRITE | _FUTURE_WRITE
_SEALED = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_TMPFS = 0x01021994
_STATFS_BYTES = 256
"""More than the C library's struct, which begins with the kind of the file system as a long."""
_HINT = (
    "pass a memfd that is open for reading and writing and sealed with F_SEAL_SHRINK, F_SEAL_GROW"
    " and F_SEAL_SEAL"
)


def new_shared_memory(size: int) -> int:
    """Return a descriptor of shared memory of *size* bytes; the caller closes it.

    :raises OSError: too many files are open, or memory ran out.
    """
    descriptor = os.memfd_create("inferd-buffer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_shared_memory(descriptor: int, bytes_max: int) -> int:
    """Return the size of the shared memory behind a *descriptor* that a client has passed.

    :raises InvalidArgument: it is anything else, or its size can change.
    :raises TooLarge: it has more than *bytes_max*.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        size = os.fstat(descriptor).st_size
    except OSError:
        raise InvalidArgument("the descriptor is not that of a memfd", hint=_HINT) from None
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise InvalidArgument("the memory of the descriptor can still change its size", hint=_HINT)
    if seals & _NO_WRITES or flags & os.O_ACCMODE != os.O_RDWR:
        raise InvalidArgument("the memory of the descriptor cannot be written to", hint=_HINT)
    if _file_system_of(descriptor) != _TMPFS:
        raise InvalidArgument(
            "the memory of the descriptor has huge pages", hint="pass a memfd without MFD_HUGETLB"
        )
    if not 0 < size <= bytes_max:
        raise TooLarge(
            f"a buffer of {size} bytes; a buffer has 1 to {bytes_max}",
            hint="register a smaller one, or raise buffer-bytes-user-max",
            data={"bytes": size, "bytes_max": bytes_max},
        )
    return size


def allocate(descriptor: int, size: int) -> None:
    """Allocate all pages of shared memory, so that no later access to one can fail.

    :raises OutOfMemory: the system lacks memory.
    """
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as exc:
        raise OutOfMemory(
            f"there is no memory for a buffer of {size} bytes: {exc.strerror}",
            hint="register a smaller one, unload models or end other programs",
            data={"bytes": size},
        ) from None


def _file_system_of(descriptor: int) -> int:
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None, use_errno=True).fstatfs(descriptor, found) != 0:
        return -1
    return ctypes.c_long.from_buffer(found).value & 0xFFFF_FFFF


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
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALED | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sealed_bytes(descriptor: int) -> int:
    """Return the size of the sealed memory behind *descriptor*; -1 if it is anything else."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALED != _SEALED:
            return -1
        return os.fstat(descriptor).st_size
    except (OSError, ValueError):  # ValueError: a negative number
        return -1
