"""The return of memory to the system after large requests have ended."""

from __future__ import annotations

import asyncio
import gc

from ..backends.memory import return_free_memory

LARGE_BYTES = 64 << 10
"""Memory of a request that counts. Small requests leave many objects, so that the next collection
is near, and later requests use their memory again.
"""
FREED_BYTES_MIN = 1 << 20
"""A smaller amount of freed memory is not worth the time."""
DELAY_S = 2.0
"""The time from the first of the freed memory to its return, in which more is freed."""
COLLECTED_BYTES = 64 << 20
"""Memory of ended requests after which a collection follows without that delay."""


class FreedMemory:
    """Lives on the daemon's event loop.

    The tracebacks of a cancelled request keep its texts in reference cycles. These are few objects,
    so that the next collection may be far, and collecting them takes little time. The heap is
    returned in a thread; but allocations on the loop wait meanwhile, so this happens rarely.
    """

    def __init__(self) -> None:
        self._freed = self._uncollected = 0
        self._timer: asyncio.TimerHandle | None = None

    def note_freed(self, size: int) -> None:
        """Note that requests have freed *size* bytes."""
        if size < LARGE_BYTES:
            return
        self._freed += size
        self._uncollected += size
        loop = asyncio.get_running_loop()
        if self._uncollected >= COLLECTED_BYTES:
            self._uncollected = 0
            loop.call_soon(gc.collect)  # later, as frames of the caller still refer to the request
        if self._freed >= FREED_BYTES_MIN and self._timer is None:
            self._timer = loop.call_later(DELAY_S, self._return_memory)

    def _return_memory(self) -> None:
        self._freed, self._uncollected, self._timer = 0, 0, None
        gc.collect()
        asyncio.get_running_loop().run_in_executor(None, return_free_memory)
