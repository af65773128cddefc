"""Locks by name, each of which exists as long as something uses it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import anyio


class NameLocks:
    """Locks by name, at most *places* of them held at a time. Owned by the entry's event loop."""

    def __init__(self, places: float = math.inf) -> None:
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._limiter = anyio.CapacityLimiter(places)

    @asynccontextmanager
    async def holding(self, name: str) -> AsyncIterator[None]:
        """Hold the lock of *name* in the `with` block, and then a place."""
        async with self._locks.setdefault(name, anyio.Lock()), self._limiter:
            yield
