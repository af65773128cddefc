"""An open descriptor as C's stdio has files: what was checked is what llama.cpp reads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import LoadFailed


@contextmanager
def c_file(fd: int, name: str) -> Iterator[Any]:
    """Give the descriptor *fd*, from its beginning, as a ``FILE *``.

    :raises LoadFailed: it cannot be read.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fdopen.argtypes, libc.fdopen.restype = [ctypes.c_int, ctypes.c_char_p], ctypes.c_void_p
    libc.fclose.argtypes = [ctypes.c_void_p]
    # A dup shares its position with the descriptor that it was made of.
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
