"""A mapping of bounded size that forgets the oldest entries."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentDict(OrderedDict[K, V]):
    """The *size_max* entries that were assigned last. Reading an entry does not make it younger."""

    def __init__(self, size_max: int):
        super().__init__()
        self._size_max = size_max

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._size_max:
            self.popitem(last=False)
