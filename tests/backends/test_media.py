"""Entries of media in histories: their values, cut points, and the comparison of short items."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends import Chunk, media
from inferd.backends.batch import MediaFormat, MediaInput, check_chunks
from inferd.backends.errors import BackendError, InvalidArgument, TooLarge
from inferd.backends.media import (
    SHORT_ENTRIES,
    MediaContent,
    MediaItem,
    ShortItems,
    begins_item,
    check_tokens,
    cut_point,
    has_short_item,
    items_of,
    media_parts,
    text_tokens,
)

VOCAB_SIZE = 300


def item(content: bytes = b"pixels", size: int = 6, **other: Any) -> MediaItem:
    fields: dict[str, Any] = {"projector": "p", "build": "b", "index": 0} | other
    part = MediaContent(hashlib.sha256(content).digest(), tokens_max=fields.pop("tokens_max", 0))
    return MediaItem.of_content(part, size=size, **fields)


@given(st.binary(max_size=8), st.integers(1, 2000))
def test_entries_are_int32_below_the_sentinel_and_show_where_the_item_begins(
    content: bytes, size: int
) -> None:
    entries = item(content, size).entries()
    assert len(entries) == size and max(entries) < -1
    assert array("i", array("i", entries).tobytes()) == array("i", entries)
    assert [begins_item(entry) for entry in entries] == [True] + [False] * (size - 1)


def test_entries_differ_with_all_on_which_they_depend_and_with_their_position() -> None:
    same = [item(), item()]
    others = [item(b"other"), item(size=7), item(projector="q"), item(tokens_max=9)]
    others += [item(build="c"), item(projector="pb", build=""), item(index=1), item(positions=2)]
    assert same[0].entries() == same[1].entries()
    entries = [one.entries() for one in (same[0], *others)]
    assert all(len(set(column)) == len(entries) for column in zip(*entries, strict=False))
    assert len(set(item(size=500).entries())) == 500


def test_items_next_to_each_other_stay_two_items() -> None:
    one, two = item(b"1", 1), item(b"2", 3)
    tokens = [5, *one.entries(), *two.entries(), 6, *one.entries()]
    assert items_of(tokens) == [(1, 1), (2, 3), (6, 1)]
    assert text_tokens(tokens) == [5, 6] and text_tokens([5, 6]) == [5, 6]
    assert items_of([]) == items_of([1, -1]) == []


def test_no_cut_is_inside_an_item() -> None:
    tokens = [5, *item(b"1", 3).entries(), *item(b"2", 2).entries(), 6, -1]
    cuts = [cut_point(tokens, length) for length in range(len(tokens) + 1)]
    assert cuts == [0, 1, 1, 1, 4, 4, 6, 7, 8]
    assert cut_point(tokens[:3], 3) == 3  # the end of a state, which was computed whole


def test_undeclared_and_other_entries_are_refused() -> None:
    declared, other = item(b"1", 6), item(b"2", 6)
    tokens = [5, *declared.entries(), 7]
    check_tokens(tokens, VOCAB_SIZE, [declared])
    check_tokens([5, 299], VOCAB_SIZE)
    shortened = MediaItem(declared.digest[:8], 6)
    for items in ([], [other], [declared, declared], [shortened]):
        with pytest.raises(InvalidArgument):
            check_tokens(tokens, VOCAB_SIZE, items)
    wrong = [[5, 7], tokens[:-2], [5, *declared.entries()[1:]], [*tokens, -1], [*tokens, 300]]
    for one in wrong:
        with pytest.raises(InvalidArgument):
            check_tokens(one, VOCAB_SIZE, [declared])


def media_input(size: int, **other: Any) -> MediaInput:
    fields = {"size": size, "positions": size} | other
    return MediaInput(memoryview(bytes(size * 8)), **fields)


def check_item(chunks: list[Chunk], *, mrope: bool = False, held: int = 0) -> None:
    check_chunks(chunks, {0: held, 1: 0}, 8, 16, VOCAB_SIZE, 2, MediaFormat(2, mrope, 7))


def test_a_model_that_reads_no_embeddings_refuses_an_item() -> None:
    entries = item().entries()
    chunk = Chunk(0, entries, 0, 1, media_input(6))
    check_item([chunk])
    for wanted in (None, MediaFormat(0, False, 0)):
        with pytest.raises(BackendError, match="reads no embeddings"):
            check_chunks([chunk], {0: 0}, 8, 8, VOCAB_SIZE, 1, wanted)
    with pytest.raises(BackendError, match="a token outside"):
        check_item([Chunk(0, entries, 0, 0)])


def test_entries_that_see_only_those_before_them_can_be_computed_in_parts() -> None:
    entries = item(size=12).entries()
    check_item([Chunk(0, entries[:8], 0, 0, media_input(12))])
    check_item([Chunk(0, entries[8:], 8, 1, media_input(12), 8)], held=8)
    places = memoryview(bytes(12 * 16))
    whole = Chunk(0, entries[:8], 0, 0, media_input(12, positions=3, places=places))
    check_item([whole], mrope=True)


def test_wrong_entries_and_embeddings_are_refused() -> None:
    entries, one, all_see = item().entries(), media_input(6), media_input(6, causal=False)
    larger = item(size=8).entries()
    wrong = [
        [Chunk(0, entries, 0, 0, one), Chunk(1, [5], 0, 0)],
        [Chunk(0, [5, *entries], 0, 0, one)],
        [Chunk(0, [*entries, 5], 0, 0, one)],
        [Chunk(0, entries[1:], 0, 0, one)],
        [Chunk(0, entries, 0, 0, one, 1)],
        [Chunk(0, entries[:3], 0, 0, one, -1)],
        [Chunk(0, entries[:3] + entries[:3], 0, 0, one)],
        [Chunk(0, entries, 0, 2, one)],
        [Chunk(0, entries[:3], 0, 1, one)],
        [Chunk(0, entries[:3], 0, 0, all_see)],
        [Chunk(0, larger, 0, 0, media_input(8, causal=False))],
        [Chunk(0, entries, 0, 0, media_input(5))],
        [Chunk(0, entries, 0, 0, MediaInput(memoryview(bytes(47)), 6, 6))],
        [Chunk(0, entries, 0, 0, media_input(6, places=memoryview(bytes(96))))],
        [Chunk(0, entries, 0, 0, media_input(6, positions=5))],
        [Chunk(0, [-1], 0, 0, media_input(1))],
    ]
    check_item([Chunk(0, entries, 0, 0, all_see)])
    for chunks in wrong:
        with pytest.raises(BackendError):
            check_item(chunks)
    places = memoryview(bytes(96))
    for positions in (0, 7):
        with pytest.raises(BackendError):
            check_item(
                [Chunk(0, entries, 0, 0, media_input(6, positions=positions, places=places))],
                mrope=True,
            )
    with pytest.raises(BackendError, match="bytes"):
        check_item([Chunk(0, entries, 0, 0, one)], mrope=True)


@pytest.mark.parametrize("token", [-1, -2, -(1 << 30), -(1 << 31), 300])
def test_a_number_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidArgument, match=f"token {token} is not in the vocabulary of 300"):
        check_tokens([1, token], VOCAB_SIZE)


def colliding(size: int) -> tuple[MediaItem, MediaItem]:
    """Return two items with the same entries, of which one has a digest that was searched for."""
    one = item(size=size)

    class Forged(MediaItem, frozen=True):
        def entries(self) -> list[int]:
            return one.entries()

    return one, Forged(b"f" * 32, size)


def test_short_items_are_compared_by_their_digests() -> None:
    known = ShortItems()
    one, forged = colliding(SHORT_ENTRIES)
    known.add([one, one, item(b"other", 1)])
    known.add([one])
    with pytest.raises(InvalidArgument, match="another size"):
        known.add([forged])
    known.add(colliding(SHORT_ENTRIES + 1))  # cannot be found, by 150 bits
    assert has_short_item([1, *one.entries()]) and not has_short_item(item(size=5).entries())


def test_the_known_short_items_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "SHORT_ITEMS_MAX", 2)
    known = ShortItems()
    known.add([item(b"1", 1), item(b"2", 1), item(b"3", 9)])
    with pytest.raises(TooLarge):
        known.add([item(b"4", 1)])
    known.add([item(b"1", 1)])


def test_media_parts_are_in_the_lists_of_messages_only() -> None:
    image, sound = {"type": "image", "data": b"a"}, {"type": "audio", "data": b"b"}
    content = [{"type": "text", "text": "image"}, image, sound]
    messages = [{"content": "image"}, {"content": content}, {"content": None}]
    assert list(media_parts(messages)) == [image, sound]
    for prompt in ("a text", b"bytes", [1, 2], [b"image", image], None):
        assert list(media_parts(prompt)) == []
