"""The memory that values take."""

from __future__ import annotations

from collections.abc import Mapping
from sys import getsizeof
from typing import Any

TOKEN_BYTES = 36
"""Memory of a token id in a list: the number, and the reference to it."""
SESSION_BYTES = 8192
"""Memory of a session without a history and options."""
_CONTAINERS = (dict, list, tuple)


def memory_bytes(*values: Any) -> int:
    """Return the memory of values made of maps, lists, texts and numbers. A map or list that occurs
    several times counts once.

    The encoded size would be wrong by a factor of 60: an empty list is one byte in a frame.
    """
    total, seen, waiting = 0, set[int](), list[Any]([values])
    while waiting:
        container = waiting.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        parts = [*container, *container.values()] if isinstance(container, dict) else container
        total += sum(map(getsizeof, parts))
        waiting += [part for part in parts if isinstance(part, _CONTAINERS)]
    return total


class MemoryMeter:
    """Measures the same maps repeatedly. Each value is walked once, because it may be large. Its
    size is cached by its id; values are replaced, never changed.
    """

    def __init__(self) -> None:
        self._counted: dict[int, tuple[Any, int]] = {}
        """Values with their sizes, by their ids. They stay alive here, so that ids stay theirs."""

    def count_bytes(self, *maps: Mapping[str, Any]) -> int:
        """Return the memory of *maps*. A value that occurs several times counts once."""
        before, self._counted, total = self._counted, {}, 0
        for values in maps:
            total += getsizeof(values) + sum(map(getsizeof, values))
            for value in values.values():
                if id(value) not in self._counted:
                    found = before.get(id(value)) or (value, memory_bytes(value))
                    self._counted[id(value)] = found
                    total += found[1]
        return total
