"""Giving memory that was freed back to the machine."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Let glibc return what is free inside its heap; other C libraries do so by themselves.

    Without it 36 of 412 MB came back of states of 0.2 to 3 MB that lay among small objects: freed
    blocks of that size raise glibc's threshold, and the next ones come from the heap. Takes 23 ms.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
