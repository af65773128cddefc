"""The order in which KV states are evicted: GreedyDual-Size.

Cao & Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997. `KvStore` uses it for the states
in a worker's memory, daemon/models/kv_index.py for the files on disk.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class EvictionOrder(Generic[K]):
    """The values of cached states, by their keys.

    A state's value is the floor plus, per byte, the seconds to compute it again. The floor rises to
    the value of each state that is evicted, so that unused states fall behind. Of states with equal
    values the least recently used is evicted first. Each operation except `by_value` takes
    O(log n).
    """

    def __init__(self) -> None:
        self._floor = 0.0
        self._clock = 0
        self._ranks: dict[K, tuple[float, int]] = {}
        """The value of each state, and the clock at its last use."""
        self._keys: dict[int, K] = {}
        """The key of each state, by the clock at its last use."""
        self._heap: list[tuple[float, int]] = []
        """All ranks since the last cleanup; outdated ones are skipped. It holds no keys, which may
        be large."""

    def record_use(self, key: K, size: int, seconds: float) -> None:
        """Record a new state or the use of one."""
        self.remove(key)
        self._clock += 1
        rank = (self._floor + seconds / max(size, 1), self._clock)
        self._ranks[key], self._keys[self._clock] = rank, key
        heapq.heappush(self._heap, rank)
        if len(self._heap) > 2 * len(self._ranks) + 64:
            self._heap = list(self._ranks.values())
            heapq.heapify(self._heap)

    def remove(self, key: K) -> None:
        """Forget a state that was removed for another reason."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            del self._keys[rank[1]]

    def evict(self, key: K) -> None:
        """Forget a state, and raise the floor to its value."""
        self._floor = max(self._floor, self._ranks[key][0])
        self.remove(key)

    def evict_least(self) -> K:
        """Evict the least valuable state, which must exist; return its key."""
        while True:
            _, clock = heapq.heappop(self._heap)
            if clock in self._keys:
                key = self._keys[clock]
                self.evict(key)
                return key

    def by_value(self) -> list[K]:
        """Return all keys, the most valuable first."""
        return sorted(self._ranks, key=self._ranks.__getitem__, reverse=True)
