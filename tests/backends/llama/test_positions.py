"""Positions of entries in the slots of models with M-RoPE, compared with lists of all positions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.llama.kv.positions import SlotPositions, Span

PARTS = st.lists(
    st.one_of(
        st.integers(1, 5),  # tokens of a text
        st.integers(1, 9).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size))),
    ),
    max_size=6,
)
"""Texts by their size, and items by their size and the positions that they take."""


def built(parts: list[int | tuple[int, int]]) -> tuple[SlotPositions, list[int], list[int]]:
    """Return the positions of *parts*, as an object and as the position of each entry's cell, and
    the lengths that end inside an item. All cells of an item have its first position.
    """
    places, cells, inside, after = SlotPositions(), list[int](), list[int](), 0
    for part in parts:
        if isinstance(part, int):
            cells += range(after, after + part)
            after += part
            continue
        size, positions = part
        begin = len(cells)
        for count in range(1, size + 1):
            places.add(Span(begin, count, size, positions, 0))
        cells += [after] * size
        inside += range(begin + 1, begin + size)
        after += positions
    return places, [*cells, after], inside


@given(PARTS)
def test_each_entry_has_the_position_that_the_items_before_it_leave(
    parts: list[int | tuple[int, int]],
) -> None:
    places, positions, inside = built(parts)
    for length, position in enumerate(positions):
        assert places.after(length) == position
        assert places.last_cell(length) == (positions[length - 1] if length else -1)
        assert places.is_border(length) == (length not in inside)
        assert places.next_offset(length) == 0
    for position in range(positions[-1] + 1):
        borders = [n for n, p in enumerate(positions) if p >= position and n not in inside]
        assert places.least_length(position) == min(borders)


@given(PARTS, st.data())
def test_positions_that_are_cut_or_saved_are_those_of_the_beginning(
    parts: list[int | tuple[int, int]], data: st.DataObject
) -> None:
    places, positions, inside = built(parts)
    borders = [n for n in range(len(positions)) if n not in inside]
    keep = data.draw(st.sampled_from(borders))
    places.cut(keep)
    packed = places.pack()
    unpacked = SlotPositions.unpack(b"head" + packed + b"state", 4, keep)
    assert unpacked is not None and unpacked[1] == 4 + len(packed)
    for found in (places, unpacked[0]):
        assert [found.after(n) for n in range(keep + 1)] == positions[: keep + 1]
        assert found.after(keep + 3) == positions[keep] + 3
    assert SlotPositions.unpack(packed[:-1], 0, keep) is None
    if len(packed) > 4:
        assert SlotPositions.unpack(packed, 0, 0) is None


def test_a_part_of_an_item_continues_at_the_first_position_of_the_item() -> None:
    places = SlotPositions()
    places.add(Span(5, 4, 12, 4, 0))
    assert places.next_offset(9) == 4 and places.after(9) == 5 and places.last_cell(9) == 5
    found = SlotPositions.unpack(places.pack(), 0, 9)
    assert found is not None and found[0].next_offset(9) == 4
    assert SlotPositions.unpack(places.pack(), 0, 20) is None, "tokens behind a part of an item"
    places.add(Span(5, 12, 12, 4, 0))
    assert places.next_offset(17) == 0 and places.after(17) == 9


def test_damaged_positions_are_refused() -> None:
    wrong = [
        [Span(0, 0, 4, 2, 0)],
        [Span(0, 5, 4, 2, 0)],
        [Span(0, 4, 4, 0, 0)],
        [Span(0, 4, 4, 5, 0)],
        [Span(0, 4, 4, 2, 2)],
        [Span(0, 4, 4, 2, -1)],
        [Span(-1, 4, 4, 2, 0)],
        [Span(8, 4, 4, 2, 0)],
        [Span(0, 2, 4, 2, 0), Span(2, 4, 4, 2, 0)],
        [Span(2, 4, 4, 2, 0), Span(0, 2, 2, 2, 0)],
    ]
    for spans in wrong:
        assert SlotPositions.unpack(SlotPositions(spans).pack(), 0, 10) is None
    assert SlotPositions.unpack(b"\xff\xff\xff\x7f", 0, 10) is None
    assert SlotPositions.unpack(b"", 0, 10) is None
