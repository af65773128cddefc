"""Memory that sessions and graphs keep in the daemon between calls: its size, and users' bounds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from sys import getsizeof
from typing import Any, Protocol

from ...backends.errors import QuotaExceeded
from ...scheduler.owner import Owner
from .bounds import AdmissionBounds
from .label_shares import OwnerCounts, exceeds_share

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


class KeptBytesListener(Protocol):
    """The owner of the dormant sessions, which are deleted if a user keeps too much."""

    def kept_bytes_grew(self) -> None:
        """Note that a user's open sessions or graphs have become larger."""


class KeptBytes:
    """The bytes of open sessions and graphs, by user. Owned by the daemon's event loop.

    A *holder* is a session or a graph. Dormant sessions share the bound; `left_for_dormant` is the
    remainder.
    """

    def __init__(self, bounds: AdmissionBounds):
        self._bounds = bounds
        self._holders: dict[Hashable, tuple[Owner, int]] = {}
        """Owner and bytes."""
        self._open = OwnerCounts()
        self.listener: KeptBytesListener | None = None

    def open_bytes(self, user: int) -> int:
        """Return the bytes of a user's open sessions and graphs."""
        return self._open.of_user(user)

    def bytes_of(self, holder: Hashable) -> int:
        """Return the counted bytes of a session or graph."""
        return self._holders[holder][1] if holder in self._holders else 0

    def left_for_dormant(self, user: int) -> int:
        """Return the bytes that a user's dormant sessions may have."""
        return self._bounds.session_bytes_bound(user).limit - self.open_bytes(user)

    def check_growth(self, owner: Owner, more: int) -> None:
        """Check that a user's open sessions and graphs may become larger by *more* bytes.

        :raises QuotaExceeded: the bound, or the label's part of it, would be exceeded.
        """
        bound, kept = self._bounds.session_bytes_bound(owner.user), self.open_bytes(owner.user)
        is_over = more > 0 and kept + more > bound.limit
        if is_over or (more > 0 and exceeds_share(self._open, owner, more, bound.limit)):
            reserved = f", part of which is reserved for labels other than {owner.label!r}"
            raise QuotaExceeded(
                f"your open sessions and models in use take {kept} bytes; {more} more would exceed"
                f" the limit of {bound.limit}{'' if is_over else reserved}",
                hint="close sessions and unload models that are done, or use shorter inputs and"
                " options",
                data={"bound": bound.name, "bytes": kept, "more": more, "bytes_max": bound.limit},
            )

    def add_holder(self, holder: Hashable, owner: Owner, size: int) -> None:
        """Count a session or graph that was opened."""
        self._holders[holder] = owner, 0
        self.set_bytes(holder, size)

    def set_bytes(self, holder: Hashable, size: int) -> None:
        """Count the present size of a session or graph, unless it is not open."""
        if holder not in self._holders:
            return
        owner, before = self._holders[holder]
        self._holders[holder] = owner, size
        self._open.add(owner, size - before)
        if size > before and self.listener is not None:
            self.listener.kept_bytes_grew()

    def remove_holder(self, holder: Hashable) -> None:
        """Stop counting a session or graph."""
        owner, size = self._holders.pop(holder, (Owner(0), 0))
        self._open.add(owner, -size)
