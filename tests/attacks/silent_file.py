"""A FUSE file system with one file, which answers neither reads nor the flush of a close."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SIZE_BYTES = 4096
_LOOKUP, _GETATTR, _OPEN, _INIT = 1, 3, 14, 26
_HEADER = struct.Struct("<IIQQIIIHH")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_ROOT = 1
_FORCE, _DETACH = 1, 2


def _attributes(node: int) -> bytes:
    mode = 0o40755 if node == _ROOT else 0o100444
    return _ATTRIBUTES.pack(node, SIZE_BYTES, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _init(_: int) -> bytes:
    return struct.pack("<IIIIHHIIHHII24x", 7, 31, 4096, 0, 12, 9, 4096, 1, 1, 0, 0, 0)


def _lookup(_: int) -> bytes:
    return struct.pack("<QQQQII", 2, 0, 60, 60, 0, 0) + _attributes(2)


def _getattr(node: int) -> bytes:
    return struct.pack("<QII", 60, 0, 0) + _attributes(node)


def _open(_: int) -> bytes:
    return struct.pack("<QIi", 1, 0, 0)


_ANSWERS: dict[int, Callable[[int], bytes]] = {
    _INIT: _init,
    _LOOKUP: _lookup,
    _GETATTR: _getattr,
    _OPEN: _open,
}
"""All other requests stay without an answer."""


def _serve(device: int) -> None:
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            return  # the file system was unmounted
        _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
        if opcode in _ANSWERS:
            body = _ANSWERS[opcode](node)
            os.write(device, struct.pack("<IiQ", 16 + len(body), 0, unique) + body)


@contextmanager
def silent_file() -> Iterator[int]:
    """Yield the descriptor of a regular file of a FUSE server that answers no read and no flush.

    Only root can mount it. The end of the block ends every operation that waits for an answer.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    with tempfile.TemporaryDirectory(prefix="inferd-fuse-") as folder:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if libc.mount(b"inferd-test", os.fsencode(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), "mount")
        threading.Thread(target=_serve, args=(device,), daemon=True).start()
        fd = -1
        try:
            fd = os.open(Path(folder) / "file", os.O_RDONLY | os.O_CLOEXEC)
            yield fd
        finally:
            libc.umount2(os.fsencode(folder), _FORCE)  # aborts all requests
            libc.umount2(os.fsencode(folder), _DETACH)
            if fd >= 0:
                with suppress(OSError):  # the file system has ended
                    os.close(fd)
            os.close(device)
