"""Answers of an encoder process that no working process gives."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from inferd.backends.echo.media import ECHO_PROJECTOR
from inferd.backends.media import MediaContent, MediaItem
from inferd.backends.media_process import ItemPiece, TextPiece
from inferd.backends.shared_memory import sealed_memory
from inferd.daemon.media.answers import BadAnswer, encoded_items, read_media

CONTENT = MediaContent(b"x" * 32)


def read(*pieces: TextPiece | ItemPiece) -> tuple[MediaItem, ...]:
    return read_media(pieces, CONTENT, "projector", "build").items


def test_the_tokens_are_those_of_the_pieces_in_order() -> None:
    found = read_media(
        [TextPiece([5, 6]), ItemPiece(4, 2, causal=False), TextPiece([7]), ItemPiece(3, 3)],
        *(CONTENT, "projector", "build"),
    )
    first, second = found.items
    tokens = found.media_tokens().tokens
    assert tokens == [5, 6, *first.entries(), 7, *second.entries()]
    assert (first.size, first.positions, first.index, second.index) == (4, 2, 0, 1)
    assert found.size_whole == 4, "only the first one is computed in one step"


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [TextPiece([1])],
        [ItemPiece(0, 0)],
        [ItemPiece(-1, -1)],
        [ItemPiece(4, 5)],
        [ItemPiece(4, 0)],
        [ItemPiece(1 << 30, 1)],
        [ItemPiece(4, 4), TextPiece([-3])],
        [ItemPiece(4, 4), TextPiece([1 << 31])],
        [ItemPiece(1, 1)] * 65,
    ],
)
def test_pieces_that_are_no_content_are_refused(pieces: Sequence[TextPiece | ItemPiece]) -> None:
    with pytest.raises(BadAnswer):
        read(*pieces)


def encode(size: int = 3, *, sealed: bool = True, count: int = 1, mrope: bool = False) -> int:
    """Check the answer with embeddings of *size* bytes for one item; return what it holds."""
    items = read(ItemPiece(3, 3))
    memory = sealed_memory([bytes(size)]) if sealed else os.memfd_create("unsealed")
    if not sealed:
        os.ftruncate(memory, size)
    facts = (
        ECHO_PROJECTOR
        if not mrope
        else type(ECHO_PROJECTOR)(
            kind="echo", images=True, sounds=True, width=ECHO_PROJECTOR.width, mrope=True
        )
    )
    try:
        found = encoded_items(items, [True] * count, [memory] * count, facts)
        return found[items[0].digest].size_bytes
    finally:
        os.close(memory)


def test_embeddings_have_the_size_of_their_item_and_its_positions() -> None:
    assert encode(3 * 4 * 4) == 48
    assert encode(3 * (4 * 4 + 16), mrope=True) == 96


def test_memory_of_another_size_that_can_change_or_is_missing_is_refused() -> None:
    for size in (0, 47, 49, 1 << 20):
        with pytest.raises(BadAnswer, match="bytes"):
            encode(size)
    with pytest.raises(BadAnswer, match="not of sealed memory"):
        encode(48, sealed=False)
    for count in (0, 2):
        with pytest.raises(BadAnswer, match="embeddings for"):
            encode(48, count=count)


def test_a_descriptor_of_a_file_is_refused() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(BadAnswer, match="not of sealed memory"):
            encoded_items(read(ItemPiece(3, 3)), [True], [reader], ECHO_PROJECTOR)
    finally:
        os.close(reader)
        os.close(writer)
