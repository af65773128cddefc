"""The speed of this machine, for bounds on CPU time that hold for a reference machine."""

from __future__ import annotations

import time

__all__ = ("memory_slowness", "slowness")

COUNT_S = 0.012
"""The CPU time that the reference machine takes for the count below."""

COPY_BYTES, COPY_S = 8 << 20, 0.007
"""The CPU time that it takes to copy so many bytes into new memory."""


def slowness() -> float:
    """Return how many times slower than the reference this machine is now; at least 1."""
    best = min(_count_s() for _ in range(5))
    return max(1.0, best / COUNT_S)


def _count_s() -> float:
    began = time.thread_time()
    sum(i & 7 for i in range(250_000))
    return time.thread_time() - began


def memory_slowness() -> float:
    """As `slowness`, of copies into new memory, whose pages the host of a virtual machine may have
    to find first.
    """
    data = bytes(COPY_BYTES)
    return max(1.0, min(_copy_s(data) for _ in range(5)) / COPY_S)


def _copy_s(data: bytes) -> float:
    began = time.thread_time()
    bytearray(data)
    return time.thread_time() - began
