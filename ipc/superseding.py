"""Requests of which only the newest one of each key counts, such as those of an editor's buffer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import anyio.lowlevel

SUPERSEDED = "a newer request with the same key has superseded this one"


class _UnderWay(NamedTuple):
    cancel: Callable[[], object]
    ended: anyio.Event


class NewestRequests:
    """The newest request of each key that has not ended. Owned by an event loop. It is bounded by
    the number of requests under way.
    """

    def __init__(self) -> None:
        self._newest: dict[Hashable, _UnderWay] = {}

    def __len__(self) -> int:
        return len(self._newest)

    @asynccontextmanager
    async def supersede(self, key: Hashable, cancel: Callable[[], object]) -> AsyncIterator[None]:
        """Cancel the previous request of *key*, wait for its end, and run this one, which *cancel*
        cancels if another one comes meanwhile.
        """
        before, now = self._newest.get(key), _UnderWay(cancel, anyio.Event())
        self._newest[key] = now
        try:
            if before is not None:
                before.cancel()
                # Shielded, so that a request that supersedes this one starts after all before it.
                with anyio.CancelScope(shield=True):
                    await before.ended.wait()
                await anyio.lowlevel.checkpoint_if_cancelled()
            yield
        finally:
            now.ended.set()
            if self._newest.get(key) is now:
                del self._newest[key]
