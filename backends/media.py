"""Images and sounds in histories: items, whose entries stand among the token ids.

A history is a list of int32. Token ids are not negative, −1 is free for searches, and the entries
of an item are below −1: as many as the model computes for it. An item's first entry is below all
others, so the borders of items can be seen in the list itself. Entries derive from everything on
which the computed embeddings depend. So equal entries mean equal KV states, and lists with items
are searched, shared, packed, hashed, stored and moved like any others.

Code that must not treat entries as tokens uses these functions. Clients cannot send entries: their
numbers are checked against the vocabulary, and a task declares its items (`TaskSpec.media`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec

from .errors import InvalidArgument, TooLarge

SHORT_ENTRIES = 4
"""The entries of an item have 30 bits of its digest each. This many or fewer are not enough to tell
items apart: another one with the same entries can be found by trying.
"""
SHORT_ITEMS_MAX = 100_000
"""Bound on the short items that `ShortItems` knows."""
MediaKind = Literal["image", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = get_args(MediaKind)
_BITS = 30
_FIRST_MAX = -(1 << _BITS) - 1
_OTHER_MAX = -2
_DIGEST_BYTES = hashlib.sha256().digest_size


def is_media(part: object) -> bool:
    """Return whether a part of a message is an image or a sound."""
    return isinstance(part, Mapping) and part.get("type") in MEDIA_KINDS


def media_parts(messages: object) -> Iterator[dict[str, Any]]:
    """Yield the images and sounds of messages, in their order. A raw prompt, such as a text or a
    list of token ids, has none.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Iterable):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from filter(is_media, content)


class MediaContent(msgspec.Struct, frozen=True, array_like=True):
    """The content of a part of a message: the SHA-256 of its bytes as the client sent them, and the
    settings of its preprocessing. The bytes are in the user's media store.
    """

    sha256: bytes
    kind: MediaKind = "image"
    tokens_max: int = 0
    """The most tokens that an image may have; 0 is the model's own bound."""


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """An image, a tile of one, or a sound as a model computes it: its *digest*, the number of its
    entries, and how many positions it takes in the context (0: as many as entries; M-RoPE models
    give an image fewer). It is number *index* of the items of a *content*, from which its
    embeddings can be computed again.
    """

    digest: bytes
    size: int
    positions: int = 0
    content: MediaContent = MediaContent(b"")
    index: int = 0

    @classmethod
    def of_content(
        cls,
        content: MediaContent,
        projector: str,
        build: str,
        *,
        index: int,
        size: int,
        positions: int = 0,
    ) -> MediaItem:
        """Return the item number *index* of a content, with *size* entries.

        *projector* is the fingerprint of the projector's file and of its settings, and *build* is
        that of the engine.
        """
        positions = 0 if positions == size else positions
        settings = f"{content.kind} {content.tokens_max} {index} {positions}"
        digest = hashlib.sha256()
        for part in (content.sha256, *(s.encode() for s in (projector, settings, build))):
            digest.update(struct.pack("<Q", len(part)) + part)
        digest.update(struct.pack("<Q", size))
        return cls(digest.digest(), size, positions, content, index)

    def entries(self) -> list[int]:
        """Return its entries, each of which derives from the digest and its position."""
        hashed = hashlib.shake_256(self.digest).digest(4 * self.size)
        values = [value >> 32 - _BITS for value in struct.unpack(f"<{self.size}I", hashed)]
        return [_FIRST_MAX - values[0], *(_OTHER_MAX - value for value in values[1:])]


class MediaTokens(msgspec.Struct, frozen=True, array_like=True):
    """A part of a message as a prompt has it: the entries of its *items*, in their order, with the
    tokens of text that the projector puts around them.
    """

    tokens: list[int]
    items: tuple[MediaItem, ...]


class MarkedMedia(msgspec.Struct, frozen=True, array_like=True):
    """A part that a text has at the place of a *mark*, which no user's text can contain. The packed
    *tokens* and entries replace the mark after the text around it was tokenized.
    """

    mark: str
    tokens: bytes


def begins_item(entry: int) -> bool:
    """Return whether *entry* of a history is the first one of an item."""
    return entry <= _FIRST_MAX


def is_entry(entry: int) -> bool:
    """Return whether *entry* of a history is one of an item, and not a token."""
    return entry <= _OTHER_MAX


def item_size(tokens: Sequence[int], begin: int) -> int:
    """Return the number of entries of the item that begins at *begin*; 0 if none does."""
    if begin >= len(tokens) or tokens[begin] > _FIRST_MAX:
        return 0
    end = begin + 1
    while end < len(tokens) and _FIRST_MAX < tokens[end] <= _OTHER_MAX:
        end += 1
    return end - begin


def items_of(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return where the items in *tokens* begin, and their sizes."""
    if not tokens or min(tokens) > _OTHER_MAX:
        return []
    begins = [index for index, entry in enumerate(tokens) if entry <= _FIRST_MAX]
    return [(begin, item_size(tokens, begin)) for begin in begins]


def cut_point(tokens: Sequence[int], length: int) -> int:
    """Return the greatest number, up to *length*, of first *tokens* that ends inside no item."""
    if length >= len(tokens) or not _FIRST_MAX < tokens[length] <= _OTHER_MAX:
        return length
    while length > 0 and tokens[length] > _FIRST_MAX:
        length -= 1
    return length


def text_tokens(tokens: Sequence[int]) -> Sequence[int]:
    """Return *tokens* without the entries of items, which have no text and no logits."""
    if not tokens or min(tokens) > _OTHER_MAX:
        return tokens
    return [token for token in tokens if token > _OTHER_MAX]


def has_short_item(tokens: Sequence[int]) -> bool:
    """Return whether *tokens* have an item that its entries alone do not identify."""
    return any(size <= SHORT_ENTRIES for _, size in items_of(tokens))


def check_tokens(tokens: Sequence[int], vocab_size: int, items: Sequence[MediaItem] = ()) -> None:
    """Check that *tokens* are in a vocabulary, except the entries of *items*, in their order.

    :raises InvalidArgument: a token is not in the vocabulary, or an item is not the declared one.
    """
    if min(tokens, default=0) < 0 and items:
        tokens = _without_items(tokens, items)
    elif items:
        raise InvalidArgument(f"{len(items)} media items are declared, and none is in the prompt")
    if not 0 <= min(tokens, default=0) <= max(tokens, default=0) < vocab_size:
        bad = next(t for t in tokens if not 0 <= t < vocab_size)
        raise InvalidArgument(f"token {bad} is not in the vocabulary of {vocab_size}")


def _without_items(tokens: Sequence[int], items: Sequence[MediaItem]) -> Sequence[int]:
    found = [list(tokens[begin : begin + size]) for begin, size in items_of(tokens)]
    if found != [item.entries() for item in items if _is_possible(item)]:
        raise InvalidArgument("the media items in the prompt are not the declared ones")
    return text_tokens(tokens)


def _is_possible(item: MediaItem) -> bool:
    return len(item.digest) == _DIGEST_BYTES and item.size > 0 and 0 <= item.positions <= item.size


class ShortItems:
    """The short items of one process, whose full digests are compared. KV states with such items
    stay in this process. Owned by one thread.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[int, ...], bytes] = {}

    def add(self, items: Sequence[MediaItem]) -> None:
        """Add *items*, unless they are long enough.

        :raises InvalidArgument: other content has the same entries.
        :raises TooLarge: there are too many.
        """
        for item in items:
            if item.size > SHORT_ENTRIES:
                continue
            entries = tuple(item.entries())
            if self._digests.setdefault(entries, item.digest) != item.digest:
                raise InvalidArgument(
                    "a media item cannot be distinguished from another one",
                    hint="send it in another size",
                )
            if len(self._digests) > SHORT_ITEMS_MAX:
                del self._digests[entries]
                raise TooLarge(
                    f"there were {SHORT_ITEMS_MAX} different short media items",
                    hint="unload the model and load it again",
                )
