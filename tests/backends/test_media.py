"""Entries of media in histories: their values, cut points, and the comparison of short items."""

from __future__ import annotations

import hashlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends import Chunk, media
from inferd.backends.batch import check_chunks
from inferd.backends.errors import BackendError, InvalidArgument, TooLarge
from inferd.backends.media import (
    SHORT_ENTRIES,
    MediaItem,
    ShortItems,
    begins_item,
    check_tokens,
    cut_point,
    has_short_item,
    items_of,
    text_tokens,
)

VOCAB_SIZE = 300


def item(content: bytes = b"pixels", size: int = 6, **other: str) -> MediaItem:
    fields = {"projector": "p", "preprocessing": "s", "build": "b"} | other
    return MediaItem.of_content(hashlib.sha256(content).digest(), size=size, **fields)


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
    others = [item(b"other"), item(size=7), item(projector="q"), item(preprocessing="t")]
    others += [item(build="c"), item(projector="ps", preprocessing="")]
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
    check_tokens(tokens, VOCAB_SIZE, [declared], 6)
    check_tokens([5, 299], VOCAB_SIZE)
    shortened = MediaItem(declared.digest[:8], 6)
    for items in ([], [other], [declared, declared], [shortened]):
        with pytest.raises(InvalidArgument):
            check_tokens(tokens, VOCAB_SIZE, items, 6)
    wrong = [[5, 7], tokens[:-2], [5, *declared.entries()[1:]], [*tokens, -1], [*tokens, 300]]
    for one in wrong:
        with pytest.raises(InvalidArgument):
            check_tokens(one, VOCAB_SIZE, [declared], 6)
    with pytest.raises(TooLarge, match="6 tokens; a batch holds 5"):
        check_tokens(tokens, VOCAB_SIZE, [declared], 5)


def test_a_context_that_computes_no_media_refuses_an_item() -> None:
    entries = item().entries()
    chunks = [Chunk(0, entries, 0, 0)]
    check_chunks(chunks, {0: 0}, 8, 8, VOCAB_SIZE, 1, media=True)
    with pytest.raises(BackendError, match="a token outside"):
        check_chunks(chunks, {0: 0}, 8, 8, VOCAB_SIZE, 1)


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
