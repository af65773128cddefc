"""The nodes that have copies of sessions, as the entry knows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..entry.placing.homes import SessionKey

COPIES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """The copy of a session: the node that has the session, the one that has the copy, the stream
    and the number of the last change in it.
    """

    home: str
    follower: str
    stream: str
    number: int = 0
    model: str = ""
    is_current: bool = True
    """Whether the copy has all acknowledged changes."""


class CopyTable:
    """The places of copies by session. Owned by the entry's event loop."""

    def __init__(self) -> None:
        self._places: dict[SessionKey, CopyPlace] = {}
        self.counts = Counter[str]()
        """The numbers of copies by the node that has them."""

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[tuple[SessionKey, CopyPlace]]:
        return iter(list(self._places.items()))

    def find(self, key: SessionKey) -> CopyPlace | None:
        """Return the place of a session's copy, if it has one."""
        return self._places.get(key)

    def put(self, key: SessionKey, place: CopyPlace) -> None:
        """Note the place of a copy."""
        self.drop(key)
        self._places[key] = place
        self.counts[place.follower] += 1

    def drop(self, key: SessionKey) -> None:
        """Forget the place of a copy."""
        place = self._places.pop(key, None)
        if place is not None:
            self.counts[place.follower] -= 1

    @property
    def is_full(self) -> bool:
        """Whether no further copy can be noted."""
        return len(self._places) >= COPIES_MAX
