"""Open descriptors as C `FILE` objects, so that llama.cpp reads the file that was checked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import LoadFailed


@contextmanager
def c_file(fd: int, name: str) -> Iterator[Any]:
    """Yield a ``FILE *`` at the beginning of the descriptor *fd*.

    :raises LoadFailed: the descriptor cannot be read.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fdopen.argtypes, libc.fdopen.restype = [ctypes.c_int, ctypes.c_char_p], ctypes.c_void_p
    libc.fclose.argtypes = [ctypes.c_void_p]
    # A duplicate shares its position with the original descriptor.
    os.lseek(fd, 0, os.SEEK_SET)
    own = os.dup(fd)
    stream = libc.fdopen(own, b"rb")
    if not stream:
        os.close(own)
        raise LoadFailed(f"{name!r} cannot be read: {os.strerror(ctypes.get_errno())}")
    try:
        yield stream
    finally:
        libc.fclose(stream)
