"""The contents that a model's encoder has read and encoded, so that none is encoded twice.

Entries are found by the scope of KV states (a user, or all users if `kv-share` says so), so that
neither the time nor the result of a request shows whether another user has sent the same content.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from ...backends.media import MediaContent, MediaItem, MediaTokens
from ...scheduler.messages import unpack_tokens

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
TOKENS_BYTES_MAX = 8 << 20
"""The bound on the packed tokens of contents; those of an image of 256 tokens have about 1.5 KB."""
ENCODED_MAX = 256
"""The most items of a model whose embeddings are kept: each has a descriptor of the daemon."""
_ENTRY_BYTES = 512
"""An estimate of an entry's memory beside its tokens."""


class LruCache(Generic[K, V]):
    """The *count_max* values used last, whose weights have a sum of at most *weight_max*. *dropped*
    is called with each value that leaves.
    """

    def __init__(
        self,
        weight_max: int,
        dropped: Callable[[V], object] = lambda _: None,
        count_max: float = math.inf,
    ):
        self.weight = 0
        self.weight_max, self.count_max = weight_max, count_max
        self._dropped = dropped
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: K) -> V | None:
        """Return a value and mark it as used, or return None."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, weight: int) -> None:
        """Add or replace a value. One that is heavier than all may be is dropped at once."""
        self.discard(key)
        self._entries[key] = value, weight
        self.weight += weight
        while self.weight > self.weight_max or len(self._entries) > self.count_max:
            self.discard(next(iter(self._entries)))

    def discard(self, key: K) -> None:
        """Drop a value, if there is one."""
        found = self._entries.pop(key, None)
        if found is not None:
            self.weight -= found[1]
            self._dropped(found[0])

    def clear(self) -> None:
        """Drop all values."""
        while self._entries:
            self.discard(next(iter(self._entries)))


class ReadMedia(NamedTuple):
    """A content as it was read: packed tokens and entries, and its items."""

    tokens: bytes
    items: tuple[MediaItem, ...]
    size_whole: int
    """The entries of the largest item that must be computed in one step, because they see each
    other; 0 if there is none.
    """

    def media_tokens(self) -> MediaTokens:
        """Return the tokens as a prompt has them."""
        return MediaTokens(unpack_tokens(self.tokens), self.items)


class EncodedItem(NamedTuple):
    """The embeddings of an item in sealed memory, and whether its entries see only those before
    them. The descriptor *fd* belongs to the holder.
    """

    fd: int
    causal: bool
    size_bytes: int

    def copy(self) -> EncodedItem:
        """Return the same embeddings with a descriptor of their own.

        :raises OSError: too many files are open.
        """
        return self._replace(fd=os.dup(self.fd))

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


class MediaCaches:
    """The contents that were read, and embeddings of at most *bytes_max*. Owned by the event
    loop.
    """

    def __init__(self, bytes_max: int):
        self.hits = 0
        """Embeddings that were found here."""
        self._read = LruCache[tuple[int, MediaContent], ReadMedia](TOKENS_BYTES_MAX)
        self._encoded = LruCache[tuple[int, bytes], EncodedItem](
            bytes_max, EncodedItem.close, ENCODED_MAX
        )
        self._projector = ""
        """The fingerprint of the projector by which contents were read."""

    def use_projector(self, fingerprint: str) -> None:
        """Drop what another projector has read and encoded."""
        if self._projector not in ("", fingerprint):
            self.clear()
        self._projector = fingerprint

    @property
    def size_bytes(self) -> int:
        """The memory of the embeddings."""
        return self._encoded.weight

    @property
    def items(self) -> int:
        """The number of items whose embeddings are here."""
        return len(self._encoded)

    def find_read(self, scope: int, content: MediaContent) -> ReadMedia | None:
        """Return a content that was read for *scope*."""
        return self._read.find((scope, content))

    def add_read(self, scope: int, content: MediaContent, read: ReadMedia) -> None:
        """Add a content that was read for *scope*."""
        self._read.put((scope, content), read, len(read.tokens) + _ENTRY_BYTES)

    def find_encoded(self, scope: int, digest: bytes) -> EncodedItem | None:
        """Return the embeddings of an item that was encoded for *scope*. They stay here."""
        found = self._encoded.find((scope, digest))
        self.hits += found is not None
        return found

    def add_encoded(self, scope: int, digest: bytes, encoded: EncodedItem) -> None:
        """Add embeddings, whose descriptor belongs to the cache from now on."""
        self._encoded.put((scope, digest), encoded, encoded.size_bytes)

    def clear(self) -> None:
        """Drop all."""
        self._read.clear()
        self._encoded.clear()
