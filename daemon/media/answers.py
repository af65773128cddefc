"""Checks of the answers of an encoder process, which has read untrusted bytes.

A worker maps the embeddings, so memory that could shrink would crash it.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...backends.batch import MediaFormat
from ...backends.fd_frames import DESCRIPTORS_MAX
from ...backends.media import MediaContent, MediaItem
from ...backends.media_process import ItemPiece, ProjectorFacts, TextPiece
from ...backends.shared_memory import sealed_bytes
from ...scheduler.messages import pack_tokens
from .caches import EncodedItem, ReadMedia

ENTRIES_MAX = 1 << 20
"""The tokens and entries of one content."""
_TOKEN_MAX = (1 << 31) - 1


class BadAnswer(Exception):
    """An answer that no working process gives."""


def read_media(
    pieces: Sequence[TextPiece | ItemPiece], content: MediaContent, projector: str, build: str
) -> ReadMedia:
    """Return the content that consists of *pieces*. *projector* and *build* are as in
    `MediaItem.of_content`.

    :raises BadAnswer: the pieces are not those of a content.
    """
    tokens, items, whole = list[int](), list[MediaItem](), 0
    for piece in pieces:
        if isinstance(piece, TextPiece):
            if not 0 <= min(piece.tokens, default=0) <= max(piece.tokens, default=0) <= _TOKEN_MAX:
                raise BadAnswer("a token is out of range")
            tokens += piece.tokens
        elif not 0 < piece.positions <= piece.size <= ENTRIES_MAX:
            raise BadAnswer(f"an item of {piece.size} entries at {piece.positions} positions")
        else:
            item = MediaItem.of_content(
                *(content, projector, build),
                index=len(items),
                size=piece.size,
                positions=piece.positions,
            )
            items.append(item)
            tokens += item.entries()
            whole = whole if piece.causal else max(whole, piece.size)
        if len(tokens) > ENTRIES_MAX:
            raise BadAnswer("too many tokens")
    if not 0 < len(items) <= DESCRIPTORS_MAX:
        raise BadAnswer(f"{len(items)} items")
    return ReadMedia(pack_tokens(tokens), tuple(items), whole)


def encoded_items(
    items: Sequence[MediaItem],
    causal: Sequence[bool],
    descriptors: Sequence[int],
    facts: ProjectorFacts,
) -> dict[bytes, EncodedItem]:
    """Return the embeddings of *items* by digest; the *descriptors* belong to them from then on.

    :raises BadAnswer: they are not the embeddings of these items.
    """
    if not len(items) == len(causal) == len(descriptors):
        raise BadAnswer(f"{len(descriptors)} embeddings for {len(items)} items")
    expected, found = MediaFormat(facts.width, facts.mrope, ENTRIES_MAX), {}
    for item, is_causal, descriptor in zip(items, causal, descriptors, strict=True):
        size_bytes = sealed_bytes(descriptor)
        if size_bytes < 0:
            raise BadAnswer("a descriptor is not of sealed memory")
        if size_bytes != expected.bytes_of(item.size):
            raise BadAnswer(f"{size_bytes} bytes for {item.size} entries of {expected.bytes_of(1)}")
        found[item.digest] = EncodedItem(descriptor, is_causal, size_bytes)
    return found
