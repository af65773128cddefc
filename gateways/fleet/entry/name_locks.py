"""Locks by name, each of which exists as long as something uses it."""

from __future__ import annotations

from weakref import WeakValueDictionary

import anyio


class NameLocks:
    """Locks by name. Owned by the entry's event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    def lock_of(self, name: str) -> anyio.Lock:
        """Return the lock of *name*."""
        return self._locks.setdefault(name, anyio.Lock())
