"""The media items of a history, found by their entries among its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..backends.errors import InvalidArgument
from ..backends.media import MediaItem, items_of

ITEM_BYTES = 600
"""Memory of a known item."""
_KEY_ENTRIES = 8
"""The first entries of an item, which have 240 bits of its digest, and its size identify it."""
_Key = tuple[int, ...]


class KnownItems:
    """Items by their entries. A value."""

    def __init__(self, items: Iterable[MediaItem] = ()):
        """Know these items.

        :raises InvalidArgument: two of them are so short that their entries are the same.
        """
        self._items: dict[_Key, MediaItem] = {}
        for item in items:
            if self._items.setdefault(_key_of(item), item).digest != item.digest:
                raise InvalidArgument(
                    "a media item cannot be distinguished from another one",
                    hint="send it in another size",
                )

    def __len__(self) -> int:
        return len(self._items)

    @property
    def all(self) -> tuple[MediaItem, ...]:
        """The items, each once."""
        return tuple(self._items.values())

    @property
    def contents(self) -> frozenset[bytes]:
        """The hashes of the contents to which the items belong."""
        return frozenset(item.content.sha256 for item in self._items.values())

    def items_in(self, tokens: Sequence[int]) -> tuple[MediaItem, ...]:
        """Return the items in *tokens*, in their order."""
        if not self._items:
            return ()
        return tuple(
            self._items[size, *tokens[begin : begin + min(size, _KEY_ENTRIES)]]
            for begin, size in items_of(tokens)
        )

    def with_items(self, items: Iterable[MediaItem], tokens: Sequence[int]) -> KnownItems:
        """Return these items and others, as far as they are in *tokens*.

        :raises InvalidArgument: two of them are so short that their entries are the same.
        """
        return KnownItems(KnownItems((*self.all, *items)).items_in(tokens))


NO_ITEMS = KnownItems()


def _key_of(item: MediaItem) -> _Key:
    size = min(item.size, _KEY_ENTRIES)
    first = msgspec.structs.replace(item, size=size)  # its entries do not depend on the size
    return item.size, *first.entries()
