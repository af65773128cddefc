"""The shape of frames: their depth, and the number of values in them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.wire.frames import ITEMS_MAX, NESTING_MAX, check_shape

RUN = 256
LEAVES: st.SearchStrategy[Any] = st.one_of(
    *(st.integers(-(2**63), 2**64 - 1), st.text(max_size=40), st.binary(max_size=300)),
    *(st.floats(), st.booleans(), st.none()),
)


@given(st.lists(st.sampled_from((list, dict)), max_size=2 * NESTING_MAX), st.binary(max_size=30))
@example([list] * NESTING_MAX, b"\x91" * 20)
@example([list, *[dict] * NESTING_MAX], b"")
def test_a_frame_nests_as_deep_as_the_bound(levels: list[type], leaf: bytes) -> None:
    value: Any = leaf
    for level in levels:
        value = [1, "text", value, leaf] if level is list else {"key": value, "leaf": leaf}
    frame = msgspec.msgpack.encode(value)
    if len(levels) > NESTING_MAX:
        with pytest.raises(InvalidArgument, match=f"more than {NESTING_MAX} levels"):
            check_shape(frame)
    else:
        check_shape(frame)


def depth(value: Any) -> int:
    """Return the depth of *value*; an empty list or map has none."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((1 + depth(item) for item in items), default=0)


@given(
    st.lists(
        st.tuples(st.lists(LEAVES | st.just([]), max_size=3), st.integers(0, 600), st.booleans()),
        max_size=NESTING_MAX + 2,
    )
)
@example([([b""], 256, True)] * NESTING_MAX)
@example([([1.5, []], 513, False)] * (NESTING_MAX + 1))
def test_the_depth_is_found_beside_texts_and_long_lists(
    levels: list[tuple[list[Any], int, bool]],
) -> None:
    value: Any = b"\x90" * (NESTING_MAX + 1)
    for leaves, numbers, in_map in levels:
        run = [*range(numbers)]
        value = {"leaves": leaves, "run": run, "value": value} if in_map else [*run, value, *leaves]
    frame = msgspec.msgpack.encode(value)
    if depth(value) > NESTING_MAX:
        with pytest.raises(InvalidArgument, match=f"more than {NESTING_MAX} levels"):
            check_shape(frame)
    else:
        check_shape(frame)


@pytest.mark.parametrize(
    "value",
    [
        [{}] * ITEMS_MAX,
        ["a"] * ITEMS_MAX,
        {f"{i:05}": 0 for i in range(ITEMS_MAX // 2)},
        [[[]] * 7 for _ in range(ITEMS_MAX // 8)],
        [*range(255), "end"] * (ITEMS_MAX // RUN + 2),
        [0] * (4 * ITEMS_MAX + RUN),
    ],
    ids=["maps", "texts", "keys", "arrays", "broken runs", "numbers"],
)
def test_a_frame_has_a_bounded_number_of_values(value: Any) -> None:
    with pytest.raises(TooLarge) as caught:
        check_shape(msgspec.msgpack.encode(value))
    assert caught.value.data == {"items_max": ITEMS_MAX}


@pytest.mark.parametrize("first", [0, 1000, 100_000, 1 << 40])
def test_long_lists_of_numbers_count_as_a_quarter(first: int) -> None:
    size = 4 * ITEMS_MAX - RUN * RUN
    check_shape(msgspec.msgpack.encode([1, 1, "resume", {"tokens": [first] * size}]))
    check_shape(msgspec.msgpack.encode([0.5] * size))


@given(st.binary(max_size=60), st.integers(0, 2 * NESTING_MAX))
def test_any_bytes_are_walked_to_their_end(data: bytes, headers: int) -> None:
    try:
        check_shape(b"\x92" * headers + data)
    except InvalidArgument:
        assert headers or len(data) > NESTING_MAX
