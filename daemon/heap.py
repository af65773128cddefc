"""The settings of the C library's heap."""

from __future__ import annotations

import ctypes

_MMAP_THRESHOLD = -3
"""glibc's number for `mallopt`."""
MMAP_BYTES = 128 << 10
"""glibc's own threshold at the start."""


def return_large_blocks() -> None:
    """Have glibc return all large blocks to the system as soon as they are freed.

    By itself, it takes later blocks from its heap once a block of their size was freed. There,
    small objects behind them keep the memory: up to 30 MB after unfinished frames of 1 MiB.
    """
    configure = getattr(ctypes.CDLL(None), "mallopt", None)
    if configure is not None:
        configure(_MMAP_THRESHOLD, MMAP_BYTES)
