"""The memory of requests in flight: its size, and each user's bound."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferd.backends.errors import Busy
from inferd.ipc.server.request_bytes import (
    REQUEST_BYTES,
    WALKED_ITEMS,
    Charge,
    RequestBytes,
    Reserve,
    params_bytes,
    request_bytes,
)
from inferd.wire.frames import ITEMS_MAX

ADA, BOB = 1, 2


def grow(counts: RequestBytes, user: int, more: int, reserve: Reserve = Reserve.NONE) -> Charge:
    charge = Charge(counts, user)
    charge.grow(more, reserve)
    return charge


def memory_of(value: Any) -> int:
    """Return the memory of a value made of lists, maps, texts and numbers."""
    own = getsizeof(value)
    if isinstance(value, dict):
        return own + sum(memory_of(key) + memory_of(item) for key, item in value.items())
    return own + sum(map(memory_of, value)) if isinstance(value, list) else own


def test_a_user_at_the_bound_is_refused_until_a_request_has_ended() -> None:
    counts = RequestBytes(user_max=100, total_max=1000)
    first = grow(counts, ADA, 60)
    grow(counts, ADA, 40)
    with pytest.raises(Busy) as caught:
        grow(counts, ADA, 1)
    error = caught.value
    assert error.retryable and error.hint and error.data["retry_after_s"] > 0
    assert error.data["bound"] == "request-bytes-user-max"
    assert (error.data["bytes"], error.data["more"], error.data["bytes_max"]) == (100, 1, 100)
    assert counts.held_by(ADA) == 100, "the refused request is not counted"
    grow(counts, BOB, 100)
    first.end()
    first.end()
    assert counts.held_by(ADA) == 40
    grow(counts, ADA, 60)


def test_at_the_bound_results_small_requests_and_cancels_have_a_reserve_each() -> None:
    counts = RequestBytes(user_max=800, total_max=8000)
    request = grow(counts, ADA, 800)
    request.grow(100)
    with pytest.raises(Busy):
        request.grow(1)
    grow(counts, ADA, 100, Reserve.SMALL)
    with pytest.raises(Busy):
        grow(counts, ADA, 1, Reserve.SMALL)
    grow(counts, ADA, 100, Reserve.CANCEL)
    with pytest.raises(Busy):
        grow(counts, ADA, 1, Reserve.CANCEL)


def test_a_single_request_larger_than_the_bound_is_admitted() -> None:
    counts = RequestBytes(user_max=100, total_max=1000)
    large = grow(counts, ADA, 300)
    with pytest.raises(Busy):
        large.grow(1)
    large.shrink(250)
    large.grow(50, Reserve.NONE)
    assert counts.held_by(ADA) == large.size == 100


def test_many_users_stay_below_the_total_and_a_new_user_still_gets_some() -> None:
    counts = RequestBytes(user_max=64, total_max=256)
    for user in range(20):
        try:
            while True:
                grow(counts, user, 1)
        except Busy as exc:
            bound = exc.data["bound"]
    assert bound == "request-bytes-max"
    assert [counts.held_by(user) for user in range(4)] == [64, 64, 64, 32]
    assert counts.total <= 256
    grow(counts, 99, 1, Reserve.SMALL)


def test_the_bytes_that_a_request_has_freed_are_reported_at_its_end() -> None:
    counts, freed = RequestBytes(), list[int]()
    counts.on_freed = freed.append
    charge = grow(counts, ADA, 100)
    charge.shrink(30)
    assert not freed
    charge.end()
    charge.end()
    assert freed == [100] and counts.total == 0


@pytest.mark.parametrize(
    "value",
    [
        [[] for _ in range(ITEMS_MAX - 1)],
        [{} for _ in range(ITEMS_MAX - 1)],
        ["ab"] * (ITEMS_MAX - 1),
        [1.5] * (4 * ITEMS_MAX - 1000),
        list(range(300, 300 + 4 * ITEMS_MAX - 1000)),
        {str(number): "x" for number in range(ITEMS_MAX // 2 - 1)},
        ["x" * 4000] * 250,
        ["x" * 1_000_000 + "\U0001f600"],
    ],
    ids=["lists", "maps", "texts", "floats", "integers", "keys", "long texts", "wide text"],
)
def test_no_parameters_need_more_memory_than_is_counted(value: Any) -> None:
    frame = msgspec.msgpack.encode({"options": value})
    decoded = msgspec.msgpack.decode(frame)
    counted = params_bytes(decoded, len(frame))
    assert memory_of(decoded) - getsizeof(decoded) <= counted
    assert counted < 12 << 20


@given(
    st.recursive(
        st.integers(-(1 << 40), 1 << 40) | st.floats() | st.text() | st.binary() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_parameters_with_few_items_are_measured(value: Any) -> None:
    frame = msgspec.msgpack.encode({"value": value})
    decoded = msgspec.msgpack.decode(frame)
    assert params_bytes(decoded, len(frame)) == memory_of(decoded) - getsizeof(decoded)


def test_measuring_ends_at_a_number_of_items() -> None:
    few, many = list(range(WALKED_ITEMS - 1)), list(range(WALKED_ITEMS + 1))
    assert params_bytes([few], 5000) < 5000 * 40 < params_bytes([many], 5000)


def test_an_ordinary_text_counts_three_times_and_the_smallest_request_a_constant() -> None:
    text = "x" * 1_000_000
    assert request_bytes([text], 1_000_005) == pytest.approx(3_000_000, rel=0.01)
    assert request_bytes({"context": 1}, 40) == REQUEST_BYTES
